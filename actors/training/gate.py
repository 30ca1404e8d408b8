"""The gate: a candidate is published only where held-out records say that it is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class GateSettings:
    """When a candidate is better.

    Attributes:
        min_records: held-out records without which nothing is published.
        confidence: of the one-sided bootstrap bound on the mean gain.
        min_gain: what that bound must exceed.
        resamples: bootstrap resamples of whole records.
    """

    min_records: int = 4
    confidence: float = 0.95
    min_gain: float = 0.0
    resamples: int = 1000


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate decided, with its figures; acceptances are means over records."""

    publish: bool
    reason: str
    candidate: float
    served: float
    gain_lower_bound: float
    records: int

    def facts(self) -> dict[str, Any]:
        """What the registry keeps of it, as JSON can hold it."""
        finite = math.isfinite(self.gain_lower_bound)
        bound = round(self.gain_lower_bound, 4) if finite else None
        return {
            "reason": self.reason,
            "candidate_expected_acceptance": round(self.candidate, 4),
            "served_expected_acceptance": round(self.served, 4),
            "gain_lower_bound": bound,
            "records": self.records,
        }


def judge(
    candidate: NDArray[np.float64],
    served: NDArray[np.float64],
    rng: np.random.Generator,
    settings: GateSettings | None = None,
) -> GateDecision:
    """Compare two drafts on the same records, record by record.

    Positions of one answer hang together, so whole records are resampled.

    Args:
        candidate: float64 ``[R]``, acceptance of each record.
        served: float64 ``[R]``, of the same records in the same order.
        rng: of the bootstrap.
        settings: see GateSettings.

    Raises:
        ValueError: where the two do not pair up.
    """
    settings = settings or GateSettings()
    if candidate.shape != served.shape or candidate.ndim != 1:
        raise ValueError(f"gate: {candidate.shape} and {served.shape} do not pair up")
    count = len(candidate)
    if count < max(settings.min_records, 1):
        reason = "too few held-out records"
        means = [float(part.mean()) if count else 0.0 for part in (candidate, served)]
        return GateDecision(False, reason, means[0], means[1], float("-inf"), count)
    gains = candidate - served
    picks = rng.integers(count, size=(settings.resamples, count))
    bound = float(np.quantile(gains[picks].mean(axis=1), 1.0 - settings.confidence))
    publish = bound > settings.min_gain
    reason = "better" if publish else "not shown to be better"
    return GateDecision(
        publish, reason, float(candidate.mean()), float(served.mean()), bound, count
    )
