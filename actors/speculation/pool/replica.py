"""An expert behind Serve: placed, scaled and watched by it, asked past it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray import serve

from paceline.actors.speculation.pool.build import build_server
from paceline.actors.speculation.pool.messages import Lease
from paceline.actors.speculation.pool.sessions import LeaseSharing
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.subscriber import RegistrySubscriber


class BusyShare:
    """From a growing count of busy seconds to the share of them since the last look."""

    def __init__(self, busy_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """Begin now.

        Args:
            busy_s: seconds busy since some beginning, never fewer than before.
            clock: seconds, monotonic.
        """
        self._busy_s = busy_s
        self._clock = clock
        self._last = (busy_s(), clock())
        self._share = 0.0

    def look(self) -> float:
        """The share since the last look, 0 to 1; that of the last one where no time has passed."""
        busy_s, now = self._busy_s(), self._clock()
        before_s, at = self._last
        if now > at:
            self._share = min(max((busy_s - before_s) / (now - at), 0.0), 1.0)
            self._last = (busy_s, now)
        return self._share


logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
_UNUSED_S = 30.0
_PING_S = 10.0
_FIRST_POLL_S = 5.0
_COUNT_EVERY_S = 5.0


class ExpertReplica:
    """One expert and its initial weights for all targets, on a socket of its own.

    The registry may be dead or slow at any time: the weights then stay as they are.
    """

    def __init__(self, settings: ExpertSettings, registry: Any = None) -> None:
        """Load the expert, take the newest weights and begin to serve.

        Args:
            settings: see ExpertSettings.
            registry: actor handle of the weight registry; None never swaps.
        """
        self._expert = settings.expert
        host = ray.util.get_node_ip_address() if settings.across_nodes else None
        self._server = build_server(settings, host)
        self._names = itertools.count()
        self._busy = BusyShare(lambda: self._server.busy_s, time.monotonic)
        self._scaled = settings.scaled
        self._sharing = LeaseSharing(0)
        self._ending: set[str] = set()
        self._counting: asyncio.Task[None] | None = None
        if registry is not None:
            subscriber = RegistrySubscriber(
                registry,
                on_weights=lambda slot, version, state: self._server.swap(version, state, slot),
                expert=self._expert,
                failed=self._failed_candidates,
            )
            subscriber.poll(0.0, _FIRST_POLL_S)  # serve with the newest weights from the start
            subscriber.start()

    async def open(self, client: str) -> AsyncIterator[Lease | None]:
        """A target's lease: what it connects by, then a heartbeat every few seconds.

        It ends, and what the target held is freed, when the target closes the stream, has had no
        connection for half a minute (Serve does not tell of a caller that died), or is to find
        another replica.

        Args:
            client: names the target, for people.
        """
        name = f"{client}/{next(self._names)}"
        unused = 0.0
        self._sharing.opened(name)
        if self._scaled and (self._counting is None or self._counting.done()):
            self._counting = asyncio.create_task(self._share())
        try:
            yield self._server.lease(name)
            while unused < _UNUSED_S and name not in self._ending:
                await asyncio.sleep(HEARTBEAT_S)
                unused = 0.0 if self._server.connected(name) else unused + HEARTBEAT_S
                yield None
        finally:
            self._sharing.closed(name)
            self._ending.discard(name)
            self._server.dismiss(name)

    async def _share(self) -> None:
        """Leave some of the targets to replicas that came later, for as long as there are any."""
        while len(self._sharing):
            try:
                replicas = await asyncio.to_thread(_num_replicas)
                self._ending.update(self._sharing.to_end(replicas))
            except Exception as error:
                logger.info("Serve does not say how many replicas there are (%r)", error)
            await asyncio.sleep(_COUNT_EVERY_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the number of replicas goes by; Serve asks now and then where it is not fixed.

        A target drafts with one replica, so that there is no use for more than there are leases.
        """
        return {"load": self._busy.look(), "useful": float(len(self._sharing))}

    async def describe(self) -> dict[str, Any]:
        """What is drafted here and for how many."""
        return {"expert": self._expert, **self._server.stats()}

    async def check_health(self) -> None:
        """Serve's health check; RuntimeError has Serve replace this replica."""
        if not await asyncio.to_thread(self._server.ping, _PING_S):
            raise RuntimeError("the expert's thread has stopped or hangs")

    def _failed_candidates(self) -> list[DraftOutcome]:
        version = self._server.failed_candidate()
        if version is None:
            return []
        return [DraftOutcome(self._expert, version, 0, 0, failed=True)]


def _num_replicas() -> int:
    """Replicas of this one's deployment that serve, by Serve's word. Blocks."""
    own = serve.get_replica_context()
    deployments = serve.status().applications[own.app_name].deployments
    return int(deployments[own.deployment].replica_states.get("RUNNING", 0))
