"""When serving is idle: a first, simple rule over the load that the replicas report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_ON_ITS_WAY_S = 0.25  # through the router and a queue; what takes longer is seen by its report


@dataclass(slots=True)
class _Report:
    running: int
    waiting: int
    at: float


@dataclass(slots=True)
class IdleRule:
    """Training may run once no replica has been busy for ``idle_after_s``.

    Attributes:
        occupied_above: requests that a replica may decode and still count as idle. 0 where
            training takes its processor; more where it has one to itself.
        idle_after_s: quiet seconds after the last request; keeps a burst's gaps for serving.
        stale_after_s: a replica silent for this long is gone and counts as idle. Busy
            replicas report every second or so.
    """

    idle_after_s: float = 0.05
    stale_after_s: float = 6.0
    occupied_above: int = 0
    _reports: dict[str, _Report] = field(default_factory=dict)
    _busy_until: float = float("-inf")
    _announced_until: float = float("-inf")
    _paused: bool = False
    _draining: bool = False

    def report(self, replica_id: str, running: int, waiting: int, now: float) -> None:
        """Take a replica's load.

        Args:
            replica_id: who reports.
            running: requests being decoded.
            waiting: requests that are queued.
            now: monotonic seconds.
        """
        before = self._reports.get(replica_id)
        fresh = _Report(running, waiting, now)
        self._reports[replica_id] = fresh
        if self._busy(fresh) or (before is not None and self._busy(before)):
            self._busy_until, self._announced_until = now, float("-inf")

    def announce(self, now: float) -> None:
        """A request has come, and is on its way to a replica, which will report it.

        Until a busy replica reports, and for ``_ON_ITS_WAY_S`` at most, serving is not idle.
        Nothing where a replica may be busy with a request and count as idle.
        """
        if not self.occupied_above:
            self._announced_until = now + _ON_ITS_WAY_S

    def _busy(self, report: _Report) -> bool:
        return report.running > self.occupied_above or report.waiting > 0

    def pause(self) -> None:
        """No training until :meth:`resume`."""
        self._paused = True

    def resume(self) -> None:
        """Training again, when idle."""
        self._paused = False

    def drain(self, *, on: bool) -> None:
        """Whether the server takes nothing new; then nothing is trained either."""
        self._draining = on

    def may_train(self, now: float) -> bool:
        """Whether a micro-step may start at ``now``, monotonic seconds."""
        begun = self.idle_since(now)
        return begun is not None and now >= begun

    def idle_since(self, now: float) -> float | None:
        """When serving's present idleness began, or will have begun if nothing comes.

        None where a replica is busy or nothing shall be trained. ``-inf`` where no replica has
        ever been busy.
        """
        self._forget(now)
        if (
            self._paused
            or self._draining
            or now < self._announced_until
            or any(self._busy(report) for report in self._reports.values())
        ):
            return None
        return self._busy_until + self.idle_after_s

    def snapshot(self, now: float) -> dict[str, Any]:
        """The rule's view, for people."""
        may_train = self.may_train(now)
        return {
            "may_train": may_train,
            "paused": self._paused,
            "draining": self._draining,
            "running": sum(report.running for report in self._reports.values()),
            "waiting": sum(report.waiting for report in self._reports.values()),
            "replicas": len(self._reports),
        }

    def _forget(self, now: float) -> None:
        """Drop replicas that have stopped reporting."""
        gone = [key for key, r in self._reports.items() if now - r.at > self.stale_after_s]
        for key in gone:
            del self._reports[key]
