"""Paceline's engine, driven in this process as the target replica's thread drives it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prompts import Prompt
from runs import Drafted, Run

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import FINISH_ERROR, GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings


def load_engine(
    target: Path,
    experts: Mapping[str, Path],
    *,
    dtype: str,
    threads: int,
    rows: int,
    max_model_len: int,
    k: int | None,
) -> Engine:
    """An engine for ``rows`` requests at once; ``k`` None has the controller choose."""
    settings = TargetSettings(
        str(target),
        {topic: str(path) for topic, path in experts.items()},
        dtype=dtype,
        num_threads=threads,
        max_num_seqs=rows,
        max_model_len=max_model_len,
        num_speculative_tokens=k,
        warm_up=True,
        prefix_cache=False,  # prompts come back in every setting
        seed=1,
    )
    engine, _, _ = build_engine(settings)
    return engine


class Served:
    """Requests to an engine, ``batch`` of them in flight as long as there are so many."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        k: int | None,
        draft_of: Callable[[str], str] = lambda topic: topic,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take an engine.

        Args:
            name: of the variant.
            engine: may be shared by variants that do not run at the same time.
            k: tokens drafted per round; None leaves it to the engine.
            draft_of: the draft for a topic's prompts.
            clock: seconds of a run; on one thread the processor's own tell less of neighbours.
        """
        self.name = name
        self._engine = engine
        self._k = k
        self._draft_of = draft_of
        self._clock = clock
        self._ids = itertools.count()

    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """See Variant.

        Raises:
            RuntimeError: where a request ends with an error.
        """
        waiting = self._requests(prompts, temperature, max_tokens)
        outputs: dict[str, list[int]] = {request.request_id: [] for request in waiting}
        drafted = Drafted(drafted=0)
        began = self._clock()
        for request in waiting[:batch]:
            self._engine.add(request)
        following = iter(waiting[batch:])
        while self._engine.has_work:
            for output in self._engine.step():
                outputs[output.request_id].extend(output.chunk.token_ids)
                drafted.by_round.update(output.chunk.rounds)
                if output.chunk.finish_reason is None:
                    continue
                if output.chunk.finish_reason == FINISH_ERROR:
                    raise RuntimeError(f"request {output.request_id} ended with an error")
                if (stats := output.chunk.speculative) is not None:
                    drafted.add(
                        Drafted(
                            stats.num_spec_steps,
                            stats.num_accepted_draft_tokens,
                            stats.num_draft_tokens,
                        )
                    )
                if (successor := next(following, None)) is not None:
                    self._engine.add(successor)
        return Run(list(outputs.values()), self._clock() - began, drafted)

    def _requests(
        self, prompts: Sequence[Prompt], temperature: float, max_tokens: int
    ) -> list[GenerationRequest]:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        run = next(self._ids)
        return [
            GenerationRequest(
                f"{self.name}/{run}/{i}",
                prompt.token_ids,
                sampling,
                topic=prompt.topic,
                draft=self._draft_of(prompt.topic),
                num_speculative_tokens=self._k,
                store=False,
            )
            for i, prompt in enumerate(prompts)
        ]
