"""Draining: what is under way is finished, nothing new is let in.

The switch lies on the load board, which all replicas of the front door can ask. Where the board
dies, the replicas go on with what they last heard; the new board knows of no drain, and
``paceline drain`` tells it again for as long as it runs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from paceline.deploy.errors import ApiError

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_TIMEOUT_S = 5.0
_RETRY_AFTER_S = 5


class Drain:
    """A front door's view of the switch; it follows in the background, and no request waits."""

    def __init__(self, board: Any) -> None:
        """Ask nothing yet.

        Args:
            board: actor handle of the load board; None: never drained.
        """
        self._board = board
        self._following: asyncio.Task[None] | None = None
        self.on = False

    def follow(self) -> None:
        """See that the switch is followed; call it in a running loop."""
        following = self._following
        if self._board is not None and (following is None or following.done()):
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
        """Ask the board once."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                self.on = bool((await self._board.snapshot.remote()).get("draining"))
        except Exception as error:
            logger.info("the load board does not say whether to drain (%r)", error)

    async def _follow(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(_POLL_S)
