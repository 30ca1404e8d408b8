"""What the broker counts: idle time and who used it, how leases ended, how long yields took."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

from paceline.cluster.leases import Ending

USED, WAITING, UNWANTED = "used", "waiting", "unwanted"
_MOST_YIELDS = 10_000
_LATELY = 1_000


class Ledger:
    """Totals since the broker's start."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.idle_s = {USED: 0.0, WAITING: 0.0, UNWANTED: 0.0}
        self.endings: Counter[Ending] = Counter()
        self.grants = 0
        self.last_yield_s: float | None = None
        self.longest_yield_s: float | None = None
        self._yields: deque[float] = deque(maxlen=_MOST_YIELDS)
        self._lately: deque[float] = deque(maxlen=_LATELY)

    def idle(self, seconds: float, use: str) -> None:
        """Note idle time.

        Args:
            seconds: in which serving was idle and training allowed.
            use: ``used`` where a trainer held a lease, ``waiting`` where one had a topic and none
                (it loads, saves or is between two micro-steps of a burst), ``unwanted`` where no
                trainer had a topic.
        """
        self.idle_s[use] += max(0.0, seconds)

    def yielded(self, seconds: float) -> None:
        """Note the time from a revocation to the trainer's stop."""
        self.last_yield_s = seconds
        self.longest_yield_s = max(seconds, self.longest_yield_s or 0.0)
        self._yields.append(seconds)
        self._lately.append(seconds)

    def drained(self) -> list[float]:
        """Yields since the last call, seconds."""
        found = []
        while self._yields:
            found.append(self._yields.popleft())
        return found

    def figures(self) -> dict[str, Any]:
        """All totals; ``idle_used_share`` is of the idle time in which a trainer had a topic.

        The shares of yields are of the last thousand.
        """
        wanted = self.idle_s[USED] + self.idle_s[WAITING]
        return {
            "idle_s": dict(self.idle_s),
            "idle_used_share": self.idle_s[USED] / wanted if wanted > 0.0 else None,
            "leases_granted": self.grants,
            "leases_ended": {ending.value: self.endings[ending] for ending in Ending},
            "last_yield_s": self.last_yield_s,
            "longest_yield_s": self.longest_yield_s,
            "yield_p50_s": self._within(0.5),
            "yield_p99_s": self._within(0.99),
        }

    def _within(self, share: float) -> float | None:
        """The time in which this share of the last yields was done."""
        found = sorted(self._lately)
        return found[min(int(share * len(found)), len(found) - 1)] if found else None
