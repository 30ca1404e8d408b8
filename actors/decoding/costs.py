"""What rounds cost: step times, profiled at the start and corrected by what is measured."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence

_SMOOTHING = 0.1
_OUTLIER = 3.0
_TRUSTED_AFTER = 3


class StepCosts:
    """Seconds of a step by two sizes (batch rows, and tokens or experts).

    A size that was measured often enough has its own smoothed time. Any other is interpolated
    from the profile and scaled by how the measured ones compare to it, so that a machine that has
    become slower since its profile does not make what was never tried look cheap.
    """

    def __init__(self, profile: Mapping[tuple[int, int], float]) -> None:
        """Start from a full grid of positive seconds, ``{(a, b): seconds}``."""
        self._rows = sorted({rows for rows, _ in profile})
        self._columns = sorted({column for _, column in profile})
        self._profile = dict(profile)
        self._measured: dict[tuple[int, int], tuple[float, int]] = {}
        self._ratio = 1.0

    def seconds(self, rows: int, column: int) -> float:
        """The expected time of a step."""
        time, count = self._measured.get((rows, column), (0.0, 0))
        if count >= _TRUSTED_AFTER:
            return time
        return self._profiled(rows, column) * self._ratio

    def observe(self, rows: int, column: int, seconds: float) -> None:
        """Take a measured time; a single stall does not move the estimate far."""
        expected = self.seconds(rows, column)
        seconds = min(seconds, _OUTLIER * expected)
        share = max(_SMOOTHING, 1.0 / (self._measured.get((rows, column), (0.0, 0))[1] + 1))
        time, count = self._measured.get((rows, column), (seconds, 0))
        self._measured[rows, column] = (time + share * (seconds - time), count + 1)
        ratio = seconds / self._profiled(rows, column)
        self._ratio += _SMOOTHING * (ratio - self._ratio)

    def _profiled(self, rows: int, column: int) -> float:
        low, high, weight = _between(self._rows, rows)
        at_low, at_high = (self._along(at, column) for at in (low, high))
        return at_low + weight * (at_high - at_low)

    def _along(self, rows: int, column: int) -> float:
        low, high, weight = _between(self._columns, column)
        start, end = self._profile[rows, low], self._profile[rows, high]
        return start + weight * (end - start)


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
