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
        common_weight: requests that the variance of both drafts' requests together counts as, in
            a sequential comparison.
    """

    deviation: float = 0.15
    weight: float = 3.0
    common_weight: float = 12.0


_LEAST_RATE = 0.05  # few rounds that all agree do not mean that none scatters


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


def compare_sequentially(
    first: AcceptanceStats,
    second: AcceptanceStats,
    error: float,
    scale: float,
    prior: VariancePrior | None = None,
) -> Comparison:
    """How much better the first is, by bounds that hold however often one looks.

    The confidence sequence of Robbins' normal mixture (Howard et al. 2021, "Time-uniform,
    nonparametric, nonasymptotic confidence sequences"), with an estimated variance. Before a draft
    has many requests, its variance is mostly that of both drafts together: a hundred requests of
    the one say more of it than two of the other.

    Args:
        first: at least one request.
        second: at least one request.
        error: probability that the difference is ever beyond a bound, per bound; in (0, 0.5).
        scale: standard deviation of the mixture, about the difference to be found soonest.
        prior: on the variance.
    """
    prior = prior or VariancePrior()
    total = _variance_of_difference(first, second, prior)
    information = scale**2 / total
    reach = total * (1.0 + 1.0 / information) * (math.log1p(information) - 2 * math.log(2 * error))
    difference = first.rate - second.rate
    return Comparison(difference, difference - math.sqrt(reach), difference + math.sqrt(reach))


def _variance_of_difference(
    first: AcceptanceStats, second: AcceptanceStats, prior: VariancePrior
) -> float:
    """Variance of the difference of two mean acceptances, each shrunk to their common one.

    The prior of the common one has the scatter of as many rounds as a request has, too: answers
    of a few rounds scatter more.
    """
    both = first, second
    requests, rounds = first.requests + second.requests, first.rounds + second.rounds
    rate = min(max((first.accepted + second.accepted) / rounds, _LEAST_RATE), 1.0 - _LEAST_RATE)
    before = prior.deviation**2 + rate * (1.0 - rate) * requests / rounds
    seen = [(s.requests - 1) * s.variance() for s in both]
    common = (prior.weight * before + sum(seen)) / (prior.weight + requests - 2)
    return sum(
        (prior.common_weight * common + own) / (prior.common_weight + s.requests - 1) / s.requests
        for s, own in zip(both, seen, strict=True)
    )
