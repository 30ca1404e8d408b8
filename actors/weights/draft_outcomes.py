"""What served requests say of drafts: acceptance at the first drafted position.

That position does not depend on how many tokens a round drafts, so requests with different k
compare. The tokens of one answer hang together, so a request counts as one observation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache


@lru_cache(maxsize=1024)
def student_quantile(error: float, degrees: int) -> float:
    """The t that Student's variable exceeds with a chance of ``error``.

    Args:
        error: in (0, 0.5).
        degrees: of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2  # t is sqrt(degrees) * tan(angle)
    for _ in range(60):
        angle = (low + high) / 2
        if (1.0 - _central_mass(angle, degrees)) / 2 > error:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _central_mass(angle: float, degrees: int) -> float:
    """Chance of abs(T) <= sqrt(degrees) * tan(angle), Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for n in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (n - 1) / n
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What a draft did for one finished request.

    Attributes:
        expert: whose draft it was.
        weight_version: the one version that drafted, from the request's start to its end.
        rounds: rounds whose first position was drafted; 0 where the request ended without any.
        accepted: of these, where that position was accepted.
        failed: the draft raised or gave no probabilities.
    """

    expert: str
    weight_version: int
    rounds: int
    accepted: int
    failed: bool = False

    @property
    def possible(self) -> bool:
        """Whether the counts can be."""
        return 0 <= self.accepted <= self.rounds


@dataclass(slots=True)
class Tally:
    """Sums over requests, enough for the acceptance and its spread from request to request.

    Attributes:
        requests: that were drafted for; acceptance and spread are theirs.
        rounds: of these.
        accepted: rounds whose first position was accepted.
        silent: requests that ended without one drafted round, and not because a draft failed.
    """

    requests: int = 0
    rounds: int = 0
    accepted: int = 0
    silent: int = 0
    _rounds_squared: int = 0
    _accepted_squared: int = 0
    _product: int = 0

    def add(self, outcome: DraftOutcome) -> None:
        """Count a request; one without rounds says nothing of acceptance."""
        if outcome.rounds < 1:
            self.silent += not outcome.failed
            return
        self.requests += 1
        self.rounds += outcome.rounds
        self.accepted += outcome.accepted
        self._rounds_squared += outcome.rounds**2
        self._accepted_squared += outcome.accepted**2
        self._product += outcome.rounds * outcome.accepted

    @property
    def drafted_share(self) -> float:
        """Of the requests that ended, how many were drafted for; nan without any."""
        ended = self.requests + self.silent
        return self.requests / ended if ended else math.nan

    @property
    def rate(self) -> float:
        """Accepted over rounds; nan without any."""
        return self.accepted / self.rounds if self.rounds else math.nan

    def variance(self) -> float:
        """Of one request's acceptance about the rate, requests weighted by their rounds.

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
class Spread:
    """What is assumed of requests beforehand: a handful that agree does not mean that all do.

    Attributes:
        typical: standard deviation of a request's acceptance.
        weight: requests that this assumption counts as.
    """

    typical: float = 0.15
    weight: float = 3.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of two acceptances, and what it lies between but for an error each side."""

    difference: float
    lower: float
    upper: float


def compare(first: Tally, second: Tally, error: float, spread: Spread | None = None) -> Comparison:
    """How much better the first is, by Welch's t with the spread of requests.

    Args:
        first: at least one request.
        second: at least one request.
        error: chance that the difference is beyond a bound, per bound; in (0, 0.5).
        spread: assumed beforehand.
    """
    spread = spread or Spread()
    parts = []
    for tally in (first, second):
        degrees = spread.weight + tally.requests - 1
        seen = (tally.requests - 1) * tally.variance()
        variance = (spread.weight * spread.typical**2 + seen) / degrees
        parts.append((variance / tally.requests, degrees))
    total = sum(share for share, _ in parts)
    degrees = total**2 / sum(share**2 / freedom for share, freedom in parts)
    reach = student_quantile(error, max(1, int(degrees))) * math.sqrt(total)
    difference = first.rate - second.rate
    return Comparison(difference, difference - reach, difference + reach)
