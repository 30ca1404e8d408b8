"""Tell the load board of a request as it comes: trainers stop while it is still being routed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_QUIET_S = 0.02  # what is told keeps trainers off for longer than that


class Arrivals:
    """A front door's word to the board, some 50 times a second at most; it never fails."""

    def __init__(self, board: Any, clock: Callable[[], float]) -> None:
        """Tell nothing yet.

        Args:
            board: actor handle of the load board; None: nobody is told.
            clock: monotonic seconds.
        """
        self._board = board
        self._clock = clock
        self._told_at = -_QUIET_S

    def tell(self) -> None:
        """A request has come. Nothing is waited for."""
        now = self._clock()
        if self._board is None or now - self._told_at < _QUIET_S:
            return
        self._told_at = now
        try:
            self._board.announce.remote()
        except Exception as error:
            logger.info("the load board was not told of a request (%r)", error)
