"""Drift detection: a significant fall of a topic's live acceptance. Pure.

Two exponential means over requests, a fast and a slow one: drift begins when the fast one is well
below the slow one, and ends at a second, lower threshold, so that it does not flicker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """Conditions of drift.

    Attributes:
        fast: memory of the fast mean, requests.
        slow: memory of the slow mean, requests.
        fall: of acceptance, slow minus fast, at which drift begins.
        recovered: fall at which it ends; below ``fall``.
        min_requests: seen before drift can begin.
    """

    fast: float = 24.0
    slow: float = 240.0
    fall: float = 0.08
    recovered: float = 0.03
    min_requests: int = 48


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """A topic's live acceptance.

    Attributes:
        drifting: see DriftSettings.
        fast: the fast mean, None before the first request.
        slow: the slow mean, likewise.
        requests: seen.
    """

    drifting: bool
    fast: float | None
    slow: float | None
    requests: int


@dataclass(slots=True)
class Drift:
    """Drift detector of one topic, from counters that may restart.

    What they count before the first reading is not recent traffic.
    """

    settings: DriftSettings
    drifting: bool = False
    _fast: float = math.nan
    _slow: float = math.nan
    _seen: int = 0
    _counters: tuple[int, int, int] | None = None

    def update(self, requests: int, rounds: int, accepted: int) -> bool:
        """Take the present counters; True if drift begins with them.

        Args:
            requests: finished ones.
            rounds: of these requests, with a drafted first position.
            accepted: of these rounds, with an accepted one.
        """
        now = (requests, rounds, accepted)
        before, self._counters = self._counters, now
        if before is None:
            return False
        if any(count < earlier for count, earlier in zip(now, before, strict=True)):
            before = (0, 0, 0)  # the counters restarted
        new_requests, new_rounds = requests - before[0], rounds - before[1]
        if new_requests < 1 or new_rounds < 1:
            return False
        self._take(new_requests, (accepted - before[2]) / new_rounds)
        return self._decide()

    def _take(self, requests: int, rate: float) -> None:
        before = self._seen
        self._seen += requests
        self._fast = _moved(self._fast, rate, requests, min(before, self.settings.fast))
        self._slow = _moved(self._slow, rate, requests, min(before, self.settings.slow))

    def _decide(self) -> bool:
        fall = self._slow - self._fast
        if self.drifting:
            self.drifting = fall >= self.settings.recovered
            return False
        self.drifting = self._seen >= self.settings.min_requests and fall > self.settings.fall
        return self.drifting

    def status(self) -> DriftStatus:
        """The means and their requests."""
        if not self._seen:
            return DriftStatus(drifting=False, fast=None, slow=None, requests=0)
        fast, slow = round(self._fast, 4), round(self._slow, 4)
        return DriftStatus(self.drifting, fast, slow, self._seen)


def _moved(mean: float, rate: float, requests: int, memory: float) -> float:
    """An exponential mean after ``requests`` more at ``rate``; a plain mean at first."""
    if memory <= 0.0:
        return rate
    keep = (memory / (memory + 1.0)) ** requests
    return keep * mean + (1.0 - keep) * rate
