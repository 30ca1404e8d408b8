"""Scale of a draft's learning rate, by the gate's decisions. Pure.

A rate that teaches a draft a new topic within a hundred requests makes one worse that knows its
topic: on real arithmetic every round at the full rate left a candidate 0.03 below the served draft.
So the scale follows the rule of a trust region's radius (Conn, Gould and Toint, 2000).
"""

from __future__ import annotations

_DECREASE, _INCREASE = 1 / 3, 2.0
_LEAST = 1 / 81
_GROWTH = 4.0


def decreased(share: float) -> float:
    """The share of the configured rate after a candidate that became worse, or not finite."""
    return max(share * _DECREASE, _LEAST)


def increased(share: float) -> float:
    """The share after a publication; a few of them restore the full rate for changed traffic."""
    return min(share * _INCREASE, 1.0)


def outgrown(initial_records: int, records: int) -> bool:
    """Whether an unpublished candidate should restart, for it began on too few records.

    Weights that learnt a handful of records again and again learn less from all that comes later
    than fresh ones do (Ash and Adams, arXiv 1910.08475).

    Args:
        initial_records: training records when it started from the served weights.
        records: training records now.
    """
    return records >= _GROWTH * max(initial_records, 1)
