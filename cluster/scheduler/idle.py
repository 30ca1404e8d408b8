"""Idleness of serving, by the load that replicas report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_ROUTING_S = 0.25  # from the ingress to a replica's report; a longer queue is in the report


@dataclass(slots=True)
class _Load:
    running: int
    waiting: int
    at: float


@dataclass(slots=True)
class IdleDetector:
    """Allows training once no replica has been busy for ``idle_after_s``.

    Attributes:
        idle_after_s: quiet seconds after the last request; reserves a burst's gaps for serving.
        stale_after_s: a replica silent for this long is gone and counts as idle. Busy
            replicas report every second or so.
        occupied_above: requests that a replica may decode and still count as idle. 0 if
            training takes its processor; more if it has one to itself.
    """

    idle_after_s: float = 0.05
    stale_after_s: float = 6.0
    occupied_above: int = 0
    _loads: dict[str, _Load] = field(default_factory=dict)
    _busy_until: float = -math.inf
    _announced_until: float = -math.inf
    _paused: bool = False
    _draining: bool = False

    def report_load(self, replica_id: str, running: int, waiting: int, now: float) -> None:
        """Take a replica's load.

        Args:
            replica_id: of the replica.
            running: requests being decoded.
            waiting: requests in its queue.
            now: monotonic seconds.
        """
        before = self._loads.get(replica_id)
        load = self._loads[replica_id] = _Load(running, waiting, now)
        if self._busy(load) or (before is not None and self._busy(before)):
            self._busy_until, self._announced_until = now, -math.inf

    def announce_request(self, now: float) -> None:
        """Count serving as busy until a busy replica reports, for ``_ROUTING_S`` at most.

        Does nothing if a replica may decode a request and still count as idle.
        """
        if not self.occupied_above:
            self._announced_until = now + _ROUTING_S

    def pause(self) -> None:
        """Allow no training until :meth:`resume`."""
        self._paused = True

    def resume(self) -> None:
        """End a pause."""
        self._paused = False

    def drain(self, *, on: bool) -> None:
        """Start or end a drain of the server, during which no training is allowed."""
        self._draining = on

    def may_train(self, now: float) -> bool:
        """Whether a micro-step may start at ``now``, monotonic seconds."""
        begun = self.idle_since(now)
        return begun is not None and now >= begun

    def idle_since(self, now: float) -> float | None:
        """Start of the current idle time, in the future during the quiet time before it.

        None if a replica is busy or training is not allowed; ``-inf`` if no replica has ever been
        busy.
        """
        self._loads = {k: r for k, r in self._loads.items() if now - r.at <= self.stale_after_s}
        if (
            self._paused
            or self._draining
            or now < self._announced_until
            or any(self._busy(load) for load in self._loads.values())
        ):
            return None
        return self._busy_until + self.idle_after_s

    def snapshot(self, now: float) -> dict[str, Any]:
        """Load and switches as plain data."""
        may_train = self.may_train(now)
        return {
            "may_train": may_train,
            "paused": self._paused,
            "draining": self._draining,
            "running": sum(load.running for load in self._loads.values()),
            "waiting": sum(load.waiting for load in self._loads.values()),
            "replicas": len(self._loads),
        }

    def _busy(self, load: _Load) -> bool:
        return load.running > self.occupied_above or load.waiting > 0
