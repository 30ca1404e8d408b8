"""Records that wait in their replica until handing them over costs no request anything.

Encoding a record and passing it on takes milliseconds of the engine's thread, and of the processes
that receive it. Trainers that share the processors learn once serving is idle, not before.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from paceline.actors.replay.record import ReplayRecord, belongs
from paceline.actors.replay.selection import LeftOut

MAX_BYTES = 64 * 2**20
_IDLE_S = 0.05  # the next request of a client that waits for its answers comes sooner
_BUSY_S = 1.0  # for trainers that do not wait until serving is idle


class HeldRecords:
    """A queue of records, of a bounded size.

    They leave one after the other, the oldest first: as soon as no request has run for 50 ms, and
    while requests run one per second. What does not fit costs the topic that holds most its oldest
    record, so that rare topics keep theirs. Thread-safe; times are monotonic seconds.
    """

    def __init__(self, left_out: LeftOut, max_bytes: int = MAX_BYTES) -> None:
        """Start empty.

        Args:
            left_out: counts the records that do not fit.
            max_bytes: of the arrays of all records together.
        """
        self._left_out, self._max_bytes = left_out, max_bytes
        self._records: deque[ReplayRecord] = deque()
        self._bytes: Counter[str] = Counter()  # by topic
        self._busy_at = self._at = float("-inf")
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Number of records."""
        return len(self._records)

    @property
    def num_bytes(self) -> int:
        """Bytes of their arrays."""
        with self._lock:
            return self._bytes.total()

    def has_room(self, topic: str) -> bool:
        """Whether a request of this topic that begins now should be recorded.

        Not once half of the bytes are taken, unless others hold more: the other half is for
        requests that have begun. Under traffic that never pauses most records would be made only
        to be dropped.
        """
        held = dict(self._bytes)  # without the lock, which a hand-over holds for milliseconds
        most = max(held.values(), default=0)
        return 2 * sum(held.values()) < self._max_bytes or held.get(topic, 0) < most

    def add(self, record: ReplayRecord, now: float) -> None:
        """Append a record, and drop others, or this one, until all fit."""
        with self._lock:
            if not self._records:
                self._at = now
            self._records.append(record)
            self._bytes[record.topic] += record.num_bytes
            while self._bytes.total() > self._max_bytes:
                most = max(self._bytes.values())
                oldest = next(own for own in self._records if self._bytes[own.topic] == most)
                self._take(oldest)
                self._left_out.add(oldest.topic)

    def due_in_s(self, now: float, *, busy: bool) -> float:
        """Seconds until the oldest record may leave, at least 0; call it after every round.

        Args:
            now: seconds.
            busy: whether any request runs or waits.
        """
        if busy:
            self._busy_at = now
            return max(self._at + _BUSY_S - now, 0.0)
        return max(self._busy_at + _IDLE_S - now, 0.0)

    def hand_over(self, send: Callable[[ReplayRecord], object], now: float) -> None:
        """Remove the oldest record, if there is any, and pass it to ``send``.

        No other method returns in between: a record that a removal did not find has been sent.
        """
        with self._lock:
            if self._records:
                self._at = now
                record = self._records[0]
                self._take(record)
                send(record)

    def remove(self, request_id: str | None, topic: str | None) -> int:
        """Remove the records of an answer (None: all) of a topic (None: all); returns how many.

        Args:
            request_id: see :func:`belongs`.
            topic: name.
        """
        return self._remove(
            lambda record: topic in (None, record.topic) and belongs(record.request_id, request_id)
        )

    def expire(self, oldest: float) -> int:
        """Remove what was created before ``oldest``, unix seconds; returns how many."""
        return self._remove(lambda record: record.created < oldest)

    def _remove(self, matches: Callable[[ReplayRecord], bool]) -> int:
        with self._lock:
            gone = list(filter(matches, self._records))
            for record in gone:
                self._take(record)
            return len(gone)

    def _take(self, record: ReplayRecord) -> None:
        at = next(i for i, own in enumerate(self._records) if own is record)
        del self._records[at]
        self._bytes[record.topic] -= record.num_bytes
