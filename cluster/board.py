"""The load board: replicas report their load to it, trainers ask it for leave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.cluster.idle import IdleRule


class LoadBoard:
    """Actor around :class:`IdleRule`; made without CPUs, a call costs about a millisecond.

    It keeps nothing: killed and restarted, it knows of no replica and is not paused until the
    next reports, which come within a second where there is load.

    Any thread may call it: beside the actor's own there is one that exports its figures.
    """

    def __init__(
        self,
        idle_after_s: float = 0.08,
        stale_after_s: float = 6.0,
        occupied_above: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no replica known.

        Args:
            idle_after_s: quiet seconds before training may run.
            stale_after_s: seconds after which a silent replica is forgotten.
            occupied_above: requests per replica that still count as quiet.
            clock: monotonic seconds.
        """
        self._rule = IdleRule(idle_after_s, stale_after_s, occupied_above)
        self._clock = clock
        self._asked = 0
        self._granted = 0
        self._lock = threading.Lock()

    def report(self, replica_id: str, running: int, waiting: int) -> None:
        """Take a replica's load; replicas call it on every change."""
        with self._lock:
            self._rule.report(replica_id, running, waiting, self._clock())

    def may_train(self) -> bool:
        """Leave for one micro-step."""
        with self._lock:
            granted = self._rule.may_train(self._clock())
            self._asked += 1
            self._granted += granted
            return granted

    def pause(self) -> None:
        """No training until :meth:`resume`, idle or not."""
        with self._lock:
            self._rule.pause()

    def resume(self) -> None:
        """Training again, when idle."""
        with self._lock:
            self._rule.resume()

    def drain(self, on: bool) -> None:
        """Have the front door take nothing new, and training pause, or end that."""
        with self._lock:
            self._rule.drain(on=on)

    def snapshot(self) -> dict[str, Any]:
        """Present load and leave, with counts of the leave asked and granted."""
        with self._lock:
            view = self._rule.snapshot(self._clock())
            return view | {"asked": self._asked, "granted": self._granted}

    def ping(self) -> bool:
        """True: the actor answers."""
        return True
