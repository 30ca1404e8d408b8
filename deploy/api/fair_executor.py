"""Threads for slow work of requests, shared fairly among clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
        # Acquired by running work: what waits is not at a thread yet, so that it can be given up.
        self._idle = asyncio.Semaphore(num_threads)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by client

    async def run(
        self, client: str, work: Callable[[], ResultT], release: Callable[[], None] = lambda: None
    ) -> ResultT:
        """Return the result of work on a thread, after the client's earlier work.

        If the caller is cancelled, work that runs already is still the client's until it ends;
        other work is given up.

        Args:
            client: see `client_key`.
            work: is run once.
            release: is called when the work has ended, or is given up.
        """
        with ExitStack() as held:
            held.callback(release)
            turn = self._turns.setdefault(client, asyncio.Lock())
            await turn.acquire()
            held.callback(turn.release)
            await self._idle.acquire()
            held.callback(self._idle.release)
            running = asyncio.get_running_loop().run_in_executor(self._threads, work)
            until_end = held.pop_all()

            def end(ended: asyncio.Future[ResultT]) -> None:
                until_end.close()
                if not ended.cancelled():
                    ended.exception()  # else asyncio logs that of a caller who has gone

            running.add_done_callback(end)
        return await asyncio.shield(running)

    def close(self, last: Callable[[], None]) -> None:
        """Wait for all work, run ``last`` on a thread, and end the threads."""
        self._threads.submit(last).result()
        self._threads.shutdown()
