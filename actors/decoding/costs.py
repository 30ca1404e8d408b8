"""What rounds cost: step times, profiled at the start and corrected by what is measured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SMOOTHING = 0.1
OUTLIER = 1.5
_TRUSTED_AFTER = 3
_FORGOTTEN_AFTER = 500
# Of what a settled size takes longer than expected, the machine's pace gets most at once: it
# changes from one second to the next and concerns all sizes, what a size itself takes does not.
_PACE, _OWN = 0.1, 0.02
_SETTLED_AFTER = 20
_FAR = 1e3  # no machine's pace goes beyond; a clock that stands still must not bring it to nothing


@dataclass(slots=True)
class Measured:
    """Smoothed seconds of one size.

    Attributes:
        seconds: that it takes, at the pace 1 where there is one.
        count: how often it was measured.
        at: observations of any size until the last one of this.
    """

    seconds: float
    count: int
    at: int

    def trusted(self, now: int) -> bool:
        """Whether it was measured often and lately; ``now`` counts observations of any size."""
        return self.count >= _TRUSTED_AFTER and now - self.at <= _FORGOTTEN_AFTER

    def take(self, seconds: float, now: int, smoothing: float = _SMOOTHING) -> None:
        """A further measurement; the longer ago the last one, the less that one says."""
        age = min((now - self.at) * _SMOOTHING, 5.0)
        share = max(1.0 - (1.0 - smoothing) ** max(age, 1.0), 1.0 / (self.count + 1))
        self.seconds += share * (seconds - self.seconds)
        self.count, self.at = self.count + 1, now


class StepCosts:
    """Seconds of a step by two sizes (batch rows, and tokens or experts).

    The first time of a size counts as no more than was expected: it holds what is done once, the
    making of code for products of that size above all.

    A size that was measured often and lately has its own smoothed time, times the machine's pace:
    that is learnt from all such sizes, so that one which is looked at now and then keeps up with
    those that run all the time. Any other is interpolated from the profile and scaled by how the
    latest measured ones compare to it: neither what was never tried nor what was last seen on a
    slower machine must look cheap or dear.
    """

    def __init__(self, profile: Mapping[tuple[int, int], float]) -> None:
        """Start from a full grid of positive seconds, ``{(a, b): seconds}``."""
        self._rows = sorted({rows for rows, _ in profile})
        self._columns = sorted({column for _, column in profile})
        self._profile = dict(profile)
        self._lines: dict[tuple[int, int], float] = {}  # interpolated once
        self._measured: dict[tuple[int, int], Measured] = {}
        self._ratio = self._pace = 1.0
        self._observed = 0

    @property
    def pace(self) -> float:
        """How much slower than before the machine is now, over sizes that run often; 1 at first."""
        return self._pace

    def seconds(self, rows: int, column: int) -> float:
        """The expected time of a step."""
        known = self._measured.get((rows, column))
        if known is not None and known.trusted(self._observed):
            return known.seconds * self._pace
        return self.profiled(rows, column) * self._ratio

    def observe(self, rows: int, column: int, seconds: float) -> None:
        """Take a measured time; a single stall does not move the estimate far."""
        expected = self.seconds(rows, column)
        bound = OUTLIER if (rows, column) in self._measured else 1.0
        seconds = min(seconds, bound * expected)
        self._observed += 1
        first = Measured(seconds / self._pace, 0, self._observed)
        known = self._measured.setdefault((rows, column), first)
        settled = known.count >= _SETTLED_AFTER and known.trusted(self._observed)
        known.take(seconds / self._pace, self._observed, _OWN if settled else _SMOOTHING)
        if settled:
            moved = self._pace * (1.0 + _PACE * (seconds / expected - 1.0))
            self._pace = min(max(moved, 1.0 / _FAR), _FAR)
        if rows <= self._rows[-1] and column <= self._columns[-1]:
            ratio = seconds / self.profiled(rows, column)
            self._ratio += _SMOOTHING * (ratio - self._ratio)

    def profiled(self, rows: int, column: int) -> float:
        """The profile's time of a step, interpolated, nothing measured since."""
        known = self._lines.get((rows, column))
        if known is None:
            low, high, weight = _between(self._rows, rows)
            at_low, at_high = (self._along(at, column) for at in (low, high))
            known = self._lines[rows, column] = _line(at_low, at_high, weight)
        return known

    def _along(self, rows: int, column: int) -> float:
        low, high, weight = _between(self._columns, column)
        return _line(self._profile[rows, low], self._profile[rows, high], weight)


def _line(low: float, high: float, weight: float) -> float:
    """Between two profiled times, and beyond the second never below it."""
    return (
        low + weight * (high - low)
        if weight <= 1.0
        else high + (weight - 1.0) * max(high - low, 0.0)
    )


def _between(points: Sequence[int], value: int) -> tuple[int, int, float]:
    """Neighbouring grid points and where the value lies between them; may extrapolate upwards."""
    if len(points) == 1 or value <= points[0]:
        return points[0], points[0], 0.0
    at = min(bisect.bisect_left(points, value), len(points) - 1)
    low, high = points[at - 1], points[at]
    return low, high, (value - low) / (high - low)


def profile(
    run: Callable[[int, int], None],
    rows: Sequence[int],
    columns: Sequence[int],
    clock: Callable[[], float],
    repeats: int = 3,
) -> dict[tuple[int, int], float]:
    """Best of several timings of ``run(rows, column)`` over a grid, in seconds."""
    times: dict[tuple[int, int], float] = {}
    for size in rows:
        for column in columns:
            best = float("inf")
            for _ in range(repeats + 1):  # the first warms up
                start = clock()
                run(size, column)
                best = min(best, clock() - start)
            times[size, column] = max(best, 1e-7)
    return times


def grid_points(largest: int) -> list[int]:
    """1, 2, 4, ... up to and with ``largest``."""
    points = []
    size = 1
    while size < largest:
        points.append(size)
        size *= 2
    return [*points, largest]
