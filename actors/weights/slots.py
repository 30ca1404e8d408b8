"""Names of an expert's two weight slots, and the split of requests between them.

The stable slot has the expert's name (``sql``), the candidate's is ``sql@candidate``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

CANDIDATE_SUFFIX = "@candidate"


def candidate_of(expert: str) -> str:
    """Name of an expert's candidate slot."""
    return expert + CANDIDATE_SUFFIX


def is_candidate(draft: str) -> bool:
    """Whether a name is that of a candidate slot."""
    return draft.endswith(CANDIDATE_SUFFIX)


def expert_of(draft: str) -> str:
    """The expert of a slot's name, or of its initial weights' (``sql@0``)."""
    return draft.partition("@")[0]


def in_canary(expert: str, request_id: str, share: float) -> bool:
    """Whether a request is in an expert's canary, by a hash, so that replicas agree.

    Experts split requests independently of each other. A smaller share is a subset of a larger
    one.

    Args:
        expert: name.
        request_id: any text.
        share: of the requests, in [0, 1].
    """
    digest = hashlib.blake2b(f"{expert}/{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def slot_for(draft: str, request_id: str, share: float, held: Container[str]) -> str:
    """The slot that drafts for a request.

    Args:
        draft: the requested expert, or any other draft, which has no candidate.
        request_id: of the request.
        share: of the canary.
        held: all slots with weights; without the candidate's slot nothing is split.
    """
    candidate = candidate_of(draft)
    return candidate if candidate in held and in_canary(draft, request_id, share) else draft
