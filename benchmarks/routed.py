"""Requests to one engine, each with a draft of its own, and what speculation did for each."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prompts import Prompt

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import (
    FAILED,
    GenerationRequest,
    SamplingParams,
    SpeculativeStats,
)
from paceline.actors.replay.record import ReplayRecord

_RESAMPLES = 2000


@dataclass(slots=True)
class Routed:
    """One run: per prompt output tokens and figures, and its seconds."""

    outputs: list[list[int]]
    stats: list[SpeculativeStats]
    seconds: float = 0.0
    records: list[ReplayRecord] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(map(len, self.outputs))

    def facts(self) -> dict[str, Any]:
        """Acceptance and speed."""
        drafted = sum(s.num_draft_tokens for s in self.stats)
        accepted = sum(s.num_accepted_draft_tokens for s in self.stats)
        return {
            "mean_acceptance_length": mean_length(self.stats),
            "acceptance_rate": accepted / drafted if drafted else None,
            "tokens_per_s": self.num_tokens / self.seconds,
        }


def mean_length(stats: Sequence[SpeculativeStats]) -> dict[str, float]:
    """Tokens per speculative round over all requests, with a 95 % bootstrap over requests.

    Zeros where there were no rounds.
    """
    steps = np.array([s.num_spec_steps for s in stats], dtype=np.float64)
    accepted = np.array([s.num_accepted_draft_tokens for s in stats], dtype=np.float64)
    if steps.sum() == 0:
        return {"mean": 0.0, "low": 0.0, "high": 0.0}
    picks = np.random.default_rng(0).integers(len(stats), size=(_RESAMPLES, len(stats)))
    means = 1.0 + accepted[picks].sum(1) / np.maximum(steps[picks].sum(1), 1.0)
    low, high = np.percentile(means, [2.5, 97.5])
    return {
        "mean": float(1.0 + accepted.sum() / steps.sum()),
        "low": float(low),
        "high": float(high),
    }


class Runner:
    """Keeps ``batch`` greedy requests in flight as long as there are so many."""

    def __init__(self, engine: Engine, max_tokens: int) -> None:
        """Take an engine, and the length of answers."""
        self._engine = engine
        self._max_tokens = max_tokens
        self._runs = itertools.count()

    def run(
        self, prompts: Sequence[Prompt], drafts: Sequence[str], batch: int, *, store: bool = False
    ) -> Routed:
        """Answer all prompts, each by its own draft; ``store`` keeps their records.

        Raises:
            RuntimeError: where a request ends with an error.
        """
        run, sampling = next(self._runs), SamplingParams(self._max_tokens, temperature=0.0)
        requests = [
            GenerationRequest(
                f"{run}/{i}", p.token_ids, sampling, topic=p.topic, draft=draft, store=store
            )
            for i, (p, draft) in enumerate(zip(prompts, drafts, strict=True))
        ]
        place = {request.request_id: i for i, request in enumerate(requests)}
        nothing = SpeculativeStats("", 0)
        found = Routed([[] for _ in requests], [nothing for _ in requests])
        waiting, began = iter(requests), time.perf_counter()
        for request in itertools.islice(waiting, batch):
            self._engine.add(request)
        while self._engine.has_work:
            for output in self._engine.step():
                at = place[output.request_id]
                found.outputs[at].extend(output.chunk.token_ids)
                if output.record is not None:
                    found.records.append(output.record)
                if output.chunk.finish_reason is None:
                    continue
                if output.chunk.finish_reason in FAILED:
                    raise RuntimeError(f"request {output.request_id} ended with an error")
                found.stats[at] = output.chunk.speculative or nothing
                if (following := next(waiting, None)) is not None:
                    self._engine.add(following)
        found.seconds = time.perf_counter() - began
        return found
