"""Time of a round by phase, measured by wrapping the engine's parts."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.actors.engine import engine as engine_module
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.draft_runner import DraftRunner
from paceline.actors.speculation.eagle import EagleRunner

PREFILL, DRAFT, PROPOSE = "prefill", "draft forwards", "propose, rest"
VERIFY, SAMPLE, EMIT, REST = "verify forward", "sample", "emit", "rest"
FINITE = "finite check"
PHASES = (DRAFT, PROPOSE, VERIFY, SAMPLE, FINITE, EMIT, REST)


class PhaseClock:
    """Seconds per phase, each without those that it calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock
        self._running: list[str] = []
        self._since = 0.0

    def _charge(self) -> None:
        now = self._clock()
        if self._running:
            name = self._running[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time inside is this phase's; all of a prefill is prefill."""
        self._charge()
        self._running.append(PREFILL if PREFILL in self._running else name)
        try:
            yield
        finally:
            self._charge()
            self._running.pop()

    def wrap(self, function: Callable[..., Any], name: Callable[[Any], str]) -> Callable[..., Any]:
        """The function, timed under ``name(its first argument)``."""

        @functools.wraps(function)
        def timed(first: Any, *args: Any, **options: Any) -> Any:
            with self.phase(name(first)):
                return function(first, *args, **options)

        return timed


@contextmanager
def watched(engine: Engine) -> Iterator[PhaseClock]:
    """Time the phases of an engine's rounds for as long as this is open.

    One engine at a time: classes are wrapped, and every other runner counts as a draft's.

    Raises:
        AttributeError: the engine no longer has the parts that are wrapped here.
    """
    clock = PhaseClock()
    target: Any = engine._runner

    def forward_of(runner: Any) -> str:
        return VERIFY if runner is target else DRAFT

    names: list[tuple[Any, str, Callable[[Any], str]]] = [
        (Engine, "step", lambda _: REST),
        (Engine, "_emit", lambda _: EMIT),
        (DraftRunner, "propose", lambda _: PROPOSE),
        (ModelRunner, "prefill", lambda _: PREFILL),
        (ModelRunner, "forward", forward_of),
        (ModelRunner, "verify", forward_of),
        (EagleRunner, "step", lambda _: DRAFT),
        (EagleRunner, "draft_greedy", lambda _: DRAFT),
        (engine_module, "rejection_sample", lambda _: SAMPLE),
        (engine_module, "non_finite_positions", lambda *_: FINITE),
    ]
    originals = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in names]
    for owner, attribute, name in names:
        setattr(owner, attribute, clock.wrap(getattr(owner, attribute), name))
    try:
        yield clock
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Each phase's part of all rounds' time, prefill left out; sums to 1."""
    total = sum(seconds.get(phase, 0.0) for phase in PHASES)
    return {phase: seconds.get(phase, 0.0) / total for phase in PHASES}


def overhead(split: dict[str, float]) -> float:
    """Part of a round that is spent outside the two models' forwards."""
    return 1.0 - split[DRAFT] - split[VERIFY]
