"""Where serving was idle, how much of that the trainer computed, and how soon it stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

Span = tuple[float, float]

_BEFORE_S = 0.04  # of looking back from an arrival: does the trainer compute?
_WINDOW_S = 0.015  # over which computing is told from asking for leave
_COMPUTES, _RESTS = 0.5, 0.2  # shares of such a window
_GIVE_UP_S = 2.0
_LATELY = 100  # readings


class CpuSeries:
    """CPU seconds of a process over time, as the kernel counts them."""

    def __init__(self, times: Sequence[float], seconds: Sequence[float]) -> None:
        """Take readings in order of time; ``times`` are of ``time.monotonic``."""
        self.times = np.asarray(times, dtype=np.float64)
        self._seconds = np.asarray(seconds, dtype=np.float64)

    def spent(self, spans: Sequence[Span]) -> float:
        """CPU seconds within spans of time, between readings in proportion."""
        if not spans or not len(self.times):
            return 0.0
        begins, ends = np.interp(np.asarray(spans), self.times, self._seconds).T
        return float(np.sum(ends - begins))

    def share(self, begin: float, end: float) -> float:
        """CPU seconds per second of one span."""
        return self.spent([(begin, end)]) / (end - begin)


class CpuClock:
    """Reads a process' CPU clock every few milliseconds, in a thread of its own.

    A reading is one system call of some microseconds, for a process of any number of threads.
    """

    def __init__(self, pid: int, every_s: float = 0.005) -> None:
        """Begin to read at once.

        Args:
            pid: of a process of this machine (Linux).
            every_s: between two readings.
        """
        self._times: list[float] = []
        self._seconds: list[float] = []
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                seconds = time.clock_gettime(self._clock)
            except OSError:  # the process has ended
                return
            self._times.append(time.monotonic())
            self._seconds.append(seconds)

    def lately(self) -> float:
        """CPU seconds per second over the last readings."""
        times, seconds = self._times[-_LATELY:], self._seconds[-_LATELY:]
        count = min(len(times), len(seconds))
        return (seconds[count - 1] - seconds[0]) / max(times[count - 1] - times[0], 1e-9)

    def stop(self) -> CpuSeries:
        """End the thread; returns what was read."""
        self._ended.set()
        self._thread.join()
        return CpuSeries(self._times, self._seconds)


def gaps(busy: Sequence[Span], least_s: float) -> list[Span]:
    """Spans longer than ``least_s`` between the first and the last in which nothing was busy."""
    found, until = [], None
    for begin, end in sorted(busy):
        if until is not None and begin - until > least_s:
            found.append((until, begin))
        until = end if until is None else max(until, end)
    return found


def starts(series: CpuSeries, idle: Sequence[Span]) -> list[float | None]:
    """Seconds from each gap's begin until the trainer computes; None where it never does."""
    return [_first(series, begin, end, lambda share: share > _COMPUTES) for begin, end in idle]


def yields(series: CpuSeries, idle: Sequence[Span]) -> list[float]:
    """Seconds from the arrival that ends a gap until the trainer has stopped to compute.

    Gaps at whose end it did not compute say nothing, and are left out. One that goes on for two
    seconds counts as two seconds.
    """
    found = []
    for begin, arrival in idle:
        if series.share(max(begin, arrival - _BEFORE_S), arrival) <= _COMPUTES:
            continue
        took = _first(series, arrival, arrival + _GIVE_UP_S, lambda share: share < _RESTS)
        found.append(_GIVE_UP_S if took is None else took)
    return found


def _first(
    series: CpuSeries, begin: float, end: float, holds: Callable[[float], bool]
) -> float | None:
    """Seconds after ``begin`` of the first window within the span whose share holds."""
    first, last = np.searchsorted(series.times, [begin, end])
    for at in (begin, *series.times[first:last]):
        if at + _WINDOW_S <= end and holds(series.share(at, at + _WINDOW_S)):
            return at - begin
    return None
