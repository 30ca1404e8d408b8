"""What drafts did, gathered before it is sent: a call per second, not per request."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.actors.weights.evidence import DraftOutcome

logger = logging.getLogger(__name__)

_EVERY_S = 1.0


class OutcomeReporter:
    """Collects outcomes and sends them together. The caller's thread alone uses it."""

    def __init__(
        self,
        send: Callable[[list[DraftOutcome]], object],
        clock: Callable[[], float],
        every_s: float = _EVERY_S,
    ) -> None:
        """Begin with nothing.

        Args:
            send: takes outcomes without waiting; where it raises, they are lost.
            clock: seconds, monotonic.
            every_s: shortest time between two calls while requests run.
        """
        self._send = send
        self._clock = clock
        self._every_s = every_s
        self._pending: list[DraftOutcome] = []
        self._sent_at = clock()

    def add(self, outcome: DraftOutcome) -> None:
        """Keep an outcome until the next :meth:`flush` that is due."""
        self._pending.append(outcome)

    def flush(self, *, idle: bool) -> None:
        """Send what there is, if it is time; at once where nothing runs any more."""
        now = self._clock()
        if not self._pending or not (idle or now - self._sent_at >= self._every_s):
            return
        outcomes, self._pending, self._sent_at = self._pending, [], now
        try:
            self._send(outcomes)
        except Exception:
            logger.warning("%d outcomes were not reported", len(outcomes), exc_info=True)
