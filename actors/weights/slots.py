"""The two slots of an expert's weights, their names, and which requests use which.

The stable weights go by the expert's own name (``sql``), those on trial by ``sql@candidate``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

CANDIDATE_SUFFIX = "@candidate"


def candidate_of(expert: str) -> str:
    """The name of an expert's candidate slot."""
    return expert + CANDIDATE_SUFFIX


def is_candidate(draft: str) -> bool:
    """Whether a draft's name is that of a candidate slot."""
    return draft.endswith(CANDIDATE_SUFFIX)


def expert_of(draft: str) -> str:
    """The expert whose slot or initial weights a draft's name means."""
    return draft.partition("@")[0]


def in_canary(expert: str, request_id: str, share: float) -> bool:
    """Whether a request belongs to an expert's canary: by their names, so that replicas agree.

    Experts split independently of each other: requests that one expert's trial has taken away are
    missing in both halves of another one's. A smaller share lies within a larger one.

    Args:
        expert: that drafts.
        request_id: any text.
        share: of the requests, in [0, 1].
    """
    digest = hashlib.blake2b(f"{expert}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def slot_for(draft: str, request_id: str, share: float, held: Container[str]) -> str:
    """The draft that a request gets which asks for ``draft``.

    Args:
        draft: an expert, or anything else, which has no candidate.
        request_id: of the request.
        share: of the canary.
        held: every draft that there is now; without the candidate's slot nothing is split.
    """
    candidate = candidate_of(draft)
    return candidate if candidate in held and in_canary(draft, request_id, share) else draft
