"""Exponential back-off. Pure: the caller brings the clock and waits."""

from __future__ import annotations

from dataclasses import dataclass

_MAX_EXPONENT = 500  # of a float


@dataclass(slots=True)
class Backoff:
    """Delays that grow with each failure in a row.

    Attributes:
        first: delay after the first failure, in the caller's unit.
        longest: of all delays.
        factor: growth per failure, in (1, 4].
        failures: in a row.
    """

    first: float
    longest: float
    factor: float = 2.0
    failures: int = 0

    @property
    def delay(self) -> float:
        """Delay after the latest failure; 0 without one."""
        if not self.failures:
            return 0.0
        return min(self.first * self.factor ** min(self.failures - 1, _MAX_EXPONENT), self.longest)

    def fail(self) -> float:
        """Count a failure; the delay until the next try."""
        self.failures += 1
        return self.delay

    def reset(self) -> None:
        """Start over after a success."""
        self.failures = 0


class RoundBackoff:
    """Rounds that are left out after tries in vain: 1, 2, 4 ... for each one in a row."""

    def __init__(self, longest: int) -> None:
        """Start without a failure; ``longest`` is the most rounds that are left out."""
        self._backoff = Backoff(1, longest)
        self._left = 0

    def leaves_out(self, most: int | None = None) -> bool:
        """Whether to leave this round out; to be called once a round.

        Args:
            most: rounds that may be left out from now on, None: all that are due.
        """
        left = self._left if most is None else min(self._left, most)
        self._left = max(left - 1, 0)
        return left > 0

    def fail(self) -> None:
        """Count a try in vain."""
        self._left = int(self._backoff.fail())

    def reset(self) -> None:
        """Start over after a success."""
        self._backoff.reset()
        self._left = 0
