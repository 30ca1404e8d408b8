"""Which requests left no record, and which records all experts are scored on."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter

from paceline.actors.replay.record import ReplayRecord, is_held_out, is_synthetic


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
