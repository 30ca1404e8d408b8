"""Threads for slow work of requests, shared fairly among clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from weakref import WeakValueDictionary

ResultT = TypeVar("ResultT")


class FairExecutor:
    """Runs a client's work piece by piece, so that another waits for one of these at most.

    Args:
        num_threads: with more than one, a single client never makes another wait.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client

    async def run(self, client: str, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of work on a thread, after the client's earlier work.

        Args:
            client: see `client_key`.
            work: is run once.
        """
        async with self._turns.setdefault(client, asyncio.Lock()):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self, last: Callable[[], None]) -> None:
        """Wait for all work, run ``last`` on a thread, and end the threads."""
        self._threads.submit(last).result()
        self._threads.shutdown()
