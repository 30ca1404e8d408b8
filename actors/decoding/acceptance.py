"""What verification accepts of drafts, for the choice of how much to draft. Pure.

A draft's most likely token is accepted more often by a greedy target than a sampled one is by a
target that samples (E[accepted] = sum_x min(p(x), q(x)), Leviathan et al., arXiv 2211.17192,
theorem 3.5). Kept together, the greedy requests of an hour would make drafting look worth its time
for the sampled ones that come after, and the other way about. Requests with a seed, whose drafted
tokens are accepted where two coupled draws agree, count as sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_PRIOR_TRIALS = 4.0
_PRIOR_ACCEPTANCE = 0.6
_WINDOW = 200.0
# What counts of other weights' trials, or of the other use's: little, but more than nothing.
_HEARSAY = 0.1


class Use(NamedTuple):
    """An expert, and whether the requests that it drafts for are sampled or greedy."""

    draft: str
    sampled: bool = False

    @classmethod
    def of(cls, draft: str) -> tuple[Use, Use]:
        """Both uses of an expert."""
        return cls(draft, sampled=False), cls(draft, sampled=True)

    @property
    def other(self) -> Use:
        """The same expert with the other kind of request."""
        return Use(self.draft, not self.sampled)


@dataclass(slots=True)
class Acceptance:
    """Decayed conditional acceptance of one use, per position of a draft."""

    positions: int
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)
    _lengths: list[float] | None = None

    def __post_init__(self) -> None:
        self.hits, self.trials = [0.0] * self.positions, [0.0] * self.positions

    def observe(self, drafted: int, accepted: int) -> None:
        """One row's round: positions up to the first rejection were tried."""
        self._lengths = None
        keep = 1.0 - 1.0 / _WINDOW
        for position in range(min(drafted, accepted + 1, self.positions)):
            self.hits[position] = keep * self.hits[position] + (position < accepted)
            self.trials[position] = keep * self.trials[position] + 1.0

    def forget(self) -> None:
        """New weights: what was seen says little about them."""
        self._lengths = None
        self.hits = [_HEARSAY * h for h in self.hits]
        self.trials = [_HEARSAY * t for t in self.trials]

    def taken_after(self) -> Acceptance:
        """A start for the same expert's other use: this one's figures, with little weight."""
        other = Acceptance(self.positions)
        other.hits, other.trials = list(self.hits), list(self.trials)
        other.forget()
        return other

    def expected_lengths(self) -> list[float]:
        """Expected accepted tokens of a row for k = 0, 1, ... positions.

        A position that was seldom tried takes after the one before it.
        """
        if self._lengths is not None:
            return self._lengths
        lengths, reach, prior = [0.0], 1.0, _PRIOR_ACCEPTANCE
        for hits, trials in zip(self.hits, self.trials, strict=True):
            prior = (hits + _PRIOR_TRIALS * prior) / (trials + _PRIOR_TRIALS)
            reach *= prior
            lengths.append(lengths[-1] + reach)
        self._lengths = lengths
        return lengths
