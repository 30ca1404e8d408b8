"""The measured weights of the experts, as this process knows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from paceline.actors.routing.policy import Route
from paceline.actors.weights.slots import in_canary

logger = logging.getLogger(__name__)

_EVERY_S = 3.0
_TIMEOUT_S = 2.0
_STALE_AFTER_S = 300.0


class RouteTable:
    """Follows the scorer in the background: no request waits for it or notices its death.

    A table that has not been confirmed for minutes is given up: experts may be others by now.
    """

    def __init__(
        self,
        scorer: Any,
        clock: Callable[[], float],
        trial_share: float = 0.0,
        *,
        every_s: float = _EVERY_S,
        stale_after_s: float = _STALE_AFTER_S,
    ) -> None:
        """Ask nothing yet.

        Args:
            scorer: actor handle; None: nothing is ever known.
            clock: monotonic seconds.
            trial_share: of the requests, which an expert's candidate drafts for.
            every_s: between two questions.
            stale_after_s: without an answer, the table counts no more.
        """
        self._scorer = scorer
        self._clock = clock
        self._every_s = every_s
        self._stale_after_s = stale_after_s
        self._trial_share = trial_share
        self._weights: dict[str, dict[str, float]] | None = None
        self._on_trial: frozenset[str] = frozenset()
        self._answered_at = 0.0
        self._following: asyncio.Task[None] | None = None

    def weights(self) -> dict[str, dict[str, float]] | None:
        """Weights by topic and expert, None where they are not known; call it in a running loop."""
        if self._scorer is None:
            return None
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        stale = self._clock() - self._answered_at > self._stale_after_s
        return None if stale else self._weights

    def for_trial(self, route: Route, request_id: str) -> Route:
        """The route that a request takes; see :func:`tried`."""
        return tried(route, request_id, self._on_trial, self._trial_share)

    async def _follow(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    table = await self._scorer.table.remote()
                self._weights, self._on_trial = _read(table), _on_trial(table)
                self._answered_at = self._clock()
            except Exception as error:
                logger.info("no routing table (%r), the last one is kept for a while", error)
            await asyncio.sleep(self._every_s)


def tried(route: Route, request_id: str, on_trial: Collection[str], share: float) -> Route:
    """The route, or where a trial of the topic's own expert needs the request, that expert's.

    An expert that measured acceptance has taken its topic's requests from would get none to judge
    its candidate by, and so never come back. While it has a candidate, twice the trial's share goes
    to it: one half drafts with the candidate, the other with the stable weights.

    Args:
        route: by weights.
        request_id: by which the target splits the same way.
        on_trial: experts with a candidate.
        share: of the requests that a candidate drafts for, in [0, 1].
    """
    if route.draft == route.topic or route.topic not in on_trial:
        return route
    taken = in_canary(route.topic, request_id, 2 * share)
    return replace(route, draft=route.topic) if taken else route


def _on_trial(table: dict[str, Any]) -> frozenset[str]:
    return frozenset(map(str, table.get("on_trial", ())))


def _read(table: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        str(topic): {str(expert): float(weight) for expert, weight in row.items()}
        for topic, row in table.get("weights", {}).items()
    }
