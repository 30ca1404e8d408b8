"""Which finished requests are looked at by all experts: a small share, by hash alone."""

from __future__ import annotations

import hashlib

from paceline.actors.replay.names import is_imagined
from paceline.actors.replay.record import ReplayRecord, is_held_out

_PURPOSE = b"scored"  # other choices by request id must not fall on the same requests


def is_scored(record: ReplayRecord, share: float, held_out_fraction: float) -> bool:
    """Whether every expert is to be scored on this request's record.

    Only prompts are taken that judge drafts: an expert knows those that it has learnt from, and
    would look better on them than it is. What was imagined tells nothing of the traffic.

    Args:
        record: of a request that may be kept.
        share: of all requests, 0 to 1; ``held_out_fraction`` is the most that there can be.
        held_out_fraction: of prompts that judge, see :func:`is_held_out`. Where there are none,
            nothing is learnt either, and all prompts are taken from.
    """
    if is_imagined(record.request_id):
        return False
    among = share
    if held_out_fraction > 0.0:
        if not is_held_out(record.prompt_token_ids, held_out_fraction):
            return False
        among = share / held_out_fraction
    digest = hashlib.blake2b(record.request_id.encode(), digest_size=8, person=_PURPOSE).digest()
    return int.from_bytes(digest, "little") < among * 2.0**64
