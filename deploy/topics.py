"""Ask the router for a request's topic, within a time box."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Any

from paceline.actors.routing.policy import GENERAL, choose

logger = logging.getLogger(__name__)

_FAILURES_BEFORE_PAUSE = 3
_PAUSE_S = 2.0


class TopicFinder:
    """The router behind a time box: late, failed or unsure means ``general``.

    After several failures in a row it is left alone for a moment, so that a dead router does
    not cost every request the whole box.
    """

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
        self._failures = 0
        self._resume_at = 0.0

    async def find(self, text: str) -> str:
        """The topic of a text, ``general`` in doubt."""
        if self._router is None or self._clock() < self._resume_at:
            return GENERAL
        try:
            async with asyncio.timeout(self._timeout_s):
                probabilities = await self._router.classify.remote(text)
        except Exception as error:  # a router must never cost an answer
            self._note_failure(error)
            return GENERAL
        self._failures = 0
        return choose(probabilities, self._experts, self._min_confidence)

    def _note_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= _FAILURES_BEFORE_PAUSE:
            self._failures, self._resume_at = 0, self._clock() + _PAUSE_S
            logger.warning("the router keeps failing (%r), pausing it", error)
