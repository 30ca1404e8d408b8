"""Idleness of serving, by the load that replicas report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

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
        paused: whether training is paused.
        draining: whether the server is being drained.
    """

    idle_after_s: float = 0.05
    stale_after_s: float = 6.0
    occupied_above: int = 0
    paused: bool = False
    draining: bool = False
    _loads: dict[str, _Load] = field(default_factory=dict)
    _busy_until: float = -math.inf
    _announced_until: float = -math.inf

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
        if self._busy(load):
            self._busy_until, self._announced_until = now, -math.inf
        elif before is not None and self._busy(before):
            self._busy_until = now  # a request that is announced has not come yet

    def announce_request(self, now: float) -> None:
        """Count serving as busy until a busy replica reports, for ``_ROUTING_S`` at most.

        Does nothing if a replica may decode a request and still count as idle.
        """
        if not self.occupied_above:
            self._announced_until = now + _ROUTING_S

    def may_train(self, now: float) -> bool:
        """Whether a micro-step may start at ``now``, monotonic seconds."""
        return now >= self.idle_from(now)

    def idle_from(self, now: float) -> float:
        """Start of the current idle time, or of the next one if nothing is reported until then.

        ``inf`` if training is not allowed; ``-inf`` if no replica has ever been busy.
        """
        for name, load in list(self._loads.items()):
            if now >= self._gone_at(load):
                del self._loads[name]
                if self._busy(load):
                    until = self._gone_at(load) - self.idle_after_s
                    self._busy_until = max(self._busy_until, until)
        if self.paused or self.draining:
            return math.inf
        gone_at = [self._gone_at(load) for load in self._loads.values() if self._busy(load)]
        return max(self._busy_until + self.idle_after_s, self._announced_until, *gone_at)

    @property
    def running(self) -> int:
        """Requests being decoded, of all replicas."""
        return sum(load.running for load in self._loads.values())

    @property
    def waiting(self) -> int:
        """Requests in the replicas' queues."""
        return sum(load.waiting for load in self._loads.values())

    @property
    def replicas(self) -> int:
        """Replicas that report."""
        return len(self._loads)

    def _gone_at(self, load: _Load) -> float:
        return load.at + self.stale_after_s

    def _busy(self, load: _Load) -> bool:
        return load.running > self.occupied_above or load.waiting > 0
