"""When a replica tells the load board how busy it is."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

_REPEAT_S = 1.0  # while nothing changes: who is silent for long counts as gone
_CHANGES_S = 0.2  # a busy replica's changes wait for so long, at most


class LoadReporter:
    """Tells of the first request, the last one's end and bursts at once, of other changes later.

    A call costs both sides a share of a millisecond, on the engine's thread too: with a report
    for every request that comes or goes, a busy server has a hundred a second. A trainer that may
    compute beside a light load hears of a heavier one so much later, where it is no burst. The
    caller's thread alone uses it; it never fails.
    """

    def __init__(self, send: Callable[[int, int], object], clock: Callable[[], float]) -> None:
        """Nothing is told yet.

        Args:
            send: takes (running, waiting) without waiting; where it raises, they are lost.
            clock: seconds, monotonic.
        """
        self._send = send
        self._clock = clock
        self._told: tuple[int, int] | None = None
        self._told_at = 0.0

    def __call__(self, running: int, waiting: int) -> None:
        """Take the present load; call it after every round and once when all is done."""
        load, now = (running, waiting), self._clock()
        if self._told is not None and now - self._told_at < self._least_s(self._told, load):
            return
        self._told, self._told_at = load, now
        try:
            self._send(running, waiting)
        except Exception:
            logger.warning("load was not reported", exc_info=True)

    @staticmethod
    def _least_s(told: tuple[int, int], load: tuple[int, int]) -> float:
        """Seconds that have to be between a report and one of this load."""
        if load == told:
            return _REPEAT_S
        burst = sum(load) > 2 * sum(told)  # a trainer may have leave beside what was told
        return _CHANGES_S if told[0] and sum(load) and not burst else 0.0  # (0, 1) ends in a round
