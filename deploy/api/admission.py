"""Draining: what is under way is finished, nothing new is let in.

The trainer scheduler has the switch, which all replicas of the front door poll. While it is down,
they keep the last value; a restarted scheduler knows of no drain, and
``paceline drain`` tells it again for as long as it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

from paceline.deploy.errors import ApiError, overloaded, rate_limited


class Slots:
    """How many sequences are under way, and the most that are let in: of all, and of a client."""

    def __init__(self, limit: int, per_client: int | None = None) -> None:
        """Start with none of ``limit`` taken; None lets one client take them all."""
        self.resize(limit, per_client)
        self._taken: Counter[str] = Counter()

    def resize(self, limit: int, per_client: int | None = None) -> None:
        """Let in so many from now on; those that are in stay, however many."""
        self._limit = limit
        self._per_client = limit if per_client is None else min(limit, per_client)

    @property
    def taken(self) -> int:
        """Sequences under way."""
        return self._taken.total()

    def take(self, count: int, client: str = "", param: str = "prompt") -> Callable[[], None]:
        """Let ``count`` sequences in; the returned call, once or more often, lets them out.

        Args:
            count: sequences of one request.
            client: who asks.
            param: the request's field that makes them so many.

        Raises:
            ApiError: 503 with Retry-After where they are too many just now, 429 where the
                client's are, 400 where they always are.
        """
        if count > self._per_client:
            text = f"{param}: at most {self._per_client} answers at once"
            raise ApiError(400, text, param=param, code="invalid_value")
        if self._taken.total() + count > self._limit:
            raise overloaded("The server is overloaded; try again.")
        if self._taken[client] + count > self._per_client:
            raise rate_limited("Too many of your requests are under way; try again.")
        self._taken[client] += count
        held = [count]

        def release() -> None:
            if not held:
                return
            self._taken[client] -= held.pop()
            if not self._taken[client]:
                del self._taken[client]

        return release


logger = logging.getLogger(__name__)

_POLL_S = 0.5
_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 5


class Drain:
    """A front door's view of the switch; it follows in the background, and no request waits."""

    def __init__(self, scheduler: Any) -> None:
        """Ask nothing yet.

        Args:
            scheduler: actor handle of the trainer scheduler; None: never drained.
        """
        self._scheduler = scheduler
        self._following: asyncio.Task[None] | None = None
        self.on = False

    def follow(self) -> None:
        """See that the switch is followed; call it in a running loop."""
        following = self._following
        if self._scheduler is not None and (following is None or following.done()):
            self._following = asyncio.create_task(self._follow())

    def check(self) -> None:
        """Refuse what is new while draining.

        Raises:
            ApiError: 503 with Retry-After.
        """
        if self.on:
            raise ApiError(
                503,
                "The server is being drained: it finishes what is under way and takes nothing new.",
                "server_error",
                code="draining",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def look(self) -> None:
        """Ask the scheduler once."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self.on = bool((await self._scheduler.snapshot.remote()).get("draining"))
        except Exception as error:
            logger.info("the trainer scheduler does not say whether to drain (%r)", error)

    async def _follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_POLL_S)
