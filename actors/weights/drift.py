"""Drift detection: a significant fall of a topic's live acceptance. Pure.

Two exponential means over requests, a fast and a slow one: drift begins when the fast one is well
below the slow one, and ends at a second, lower threshold, so that it does not flicker. Requests
count by their rounds, for the same reason: the acceptance of a short answer is mostly chance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.actors.weights.draft_outcomes import DraftOutcome


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """Conditions of drift.

    Attributes:
        fast: memory of the fast mean, rounds.
        slow: memory of the slow mean, rounds.
        fall: of acceptance, slow minus fast, at which drift begins.
        recovered: fall at which it ends; below ``fall``.
        min_rounds: seen before drift can begin.
        max_rounds: of a request that count; they are correlated, and more of them say little more.
    """

    fast: float = 480.0
    slow: float = 4_800.0
    fall: float = 0.08
    recovered: float = 0.03
    min_rounds: int = 960
    max_rounds: int = 20


@dataclass(frozen=True, slots=True)
class DriftStatus:
    """A topic's live acceptance.

    Attributes:
        drifting: see DriftSettings.
        fast: the fast mean, None before the first request.
        slow: the slow mean, likewise.
        requests: drafted ones that were seen.
    """

    drifting: bool = False
    fast: float | None = None
    slow: float | None = None
    requests: int = 0


@dataclass(slots=True)
class Drift:
    """Drift detector of one topic."""

    settings: DriftSettings = field(default_factory=DriftSettings)
    drifting: bool = False
    _fast: float = math.nan
    _slow: float = math.nan
    _requests: int = 0
    _rounds: int = 0  # that count

    def add(self, outcome: DraftOutcome) -> bool:
        """Count a finished request; True if drift begins with it.

        Failed drafts, impossible counts and requests without drafts are ignored.
        """
        if outcome.failed or not outcome.possible or outcome.rounds < 1:
            return False
        rate = outcome.accepted / outcome.rounds
        rounds = min(outcome.rounds, self.settings.max_rounds)
        self._fast = _moved(self._fast, rate, rounds, min(self._rounds, self.settings.fast))
        self._slow = _moved(self._slow, rate, rounds, min(self._rounds, self.settings.slow))
        self._requests += 1
        self._rounds += rounds
        return self._decide()

    def _decide(self) -> bool:
        fall = self._slow - self._fast
        if self.drifting:
            self.drifting = fall >= self.settings.recovered
            return False
        self.drifting = self._rounds >= self.settings.min_rounds and fall > self.settings.fall
        return self.drifting

    def status(self) -> DriftStatus:
        """The means and their requests."""
        if not self._requests:
            return DriftStatus()
        fast, slow = round(self._fast, 4), round(self._slow, 4)
        return DriftStatus(self.drifting, fast, slow, self._requests)


def _moved(mean: float, rate: float, rounds: int, memory: float) -> float:
    """An exponential mean after another request; a plain mean at first."""
    return rate if memory <= 0.0 else (memory * mean + rounds * rate) / (memory + rounds)
