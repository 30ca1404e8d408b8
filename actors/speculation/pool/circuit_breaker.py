"""Whether a round should wait for an expert: a circuit breaker per expert, without a clock.

A round waits for an expert only while its circuit is closed. An expert that was silent, failed or
went away opens it; after a back-off it is *half open*: a ping is sent, for which no round waits,
and its answer closes the circuit again. The back-off doubles until an answer comes in time, so
that an expert that answers pings but never in time costs a vanishing share of the rounds.
"""

from __future__ import annotations

from enum import StrEnum

FIRST_BACKOFF_S = 0.25
LONGEST_BACKOFF_S = 8.0


class CircuitState(StrEnum):
    """The three states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class ExpertCircuit:
    """Takes what happened to one expert, tells what to do. Times are monotonic seconds."""

    def __init__(
        self, first_backoff_s: float = FIRST_BACKOFF_S, longest_backoff_s: float = LONGEST_BACKOFF_S
    ) -> None:
        """Begin open without a time to wait for: there is no connection yet.

        Args:
            first_backoff_s: wait after a failure that follows an answer.
            longest_backoff_s: most that doubling makes of it.
        """
        self._first_s = first_backoff_s
        self._longest_s = longest_backoff_s
        self._failures = 0  # since the last answer in time
        self._until = float("inf")
        self.state = CircuitState.OPEN

    @property
    def closed(self) -> bool:
        """True where rounds may wait for the expert."""
        return self.state is CircuitState.CLOSED

    @property
    def backoff_s(self) -> float:
        """The wait that the latest failure brought; 0 where there was none since an answer."""
        if not self._failures:
            return 0.0
        doublings = min(self._failures - 1, 64)
        return min(self._first_s * 2.0**doublings, self._longest_s)

    def connected(self) -> None:
        """There is a new connection: the expert may be asked."""
        self.state = CircuitState.CLOSED

    def disconnected(self) -> None:
        """The connection is gone: nobody can be asked or pinged before there is a new one."""
        self._failures += 1
        self._until = float("inf")
        self.state = CircuitState.OPEN

    def failed(self, now: float) -> None:
        """The expert was silent for a round's time, or answered with an error."""
        self._failures += 1
        self._until = now + self.backoff_s
        self.state = CircuitState.OPEN

    def answered(self) -> None:
        """A round got its answer in time."""
        self._failures = 0

    def due(self, now: float) -> bool:
        """True where a ping must be sent now; says so once per back-off."""
        if self.closed or now < self._until:
            return False
        if self.state is CircuitState.HALF_OPEN:  # the last ping was never answered
            self._failures += 1
        self.state = CircuitState.HALF_OPEN
        self._until = now + self.backoff_s
        return True

    def pong(self) -> None:
        """A ping was answered: ask again; a further failure waits longer than the last."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.CLOSED
