"""Circuit breaker of an expert: decides whether rounds wait for it; takes times, reads no clock.

Rounds wait for an expert only while its circuit is closed. A timeout or a lost connection opens
it. After a backoff it is half open: a ping is sent, for which no round waits, and the pong closes
the circuit. The backoff doubles until a response comes in time, so an expert that answers pings
but never in time costs a vanishing share of the rounds.
"""

from __future__ import annotations

from enum import StrEnum

from paceline.actors.backoff import Backoff

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 8.0


class CircuitState(StrEnum):
    """The three states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """State machine of events; times are monotonic seconds. Opens without a connection."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._retry_at = float("inf")
        self.state = CircuitState.OPEN

    @property
    def closed(self) -> bool:
        """Whether rounds may wait for the expert."""
        return self.state is CircuitState.CLOSED

    def on_connect(self) -> None:
        """Close the circuit."""
        self.state = CircuitState.CLOSED

    def on_disconnect(self) -> None:
        """Open the circuit until the next connection."""
        self._backoff.fail()
        self._retry_at = float("inf")
        self.state = CircuitState.OPEN

    def on_timeout(self, now: float) -> None:
        """Open the circuit for the backoff."""
        self._retry_at = now + self._backoff.fail()
        self.state = CircuitState.OPEN

    def on_response(self) -> None:
        """Reset the backoff."""
        self._backoff.reset()

    def on_pong(self) -> None:
        """Close a half-open circuit; another timeout waits longer than the last."""
        if self.state is CircuitState.HALF_OPEN:
            self.state = CircuitState.CLOSED

    def should_ping(self, now: float) -> bool:
        """Return True, once per backoff, if a ping is to be sent now."""
        if self.closed or now < self._retry_at:
            return False
        if self.state is CircuitState.HALF_OPEN:  # the last ping had no pong
            self._backoff.fail()
        self.state = CircuitState.HALF_OPEN
        self._retry_at = now + self._backoff.delay
        return True
