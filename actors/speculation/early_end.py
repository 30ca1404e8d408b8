"""Where a row ends its drafts early: before a token that would hardly be accepted.

The expected acceptance of a drafted token is that of earlier tokens of which the draft was as sure.
A row's decision reads the most probable tokens, which nothing is drawn for: it changes no answer,
only its speed.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.actors.engine.top_tokens import leading_true

CONFIDENCE_BINS = 10
_TENTHS = tuple((i + 0.5) / CONFIDENCE_BINS for i in range(CONFIDENCE_BINS))


class EarlyEnd(NamedTuple):
    """When a row ends its drafts.

    Attributes:
        min_reach: it ends before a token with which the probability that all its drafts are
            accepted falls below this; never before the first, and with 0 never.
        acceptance: of a token, by tenths of the draft's own probability of it.
    """

    min_reach: float = 0.0
    acceptance: tuple[float, ...] = _TENTHS


NEVER = EarlyEnd()


def confidence_bin(prob: float) -> int:
    """Index into ``acceptance`` of a finite probability."""
    return min(int(prob * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)


def kept_lengths(probs: Tensor, least: Tensor, acceptance: Tensor) -> Tensor:
    """How many drafted tokens each row keeps.

    Args:
        probs: float32 ``[B, k]``, of the draft for its own tokens.
        least: float32 ``[B]``, see EarlyEnd.
        acceptance: float32 ``[B, CONFIDENCE_BINS]``, see EarlyEnd.

    Returns:
        int64 ``[B]``, at least 1.
    """
    bins = (probs * CONFIDENCE_BINS).nan_to_num().long().clamp(0, CONFIDENCE_BINS - 1)
    keeps = acceptance.gather(1, bins).cumprod(dim=-1) >= least[:, None]
    keeps[:, :1] = True
    return leading_true(keeps)
