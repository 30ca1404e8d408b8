"""What every variant of the decoding benchmark takes and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prompts import Prompt


@dataclass(slots=True)
class Drafted:
    """Sums over speculative rounds: how many, and drafted and accepted tokens.

    ``drafted`` stays None where the variant does not tell.
    """

    rounds: int = 0
    accepted: int = 0
    drafted: int | None = None

    def add(self, other: Drafted) -> None:
        """Take another run's sums."""
        self.rounds += other.rounds
        self.accepted += other.accepted
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
