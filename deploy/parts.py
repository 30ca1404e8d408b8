"""Calls to the other parts of a running system: each may be dead, late, or not there yet.

A call is handed over as something to be called: a part that was never there fails in the call
itself (:class:`paceline.cluster.named.NotThereError`), and not in waiting for its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from paceline.deploy.errors import ApiError, overloaded

logger = logging.getLogger(__name__)

Call = Callable[[], Awaitable[Any]]


async def bounded(call: Call, seconds: float) -> Any:
    """An answer.

    Args:
        call: asks the part.
        seconds: longest wait.

    Raises:
        TimeoutError: the part is late.
    """
    async with asyncio.timeout(seconds):
        return await call()


async def asked(call: Call | None, seconds: float) -> Any:
    """An answer, None where there is none: what merely shows things never fails over a part.

    Args:
        call: asks the part; None: there is no such part.
        seconds: longest wait.
    """
    if call is None:
        return None
    try:
        return await bounded(call, seconds)
    except Exception as error:
        logger.info("a part does not say (%r)", error)
        return None


async def needed(name: str, call: Call, seconds: float, silent: str, code: str = "") -> Any:
    """An answer that is needed.

    Args:
        name: of the part, for the log.
        call: asks it.
        seconds: longest wait.
        silent: what is told where it does not answer.
        code: of that error; ``server_overloaded`` where it is left out.

    Raises:
        ApiError: 503 where the part does not answer.
        KeyError: the part knows of no such thing.
        ValueError: it refuses.
    """
    try:
        return await bounded(call, seconds)
    except (KeyError, ValueError):
        raise
    except Exception as error:
        logger.warning("the %s does not answer", name, exc_info=True)
        if code:
            raise ApiError(503, silent, "server_error", code=code) from error
        raise overloaded(silent) from error


def refusal_of(error: Exception) -> str:
    """What a part refuses with: Ray's own error has the whole remote traceback as its text."""
    return str(getattr(error, "cause", None) or error)
