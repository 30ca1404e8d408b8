"""A target's leases: a long-lived Serve stream per expert, and the connection that goes with it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from typing import Any

from paceline.actors.speculation.pool.connection import connect
from paceline.actors.speculation.pool.messages import Lease
from paceline.actors.speculation.pool.proposer import PoolProposer


class LeaseSharing:
    """Which leases a replica ends so that replicas that came after it get some.

    A target keeps the replica that it got for as long as both live, so that a further one would
    stand idle. Where there are m replicas in place of n, each of the n keeps n in m of its leases,
    one at least; the targets of the others open new ones, which Serve gives to the replica with
    the fewest.
    """

    def __init__(self, replicas: int) -> None:
        """Begin without leases, beside so many replicas in all."""
        self._replicas = replicas
        self._leases: list[str] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._leases)

    def opened(self, name: str) -> None:
        """A target has got a lease."""
        self._leases.append(name)

    def closed(self, name: str) -> None:
        """It has ended; a second call is fine."""
        if name in self._leases:
            self._leases.remove(name)

    def to_end(self, replicas: int) -> list[str]:
        """The leases that are to end now, the newest of them; they count no more.

        Args:
            replicas: that serve now, this one included; 0: unknown.
        """
        before, self._replicas = self._replicas, replicas or self._replicas
        if not 0 < before < self._replicas:
            return []
        keep = max(1, len(self._leases) * before // self._replicas)
        self._leases, ending = self._leases[:keep], self._leases[keep:]
        return ending


logger = logging.getLogger(__name__)

_CONNECT_S = 5.0
_OPEN_S = 60.0
_SILENT_S = 15.0
_FIRST_RETRY_S = 0.1
_LONGEST_RETRY_S = 3.0


class Leases:
    """Keeps every expert of a proposer connected, on a thread with an event loop of its own.

    While a stream is open Serve counts the target as the expert's load. A stream that ends, or
    whose heartbeats stop, is opened anew; Serve then gives whichever replica lives.
    """

    def __init__(self, proposer: PoolProposer, handles: Mapping[str, Any], client: str) -> None:
        """Begin.

        Args:
            proposer: gets the connections.
            handles: expert to the Serve handle of its deployment.
            client: names this target, for people.
        """
        self._proposer = proposer
        self._handles = dict(handles)
        self._client = client
        self._retry_s = dict.fromkeys(self._handles, _FIRST_RETRY_S)
        self._started = threading.Event()
        threading.Thread(target=self._run, name="paceline-leases", daemon=True).start()

    def add(self, expert: str, handle: Any) -> None:
        """Keep a further expert of the proposer connected, from any thread."""
        self._started.wait()
        self._retry_s[expert] = _FIRST_RETRY_S
        asyncio.run_coroutine_threadsafe(self._hold(expert, handle), self._events)

    def _run(self) -> None:
        asyncio.run(self._hold_all())

    async def _hold_all(self) -> None:
        self._events = asyncio.get_running_loop()
        self._started.set()
        await asyncio.gather(*(self._hold(*item) for item in self._handles.items()))
        await asyncio.Event().wait()  # without experts at first: others may be added

    async def _hold(self, expert: str, handle: Any) -> None:
        """Hold a lease on one expert, for ever."""
        while True:
            try:
                await self._lease(expert, handle)
            except Exception as error:
                logger.info("no lease on %s (%s), trying again", expert, type(error).__name__)
            await asyncio.sleep(self._retry_s[expert])
            self._retry_s[expert] = min(2.0 * self._retry_s[expert], _LONGEST_RETRY_S)

    async def _lease(self, expert: str, handle: Any) -> None:
        """Hold one stream to its end."""
        stream = handle.options(stream=True).open.remote(self._client)
        try:
            async with asyncio.timeout(_OPEN_S):
                lease: Lease = await anext(stream)
            await self._connect(expert, lease)
            while True:
                async with asyncio.timeout(_SILENT_S):
                    await anext(stream)
                if self._proposer.wants_link(expert):
                    await self._connect(expert, lease)
        except StopAsyncIteration:
            return
        finally:
            stream.cancel()

    async def _connect(self, expert: str, lease: Lease) -> None:
        link = await asyncio.to_thread(connect, lease, _CONNECT_S)
        self._proposer.attach(expert, link)
        self._retry_s[expert] = _FIRST_RETRY_S
