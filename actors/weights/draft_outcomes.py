"""Outcomes of drafts on served requests, and statistics of their acceptance.

Acceptance is that of the first drafted position, which does not depend on k: requests with
different k compare. Tokens of one answer are correlated, so a request is one observation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def student_quantile(error: float, degrees: int) -> float:
    """The t that Student's variable exceeds with probability ``error``.

    Args:
        error: in (0, 0.5).
        degrees: of freedom, at least 1.
    """
    from scipy.special import stdtrit  # late: a quarter of a second that most processes save

    return -float(stdtrit(degrees, error))


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Acceptance of one finished request's drafts.

    Attributes:
        expert: name of the draft.
        weight_version: the one version that drafted, from the request's start to its end.
        rounds: rounds whose first position was drafted; 0 if the request ended without any.
        accepted: rounds of these whose first position was accepted.
        failed: the draft raised or gave no probabilities.
    """

    expert: str
    weight_version: int
    rounds: int
    accepted: int
    failed: bool = False

    @property
    def possible(self) -> bool:
        """Whether the counts are consistent."""
        return 0 <= self.accepted <= self.rounds


@dataclass(slots=True)
class AcceptanceStats:
    """Sums over requests, enough for the mean acceptance and its variance between requests.

    Attributes:
        requests: with at least one drafted round; the other figures are theirs.
        rounds: of these.
        accepted: rounds whose first position was accepted.
        undrafted: requests that ended without a drafted round, though no draft failed.
    """

    requests: int = 0
    rounds: int = 0
    accepted: int = 0
    undrafted: int = 0
    _rounds_squared: int = 0
    _accepted_squared: int = 0
    _product: int = 0

    def add(self, outcome: DraftOutcome) -> None:
        """Count a request."""
        if outcome.rounds < 1:
            self.undrafted += not outcome.failed
            return
        self.requests += 1
        self.rounds += outcome.rounds
        self.accepted += outcome.accepted
        self._rounds_squared += outcome.rounds**2
        self._accepted_squared += outcome.accepted**2
        self._product += outcome.rounds * outcome.accepted

    @property
    def drafted_share(self) -> float:
        """Share of requests with a drafted round; nan without any request."""
        ended = self.requests + self.undrafted
        return self.requests / ended if ended else math.nan

    @property
    def rate(self) -> float:
        """Accepted over rounds; nan without any."""
        return self.accepted / self.rounds if self.rounds else math.nan

    def variance(self) -> float:
        """Variance of one request's acceptance about the rate, requests weighted by rounds.

        The linearised variance of a ratio of sums (Cochran, Sampling Techniques, 6.4), times the
        number of requests. 0 for fewer than two.
        """
        if self.requests < 2:
            return 0.0
        rate = self.rate
        residuals = self._accepted_squared - 2 * rate * self._product
        residuals += rate * rate * self._rounds_squared
        count = self.requests
        return max(residuals, 0.0) * count * count / ((count - 1) * self.rounds**2)


@dataclass(frozen=True, slots=True)
class VariancePrior:
    """Prior on the variance between requests: a few that agree do not mean that all do.

    Attributes:
        deviation: standard deviation of a request's acceptance.
        weight: requests that the prior counts as.
    """

    deviation: float = 0.15
    weight: float = 3.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Difference of two acceptances, with a bound to each side."""

    difference: float
    lower: float
    upper: float


def compare(
    first: AcceptanceStats,
    second: AcceptanceStats,
    error: float,
    prior: VariancePrior | None = None,
) -> Comparison:
    """How much better the first is, by Welch's t with the variance between requests.

    Args:
        first: at least one request.
        second: at least one request.
        error: probability that the difference is beyond a bound, per bound; in (0, 0.5).
        prior: on the variance.
    """
    prior = prior or VariancePrior()
    parts = []
    for stats in (first, second):
        degrees = prior.weight + stats.requests - 1
        seen = (stats.requests - 1) * stats.variance()
        variance = (prior.weight * prior.deviation**2 + seen) / degrees
        parts.append((variance / stats.requests, degrees))
    total = sum(share for share, _ in parts)
    degrees = total**2 / sum(share**2 / freedom for share, freedom in parts)
    reach = student_quantile(error, max(1, int(degrees))) * math.sqrt(total)
    difference = first.rate - second.rate
    return Comparison(difference, difference - reach, difference + reach)
