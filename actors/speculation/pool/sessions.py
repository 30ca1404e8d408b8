"""Sessions between targets and experts: long-lived Serve streams with a connection each."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from paceline.actors.backoff import Backoff
from paceline.actors.cancellation import is_cancelled
from paceline.actors.speculation.pool.connection import connect
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.proposer import PoolProposer

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_OPEN_TIMEOUT_S = 60.0
_HEARTBEAT_TIMEOUT_S = 15.0
_FIRST_RETRY_S = 0.1
_MAX_RETRY_S = 3.0


class SessionStream(Protocol):
    """Stream of ExpertReplica.open_session: the session, then a None per heartbeat."""

    async def __anext__(self) -> Session | None:
        """Wait for the next item."""
        ...

    def cancel(self) -> None:
        """End the session."""
        ...


OpenSession = Callable[[], SessionStream]


class SessionManager:
    """Keeps the experts of a proposer connected, on an event loop in a thread of its own.

    While a stream is open, Serve counts the target as load of the expert's replica. A stream that
    ends, or whose heartbeats stop, is opened again, on whichever replica Serve chooses.
    """

    def __init__(self, proposer: PoolProposer) -> None:
        self._proposer = proposer
        self._tasks: list[Future[None]] = []  # an event loop refers to its tasks weakly
        self._loop = asyncio.new_event_loop()
        threading.Thread(
            target=self._loop.run_forever, name="paceline-sessions", daemon=True
        ).start()

    def add(self, expert: str, open_session: OpenSession) -> None:
        """Keep an expert of the proposer connected; from any thread."""
        task = self._keep_connected(expert, open_session)
        self._tasks.append(asyncio.run_coroutine_threadsafe(task, self._loop))

    async def _keep_connected(self, expert: str, open_session: OpenSession) -> None:
        backoff = Backoff(_FIRST_RETRY_S, _MAX_RETRY_S)
        while True:
            try:
                await self._run_session(expert, open_session(), backoff)
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled():
                    raise
                logger.info("no session with %s (%s), retrying", expert, type(error).__name__)
            await asyncio.sleep(backoff.fail())

    async def _run_session(self, expert: str, stream: SessionStream, backoff: Backoff) -> None:
        """Connect, and reconnect after a loss, until the stream ends."""
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                session = await anext(stream)
            assert session is not None
            await self._connect(expert, session, backoff)
            while True:
                async with asyncio.timeout(_HEARTBEAT_TIMEOUT_S):
                    await anext(stream)
                if self._proposer.needs_connection(expert):
                    await self._connect(expert, session, backoff)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()

    async def _connect(self, expert: str, session: Session, backoff: Backoff) -> None:
        connection, welcome = await asyncio.to_thread(connect, session, _CONNECT_TIMEOUT_S)
        self._proposer.attach(expert, connection, welcome)
        backoff.reset()
