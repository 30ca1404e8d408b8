"""What every variant of the decoding benchmark takes and gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prompts import Prompt


@dataclass(slots=True)
class Drafted:
    """Sums over speculative rounds: how many, and drafted and accepted tokens.

    ``drafted`` stays None where the variant does not tell; ``by_round`` counts rounds by their
    (drafted, accepted), where it tells even that.
    """

    rounds: int = 0
    accepted: int = 0
    drafted: int | None = None
    by_round: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add(self, other: Drafted) -> None:
        """Take another run's sums."""
        self.rounds += other.rounds
        self.accepted += other.accepted
        self.by_round.update(other.by_round)
        if other.drafted is not None:
            self.drafted = (self.drafted or 0) + other.drafted

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per speculative round, the bonus token included."""
        return 1.0 + self.accepted / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    def position_rates(self) -> list[float]:
        """Per drafted position, how often it was accepted where all before it were."""
        rates: list[float] = []
        for at in range(max((drafted for drafted, _ in self.by_round), default=0)):
            tried = {r: n for r, n in self.by_round.items() if r[0] > at and r[1] >= at}
            taken = sum(n for (_, accepted), n in tried.items() if accepted > at)
            rates.append(taken / sum(tried.values()) if tried else 0.0)
        return rates


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a block: output tokens per prompt, generation's seconds, what drafts did."""

    outputs: list[list[int]]
    seconds: float
    drafted: Drafted = field(default_factory=Drafted)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(map(len, self.outputs))


class Variant(Protocol):
    """One way to decode."""

    name: str

    def run(
        self, prompts: Sequence[Prompt], batch: int, temperature: float, max_tokens: int
    ) -> Run:
        """Answer all prompts, at most ``batch`` at once; temperature 0 is greedy."""
        ...
