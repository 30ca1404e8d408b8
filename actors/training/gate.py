"""The gate: publish a candidate only if it is better on records that it was not trained on.

Two kinds of such records: held-out ones, which no draft ever trains on, scored with the weights to
be published; and new ones on their way into training, each scored before the candidate trained on
it (test, then train), with the weights of that time. The candidate learns, so what its earlier
weights gained understates what it gains now; if it does not, the held-out records say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.actors.weights.draft_outcomes import student_quantile
from paceline.actors.weights.history import Decision

NOT_FINITE = "the candidate's scores are not finite"
TOO_FEW = "too few held-out records"


@dataclass(frozen=True, slots=True)
class GateSettings:
    """Conditions of a publication.

    Attributes:
        min_records: held-out records at least, and two; earlier tests are no substitute.
        confidence: that no look publishes without a gain; of one-sided bounds on the mean gain.
        min_gain: that the bound must exceed.
        typical_spread: prior standard deviation of a record's gain, which never narrows what is
            seen: a handful of records that happen to agree do not show that all records would.
        typical_weight: weight of that prior, in records.
    """

    min_records: int = 4
    confidence: float = 0.9
    min_gain: float = 0.005
    typical_spread: float = 0.1
    typical_weight: float = 2.0


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The gate's decision.

    Attributes:
        publish: whether the candidate is to be served.
        reason: of it.
        candidate: mean acceptance over the held-out records, nan without any.
        served: of the served draft.
        gain_lower_bound: of the mean gain, by held-out records and earlier tests.
        records: held-out ones.
        gain_upper_bound: by held-out records alone: that earlier weights were worse says little.
        tests: earlier ones.
    """

    publish: bool
    reason: str
    candidate: float
    served: float
    gain_lower_bound: float
    records: int
    gain_upper_bound: float = math.nan
    tests: int = 0

    def facts(self) -> Decision:
        """The figures for the history; those that are not finite are None."""
        return {
            "reason": self.reason,
            "candidate_expected_acceptance": _figure(self.candidate),
            "served_expected_acceptance": _figure(self.served),
            "gain_lower_bound": _figure(self.gain_lower_bound),
            "gain_upper_bound": _figure(self.gain_upper_bound),
            "records": self.records,
            "tests": self.tests,
        }


def decide(
    candidate: NDArray[np.float64],
    served: NDArray[np.float64],
    settings: GateSettings | None = None,
    *,
    earlier: Sequence[float] = (),
    looks: int = 1,
) -> GateDecision:
    """Compare two drafts on the same records, record by record.

    Positions of one answer are correlated, so a record counts once. The bound is Student's, which
    holds at a handful of records; a bootstrap's does not.

    Args:
        candidate: float64 ``[R]``, acceptance of each held-out record.
        served: float64 ``[R]``, of the same records in the same order; records with a value that is
            not finite are left out.
        settings: see GateSettings.
        earlier: gains of the candidate's earlier weights over the served draft, one per other
            record, finite. They never publish weights whose own mean gain is not enough.
        looks: evaluations since the last publication, this one included. A candidate evaluated
            again and again on much the same records would pass by chance some day, so the error
            of each look is that of all over one more than their number. Records grow as looks do,
            and looks at much the same records err together: their errors do not add up (drawn
            streams in ``tests/property/test_gate.py``). The upper bound errs as often as its look
            alone, over the root of their number: to start over by mistake costs a round.

    Raises:
        ValueError: the two have other shapes.
    """
    settings = settings or GateSettings()
    if candidate.shape != served.shape or candidate.ndim != 1:
        raise ValueError(f"gate: {candidate.shape} and {served.shape} do not pair up")
    known = np.isfinite(served)
    candidate, served = candidate[known], served[known]
    count = len(served)
    means = (_mean(candidate), _mean(served))
    if not np.isfinite(candidate).all():
        return GateDecision(False, NOT_FINITE, math.nan, means[1], math.nan, count)
    if count < max(settings.min_records, 2):
        return GateDecision(False, TOO_FEW, *means, math.nan, count)
    gains, error = candidate - served, 1.0 - settings.confidence
    bound = gain_bound(np.concatenate([gains, earlier]), settings, error / (looks + 1))
    upper = -gain_bound(-gains, settings, error / math.sqrt(looks))
    publish = min(bound, float(gains.mean())) > settings.min_gain
    reason = "better" if publish else "not shown to be better"
    return GateDecision(publish, reason, *means, bound, count, upper, len(earlier))


def gain_bound(gains: NDArray[np.float64], settings: GateSettings, error: float) -> float:
    """Lower bound of the mean gain at a chance of ``error``.

    Args:
        gains: float64 ``[R]``, R at least 2.
        settings: of the prior spread.
        error: chance that the bound does not hold, in (0, 0.5).
    """
    count = len(gains)
    assumed = settings.typical_weight * settings.typical_spread**2
    seen = (count - 1) * float(gains.var(ddof=1))
    spread = math.sqrt((assumed + seen) / (settings.typical_weight + count - 1))
    spread = max(spread, math.sqrt(seen / (count - 1)))
    return float(gains.mean()) - student_quantile(error, count - 1) * spread / math.sqrt(count)


def _mean(scores: NDArray[np.float64]) -> float:
    return float(scores.mean()) if len(scores) else math.nan


def _figure(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
