"""How likely each record is drawn. Pure.

Priorities are losses that a trainer reported (prioritized experience replay, Schaul et al.
1511.05952, without its importance weights: a draft is to be good where it is bad now).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_LEAST_LEVEL = 1e-3  # of a loss, against the highest one: no record's weight is 0


def sampling_weights(count: int, recent_share: float, half_life: float) -> NDArray[np.float64]:
    """Probability of each of ``count`` records, oldest first; they sum to 1.

    Args:
        count: records.
        recent_share: weight of the recency part; the rest is uniform.
        half_life: records after which the recency part has halved.
    """
    if count == 0:
        return np.zeros(0)
    recency = np.exp2(-np.arange(count - 1, -1, -1) / half_life)
    weights = recent_share * recency / recency.sum() + (1.0 - recent_share) / count
    normal: NDArray[np.float64] = weights / weights.sum()
    return normal


def priority_weights(
    losses: NDArray[np.float64], favoured_share: float, exponent: float
) -> NDArray[np.float64]:
    """Probability of each record where a high loss is favoured; they sum to 1.

    Args:
        losses: float64 ``[R]``, nats; inf where it is not known, which counts as the highest one.
            What lies below a thousandth of the highest one counts as that much.
        favoured_share: weight of the part that goes with loss ** exponent; the rest is uniform.
        exponent: at least 0.
    """
    if len(losses) == 0:
        return np.zeros(0)
    known = np.isfinite(losses)
    highest = float(losses[known].max()) if known.any() else 0.0
    highest = highest if highest > 0.0 else 1.0
    levels = np.where(known, losses, highest) / highest
    levels = np.power(levels.clip(min=_LEAST_LEVEL), exponent)
    weights = favoured_share * levels / levels.sum() + (1.0 - favoured_share) / len(losses)
    normal: NDArray[np.float64] = weights / weights.sum()
    return normal
