"""Ray Serve replica of an expert: Serve places, scales and checks it; drafts bypass Serve."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable

import ray
from ray import serve

from paceline.actors.speculation.pool.build import build_server
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber

logger = logging.getLogger(__name__)

_HEARTBEAT_S = 2.0
_UNUSED_TIMEOUT_S = 30.0
_PING_TIMEOUT_S = 10.0
_FIRST_POLL_TIMEOUT_S = 5.0
_BALANCE_EVERY_S = 5.0


class Utilization:
    """Share of time spent busy, between samples of a growing count of busy seconds."""

    def __init__(self, busy_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """Take the first sample.

        Args:
            busy_s: seconds busy so far.
            clock: seconds, monotonic.
        """
        self._busy_s = busy_s
        self._clock = clock
        self._last = (busy_s(), clock())
        self._share = 0.0

    def sample(self) -> float:
        """Return the share, 0 to 1, since the last sample; the last one if no time has passed."""
        busy_s, now = self._busy_s(), self._clock()
        last_busy_s, last = self._last
        if now > last:
            self._share = min(max((busy_s - last_busy_s) / (now - last), 0.0), 1.0)
            self._last = (busy_s, now)
        return self._share


class SessionBalancer:
    """Selects sessions to close so that new replicas get some.

    A target stays with its replica as long as both live, so a new replica would be idle. When n
    replicas become m, each of the n keeps n in m of its sessions, at least one; the targets of the
    others open new ones, which Serve routes to the replica with the fewest.
    """

    def __init__(self) -> None:
        self._replicas = 0
        self._sessions: list[str] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def add(self, session: str) -> None:
        """Add a session."""
        self._sessions.append(session)

    def discard(self, session: str) -> None:
        """Remove a session, if it is there."""
        if session in self._sessions:
            self._sessions.remove(session)

    def select_to_close(self, replicas: int) -> list[str]:
        """Remove and return the sessions to close now, the newest ones.

        Args:
            replicas: running ones, this one included; 0: unknown.
        """
        before, self._replicas = self._replicas, replicas or self._replicas
        if not 0 < before < self._replicas:
            return []
        keep = max(1, len(self._sessions) * before // self._replicas)
        self._sessions, closing = self._sessions[:keep], self._sessions[keep:]
        return closing


class ExpertReplica:
    """Serves one expert and its initial weights to all targets, on a socket of its own.

    The registry may be dead or slow at any time: the weights stay as they are then.
    """

    def __init__(self, settings: ExpertSettings, registry: RegistryHandle | None = None) -> None:
        """Load the expert, pull the newest weights and start to serve.

        Args:
            settings: see ExpertSettings.
            registry: actor handle of the weight registry; None never swaps.
        """
        self._expert = settings.expert
        host = ray.util.get_node_ip_address() if settings.across_nodes else None
        self._server = build_server(settings, host)
        self._numbers = itertools.count()
        self._utilization = Utilization(lambda: self._server.busy_s, time.monotonic)
        self._autoscaled = settings.autoscaled
        self._balancer = SessionBalancer()
        self._closing: set[str] = set()
        self._balancing: asyncio.Task[None] | None = None
        if registry is not None:
            subscriber = RegistrySubscriber(
                registry,
                on_weights=self._server.load_weights,
                expert=self._expert,
                failed=self._failed_candidates,
                name=f"expert-{self._expert}-{uuid.uuid4().hex[:8]}",
            )
            subscriber.poll(0.0, _FIRST_POLL_TIMEOUT_S)  # start with the newest weights
            subscriber.start()

    async def open_session(self, client: str) -> AsyncIterator[Session | None]:
        """Open a target's session: yield what it connects with, then None every few seconds.

        The session ends, and its sequences are released, when the target closes the stream, has
        had no connection for half a minute (Serve does not report a dead caller), or is to move
        to another replica.

        Args:
            client: the target's name, for logs.
        """
        name = f"{client}/{next(self._numbers)}"
        unused_s = 0.0
        self._balancer.add(name)
        if self._autoscaled and (self._balancing is None or self._balancing.done()):
            self._balancing = asyncio.create_task(self._balance())
        try:
            yield self._server.open_session(name)
            while unused_s < _UNUSED_TIMEOUT_S and name not in self._closing:
                await asyncio.sleep(_HEARTBEAT_S)
                unused_s = 0.0 if self._server.is_connected(name) else unused_s + _HEARTBEAT_S
                yield None
        finally:
            self._balancer.discard(name)
            self._closing.discard(name)
            self._server.close_session(name)

    async def _balance(self) -> None:
        """Close some sessions when replicas are added, as long as there are sessions."""
        while len(self._balancer):
            try:
                replicas = await asyncio.to_thread(_num_replicas)
                self._closing.update(self._balancer.select_to_close(replicas))
            except Exception as error:
                logger.info("Serve does not report the number of replicas (%r)", error)
            await asyncio.sleep(_BALANCE_EVERY_S)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load and the useful number of replicas for Serve's autoscaling.

        A target drafts with one replica, so more replicas than sessions are of no use.
        """
        return {"load": self._utilization.sample(), "useful": float(len(self._balancer))}

    async def check_health(self) -> None:
        """Serve's health check: a RuntimeError has Serve replace this replica."""
        if not await asyncio.to_thread(self._server.ping, _PING_TIMEOUT_S):
            raise RuntimeError("the expert's thread has stopped or hangs")

    def _failed_candidates(self) -> list[DraftOutcome]:
        version = self._server.failed_candidate()
        if version is None:
            return []
        return [DraftOutcome(self._expert, version, 0, 0, failed=True)]


def _num_replicas() -> int:
    """Return the number of running replicas of this deployment, as Serve reports it. Blocks."""
    own = serve.get_replica_context()
    deployments = serve.status().applications[own.app_name].deployments
    return int(deployments[own.deployment].replica_states.get("RUNNING", 0))
