"""Does a series of measurements grow? A rule that can be stated, over noisy figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median


@dataclass(frozen=True, slots=True)
class Tolerance:
    """By how much a series may rise over the time that is judged: the larger of the two."""

    share: float
    absolute: float

    def of(self, level: float) -> float:
        """In the series' own unit, at this level of it."""
        return max(self.share * level, self.absolute)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``rise`` is the fitted rise over the judged time, ``allowed`` what it may be."""

    first: float
    last: float
    rise: float
    allowed: float

    @property
    def grows(self) -> bool:
        """True where it rises by more than is allowed."""
        return self.rise > self.allowed


def judge(times: Sequence[float], values: Sequence[float], tolerance: Tolerance) -> Verdict:
    """The rise over the last two thirds of a series, by the median of all pairwise slopes.

    The first third is warm-up: caches fill, allocators find their level. The median (Theil and
    Sen) is not moved by single peaks, nor by a saw-tooth that does not climb.

    Args:
        times: seconds, rising, at least three.
        values: one per time.
        tolerance: what may rise.

    Raises:
        ValueError: for fewer than three measurements.
    """
    if len(times) < 3 or len(times) != len(values):
        raise ValueError("a series needs three measurements, and a time for each")
    start = len(times) // 3
    judged = list(zip(times[start:], values[start:], strict=True))
    slope = median((v2 - v1) / (t2 - t1) for (t1, v1), (t2, v2) in combinations(judged, 2))
    rise = slope * (judged[-1][0] - judged[0][0])
    return Verdict(values[0], values[-1], rise, tolerance.of(median(v for _, v in judged)))
