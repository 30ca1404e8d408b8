"""A real engine that follows a real registry as drafts do, in one process and without a clock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from engines import engine_of, request, run, served

from paceline.actors.speculation.pending_updates import RemoveCandidate, SwapWeights
from paceline.actors.weights.flat_weights import unflatten
from paceline.actors.weights.registry import WeightRegistry


class Serving:
    """Serves greedy requests with the expert sql; each reports its outcome to the registry."""

    def __init__(self, target: Any, draft: Any, share: float, registry: WeightRegistry) -> None:
        drafts = {"sql": draft(), "sql@candidate": draft()}
        models = {name: served(model) for name, model in drafts.items()}
        self.engine = engine_of(served(target), [models], canary_share=share, max_num_seqs=8)
        self.registry = registry
        self.rates: list[tuple[int, float]] = []  # per request: version, acceptance
        self.texts: list[list[int]] = []
        self._known: dict[str, int] = {}
        self._served = 0

    def follow(self) -> None:
        """Take what the registry announces."""
        changes = asyncio.run(self.registry.wait_for_changes(self._known, None, 0.001))
        for slot, new in changes.weights.items():
            if new.reference is None:
                self.engine.updates.put(RemoveCandidate(slot))
            else:
                state = unflatten(new.reference)
                self.engine.updates.put(SwapWeights(slot, new.weight_version, state))
            self._known[slot] = new.weight_version

    def serve(self, prompts: Iterable[list[int]], at_once: int = 8, max_tokens: int = 16) -> None:
        """Answer prompts, so many at a time, and report between them."""
        waiting = list(prompts)
        while waiting:
            batch, waiting = waiting[:at_once], waiting[at_once:]
            self.follow()
            asked = [
                request(f"r{self._served + i}", tokens, draft="sql", max_tokens=max_tokens)
                for i, tokens in enumerate(batch)
            ]
            self._served += len(batch)
            outputs = run(self.engine, asked)
            for own in asked:
                parts = outputs[own.request_id]
                self.texts.append([t for part in parts for t in part.chunk.token_ids])
                outcome = parts[-1].outcome
                if outcome is not None:
                    self.registry.report([outcome])
                    self.rates.append((outcome.weight_version, outcome.accepted / outcome.rounds))


def mean_rate(rates: Iterable[tuple[int, float]]) -> float:
    values = [rate for _, rate in rates]
    return sum(values) / len(values)
