"""Ask the router for a request's topic, within a time box."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from paceline.actors.routing.policy import GENERAL, choose

logger = logging.getLogger(__name__)


class RouterCircuit:
    """Whether to ask the router: a dead or hung one costs a time box now and then, no more.

    Closed, every request asks. The first failure opens it for a back-off; after that one request
    asks, alone, and its answer closes the circuit or doubles the back-off.
    """

    def __init__(self, first_wait_s: float = 0.5, longest_wait_s: float = 30.0) -> None:
        """Start closed, with the back-off's first and longest seconds."""
        self._first_wait_s = first_wait_s
        self._longest_wait_s = longest_wait_s
        self._wait_s = 0.0  # 0: closed
        self._opened_at = 0.0
        self._trying = False

    @property
    def closed(self) -> bool:
        """True where every request asks."""
        return self._wait_s == 0.0

    def ask(self, now: float) -> bool:
        """Whether a request may ask; what comes of it must be told.

        Args:
            now: monotonic seconds.
        """
        if self.closed:
            return True
        if self._trying or now < self._opened_at + self._wait_s:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """The router has answered, however late it was asked."""
        self._wait_s, self._trying = 0.0, False

    def failed(self, asked_at: float, now: float) -> None:
        """The router has not answered a request.

        Args:
            asked_at: when :meth:`ask` let it; failures of those that asked together count once.
            now: monotonic seconds.
        """
        if not self.closed and asked_at < self._opened_at:
            return
        self._wait_s = min(max(2.0 * self._wait_s, self._first_wait_s), self._longest_wait_s)
        self._opened_at, self._trying = now, False

    def gave_up(self) -> None:
        """The client of a request that asked has gone: nothing is learnt of the router."""
        self._trying = False


class TopicFinder:
    """The router behind a time box and a circuit: late, failed or unsure means ``general``."""

    def __init__(
        self,
        router: Any,
        experts: Collection[str],
        timeout_s: float,
        min_confidence: float,
        clock: Callable[[], float],
    ) -> None:
        """Remember the router's handle (None: every request is ``general``) and the rules."""
        self._router = router
        self._experts = frozenset(experts)
        self._timeout_s = timeout_s
        self._min_confidence = min_confidence
        self._clock = clock
        self._circuit = RouterCircuit()

    async def find(self, text: str) -> str:
        """The topic of a text, ``general`` in doubt."""
        asked_at = self._clock()
        if self._router is None or not self._circuit.ask(asked_at):
            return GENERAL
        try:
            async with asyncio.timeout(self._timeout_s):
                probabilities = await self._router.classify.remote(text)
        except asyncio.CancelledError:
            self._circuit.gave_up()
            raise
        except Exception as error:  # a router must never cost an answer
            if self._circuit.closed:
                logger.warning("the router fails (%r), requests go to general meanwhile", error)
            self._circuit.failed(asked_at, self._clock())
            return GENERAL
        self._circuit.succeeded()
        return choose(probabilities, self._experts, self._min_confidence)
