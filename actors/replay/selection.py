"""Which finished requests are looked at by all experts: a small share, by hash alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from paceline.actors.replay.record import ReplayRecord, is_held_out, is_synthetic

_BURST_S = 16.0  # of the rate; so much may come at once


class RecordAllowance:
    """A token bucket per topic: all is kept of thin traffic, a part of a flood.

    To log what a target says takes its engine a twelfth of the time where requests come as fast as
    it can answer, and a trainer learns from a few records a second at most. Which requests are left
    out depends on when they come and on nothing in them; who takes and then fails or goes leaves no
    record and has taken all the same. One thread takes, another one may ask what was left out.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        """Start with a full bucket for every topic.

        Args:
            per_s: records of a topic per second, over longer than 16 seconds; None: all.
            clock: monotonic seconds.

        Raises:
            ValueError: nothing would ever be kept.
        """
        if per_s is not None and per_s <= 0:
            raise ValueError("max_records_per_s: more than 0, or none")
        self._per_s = per_s
        self._most = max(1.0, _BURST_S * (per_s or 0.0))
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}  # by topic: records, at
        self._left_out: dict[str, int] = {}  # ever; whoever takes alone counts
        self._told: dict[str, int] = {}  # of these; whoever asks alone counts

    def take(self, topic: str) -> bool:
        """Whether a record of this topic may be kept now; then it counts."""
        if self._per_s is None:
            return True
        now = self._clock()
        left, at = self._left.get(topic, (self._most, now))
        left = min(self._most, left + self._per_s * max(now - at, 0.0))
        kept = left >= 1.0
        self._left[topic] = (left - kept, now)
        if not kept:
            self._left_out[topic] = self._left_out.get(topic, 0) + 1
        return kept

    def left_out(self, topic: str) -> int:
        """How many of a topic were not kept since this was last asked.

        Whoever counts records to see what is asked for must hear of them.
        """
        ever, told = self._left_out.get(topic, 0), self._told.get(topic, 0)
        self._told[topic] = ever
        return ever - told


_PURPOSE = b"scored"  # other choices by request id must not fall on the same requests


def is_scored(record: ReplayRecord, share: float, held_out_fraction: float) -> bool:
    """Whether every expert is to be scored on this request's record.

    Only prompts are taken that judge drafts: an expert knows those that it has learnt from, and
    would look better on them than it is. Synthetic prompts say nothing of the traffic.

    Args:
        record: of a request that may be kept.
        share: of all requests, 0 to 1; ``held_out_fraction`` is the most that there can be.
        held_out_fraction: of prompts that judge, see :func:`is_held_out`. Where there are none,
            nothing is learnt either, and all prompts are taken from.
    """
    if is_synthetic(record.request_id):
        return False
    among = share
    if held_out_fraction > 0.0:
        if not is_held_out(record.prompt_token_ids, held_out_fraction):
            return False
        among = share / held_out_fraction
    digest = hashlib.blake2b(record.request_id.encode(), digest_size=8, person=_PURPOSE).digest()
    return int.from_bytes(digest, "little") < among * 2.0**64
