"""What drafting costs: a part per round, a part per step, and the reading of prompts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.actors.decoding.costs import OUTLIER, Measured, StepCosts
from paceline.actors.decoding.reading import ReadingCosts, Reads

_WINDOW = 200.0
# Observations that the profile counts as: much for what a step costs, next to nothing for what a
# round costs beside its steps, of which it knows nothing.
_SLOPE_PRIOR, _FIXED_PRIOR = 20.0, 0.01
_LEAST_SLOPE = 0.2
_NONE = Reads()


@dataclass(slots=True)
class _Line:
    """Decayed least squares of seconds by profiled seconds: ``fixed + slope * profiled``."""

    n: float = 0.0
    x: float = 0.0
    xx: float = 0.0
    y: float = 0.0
    xy: float = 0.0
    fixed: float = 0.0
    slope: float = 1.0

    def observe(self, profiled: float, seconds: float) -> None:
        keep = 1.0 - 1.0 / _WINDOW
        self.n = keep * self.n + 1.0
        self.x = keep * self.x + profiled
        self.xx = keep * self.xx + profiled * profiled
        self.y = keep * self.y + seconds
        self.xy = keep * self.xy + profiled * seconds
        prior = _SLOPE_PRIOR * self.xx / self.n
        n, xx, xy = self.n + _FIXED_PRIOR, self.xx + prior, self.xy + prior
        determinant = n * xx - self.x * self.x
        self.fixed = (self.y * xx - self.x * xy) / determinant
        self.slope = (n * xy - self.x * self.y) / determinant
        if self.fixed < 0.0:
            self.fixed, self.slope = 0.0, xy / xx
        self.slope = max(self.slope, _LEAST_SLOPE)


class DraftCosts:
    """Seconds of a round's drafting by rows, experts and steps.

    Were the time of a round simply divided by its steps, what a round costs beside them would be
    charged to every further step: after short drafts, long ones would look dear for ever.
    """

    def __init__(
        self, profile: Mapping[tuple[int, int], float], reading: ReadingCosts | None = None
    ) -> None:
        """Start from the seconds of one step, a full grid ``{(rows, experts): seconds}``.

        Args:
            profile: the grid.
            reading: what reading prompts costs; None is nothing.
        """
        self._steps = StepCosts(profile)
        self._line = _Line()
        self._measured: dict[tuple[int, int, int], Measured] = {}
        self._observed = 0
        self.reading = reading or ReadingCosts()

    def seconds(self, rows: int, experts: int, steps: int) -> float:
        """The expected time of drafting ``steps`` tokens for ``rows`` rows; 0 steps take none."""
        if not steps:
            return 0.0
        known = self._measured.get((rows, experts, steps))
        if known is not None and known.trusted(self._observed):
            return known.seconds
        return self._line.fixed + self._line.slope * steps * self._steps.profiled(rows, experts)

    def observe(
        self, rows: int, experts: int, steps: int, seconds: float, reads: Reads = _NONE
    ) -> None:
        """Take a round's drafting time.

        Args:
            rows: that drafted.
            experts: of these rows.
            steps: 0 where nothing was drafted.
            seconds: all of it.
            reads: what was read in it; where there is something it says what reading costs.
        """
        expected = self.seconds(rows, experts, steps)
        if reads.tokens:
            self.reading.read(reads, seconds - expected)
        elif steps:
            size = rows, experts, steps
            seconds = min(seconds, (OUTLIER if size in self._measured else 1.0) * expected)
            self._observed += 1
            first = Measured(seconds, 0, self._observed)
            self._measured.setdefault(size, first).take(seconds, self._observed)
            self._line.observe(steps * self._steps.profiled(rows, experts), seconds)
