"""Drift detection: a significant fall of a topic's live acceptance. Pure.

Two exponential means over requests, a fast and a slow one: drift begins when the fast one is well
below the slow one, and ends at a second, lower threshold, so that it does not flicker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.actors.weights.draft_outcomes import DraftOutcome


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
    _seen: int = 0

    def add(self, outcome: DraftOutcome) -> bool:
        """Count a finished request; True if drift begins with it.

        Failed drafts, impossible counts and requests without drafts are ignored.
        """
        if outcome.failed or not outcome.possible or outcome.rounds < 1:
            return False
        rate = outcome.accepted / outcome.rounds
        self._fast = _moved(self._fast, rate, min(self._seen, self.settings.fast))
        self._slow = _moved(self._slow, rate, min(self._seen, self.settings.slow))
        self._seen += 1
        return self._decide()

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
            return DriftStatus()
        fast, slow = round(self._fast, 4), round(self._slow, 4)
        return DriftStatus(self.drifting, fast, slow, self._seen)


def _moved(mean: float, rate: float, memory: float) -> float:
    """An exponential mean after another request; a plain mean at first."""
    return rate if memory <= 0.0 else (memory * mean + rate) / (memory + 1.0)
