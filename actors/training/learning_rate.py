"""How long a draft's steps are: a share of the learning rate, by what the gate finds. Pure.

A rate at which a draft learns a new topic in a hundred requests throws one back that knows its
topic: seen on real arithmetic, where every round at the full rate left a candidate 0.03 below what
was served. So steps grow and shrink as a trust region does (Conn, Gould and Toint, 2000).
"""

from __future__ import annotations

from dataclasses import dataclass

_SHORTER, _LONGER = 1 / 3, 2.0
_LEAST = 1 / 81
_GROWTH = 4.0


@dataclass(frozen=True, slots=True)
class Stride:
    """``share`` of the configured learning rate, in (0, 1]."""

    share: float = 1.0

    def shorter(self) -> Stride:
        """After a candidate that was given up: it had become worse, or no numbers at all."""
        return Stride(max(self.share * _SHORTER, _LEAST))

    def longer(self) -> Stride:
        """After a publication; traffic that changes has its steps back in a few of them."""
        return Stride(min(self.share * _LONGER, 1.0))


def outgrown(began_with: int, records: int) -> bool:
    """Whether a candidate that has not been published should start over for want of early data.

    Weights that learnt a handful of records again and again learn less from all that comes later
    than fresh ones do (Ash and Adams, arXiv 1910.08475).

    Args:
        began_with: records to learn from when it started from the served weights, or was published.
        records: that there are now.
    """
    return records >= _GROWTH * max(began_with, 1)
