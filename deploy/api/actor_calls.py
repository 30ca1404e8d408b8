"""Calls to actors that may be slow or dead, and polling of actors in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.actors.cancellation import is_cancelled
from paceline.deploy.errors import ApiError, overloaded

logger = logging.getLogger(__name__)

T = TypeVar("T")
Call = Callable[[], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A failed call.

    Attributes:
        error: the exception's name.
    """

    error: str


async def call_with_timeout(call: Call[T], timeout_s: float) -> T:
    """The result of a call.

    Raises:
        TimeoutError: it takes longer than ``timeout_s`` seconds.
        ConnectionAbortedError: its receiver has cancelled it; of that Serve makes a CancelledError,
            as if the caller were cancelled.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await call()
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        raise ConnectionAbortedError("the call was cancelled") from error


async def call_or_none(call: Call[T] | None, timeout_s: float) -> T | None:
    """The result of a call, None if there is no such actor or the call fails."""
    if call is None:
        return None
    try:
        return await call_with_timeout(call, timeout_s)
    except Exception as error:
        logger.info("an actor does not answer (%r)", error)
        return None


async def call_or_error(call: Call[T], timeout_s: float) -> T | FailedCall:
    """The result of a call, or its error."""
    try:
        return await call_with_timeout(call, timeout_s)
    except Exception as error:
        return FailedCall(type(error).__name__)


async def call_required(name: str, call: Call[T], timeout_s: float, message: str, code: str) -> T:
    """The result of a call that a request depends on.

    Args:
        name: of the actor, for the log.
        call: starts the call.
        timeout_s: longest wait.
        message: of the error if the actor does not answer.
        code: of that error; empty for ``server_overloaded`` with Retry-After.

    Raises:
        ApiError: 503 if the actor does not answer.
        KeyError: raised by the actor.
        ValueError: raised by the actor.
    """
    try:
        return await call_with_timeout(call, timeout_s)
    except (KeyError, ValueError):
        raise
    except Exception as error:
        logger.warning("the %s does not answer", name, exc_info=True)
        if code:
            raise ApiError(503, message, "server_error", code=code) from error
        raise overloaded(message) from error


def remote_message(error: Exception) -> str:
    """The message of an actor's exception, without Ray's remote traceback."""
    return str(getattr(error, "cause", None) or error)


class BackgroundPoller:
    """Polls in a task of the running loop, so that no request waits for an actor.

    Args:
        poll: one poll.
        timeout_s: of one poll.
        interval_s: between two polls.
        name: of what is polled, for the log.
    """

    def __init__(
        self,
        poll: Callable[[], Awaitable[None]],
        *,
        timeout_s: float,
        interval_s: float,
        name: str,
    ) -> None:
        self._poll = poll
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._name = name
        self._task: asyncio.Task[None] | None = None

    def ensure_started(self) -> None:
        """Start the task unless it runs; needs a running loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def poll_once(self) -> None:
        """Poll now; a failure is logged."""
        try:
            await call_with_timeout(self._poll, self._timeout_s)
        except Exception as error:
            logger.info("polling the %s failed (%r), the last state is kept", self._name, error)

    async def _run(self) -> None:
        while True:
            await self.poll_once()
            await asyncio.sleep(self._interval_s)
