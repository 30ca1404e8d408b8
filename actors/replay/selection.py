"""Which finished requests are recorded, and which records all experts are scored on."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable

from paceline.actors.replay.record import ReplayRecord, is_held_out, is_synthetic

_BURST_S = 16.0  # the bucket holds the rate's records of so many seconds


class RecordRateLimiter:
    """A token bucket per topic.

    Recording costs a twelfth of a saturated engine's time, and a trainer uses a few records per
    second at most. The choice depends on arrival times alone. A request that fails after
    :meth:`acquire` leaves no record but uses its token.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        """Start with a full bucket for every topic.

        Args:
            per_s: records per topic and second, averaged over more than 16 seconds; None: all.
            clock: monotonic seconds.

        Raises:
            ValueError: ``per_s`` is not positive.
        """
        if per_s is not None and per_s <= 0:
            raise ValueError("max_records_per_s: more than 0, or none")
        self._per_s = per_s
        self._capacity = max(1.0, _BURST_S * (per_s or 0.0))
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}  # by topic: tokens, at seconds

    def acquire(self, topic: str) -> bool:
        """Whether a request of this topic may be recorded now; uses a token if so."""
        if self._per_s is None:
            return True
        now = self._clock()
        tokens, at = self._buckets.get(topic, (self._capacity, now))
        tokens = min(self._capacity, tokens + self._per_s * max(now - at, 0.0))
        allowed = tokens >= 1.0
        self._buckets[topic] = (tokens - allowed, now)
        return allowed


class LeftOut:
    """Requests that left no record since their topic's last one, to count its traffic.

    Thread-safe.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, topic: str) -> None:
        """Count one."""
        with self._lock:
            self._counts[topic] += 1

    def take(self, topic: str) -> int:
        """Their number; from now on there are none."""
        with self._lock:
            return self._counts.pop(topic, 0)


_PURPOSE = b"scored"  # makes the choice independent of others by request_id


def is_scored(record: ReplayRecord, share: float, held_out_fraction: float) -> bool:
    """Whether every expert is to be scored on this record.

    Held-out prompts only: on training prompts an expert looks better than it is. Synthetic
    prompts are not traffic.

    Args:
        record: of a finished request.
        share: of all requests, 0 to 1; at most ``held_out_fraction`` is reached.
        held_out_fraction: of conversations, see :func:`is_held_out`. If 0 nothing is trained, and
            any prompt may be scored.
    """
    if is_synthetic(record.request_id):
        return False
    probability = share
    if held_out_fraction > 0.0:
        if not is_held_out(record.conversation, held_out_fraction):
            return False
        probability = share / held_out_fraction
    digest = hashlib.blake2b(record.request_id.encode(), digest_size=8, person=_PURPOSE).digest()
    return int.from_bytes(digest, "little") < probability * 2.0**64
