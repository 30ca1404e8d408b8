"""The load board: replicas report their load to it, trainers get topics and leases from it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paceline.cluster.scheduler.idle import IdleRule
from paceline.cluster.scheduler.leases import (
    Assign,
    Fraction,
    Free,
    Grant,
    Kill,
    LeaseSettings,
    Place,
    Renew,
    Stop,
)
from paceline.cluster.scheduler.policy import Amounts, Broker, Demand

GO, WAIT, STOP = "go", "wait", "stop"
KILL, FREE, PLACE = "kill", "free", "place"
_ORDERS = {Kill: KILL, Free: FREE, Place: PLACE}


class LoadBoard:
    """Actor around :class:`Broker`; made without CPUs, a call costs about a millisecond.

    It keeps nothing: killed and restarted, it knows of no replica and no trainer, and is not
    paused, until the next reports, which come within a second where there is load. Trainers whose
    leases it does not know end their rounds and ask anew.

    Any thread may call it: beside the actor's own there is one that exports its figures.
    """

    def __init__(
        self,
        idle_after_s: float = 0.05,
        stale_after_s: float = 6.0,
        occupied_above: int = 0,
        leases: LeaseSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with no replica and no trainer known.

        Args:
            idle_after_s: quiet seconds before training may run.
            stale_after_s: seconds after which a silent replica is forgotten.
            occupied_above: requests per replica that still count as quiet.
            leases: see LeaseSettings.
            clock: monotonic seconds.
        """
        rule = IdleRule(idle_after_s, stale_after_s, occupied_above)
        self._broker = Broker(rule, leases)
        self._clock = clock
        self._asked = 0
        self._granted = 0
        self._lock = threading.Lock()

    def report(self, replica_id: str, running: int, waiting: int) -> None:
        """Take a replica's load; see LoadReporter for when they call."""
        with self._lock:
            self._broker.report(replica_id, running, waiting, self._clock())

    def announce(self) -> None:
        """A request has come; front doors call it before they route it."""
        with self._lock:
            self._broker.announce(self._clock())

    def may_train(self) -> bool:
        """Leave for one forward that needs no lease: the scorer's."""
        with self._lock:
            return self._noted(self._broker.may_compute(self._clock()))

    def ask(
        self, trainer: str, life: str, fractions: Sequence[Fraction], gains: Mapping[str, float]
    ) -> dict[str, Any]:
        """A topic for a trainer, see Broker.ask; without fractions it has one of its own.

        Returns:
            ``topic``, None where there is none, and ``anew``, whether another one had it last.
        """
        with self._lock:
            own = fractions or (Fraction(trainer, ""),)
            orders = self._broker.ask(trainer, life, own, gains, self._clock())
        for order in orders:
            if isinstance(order, Assign):
                return {"topic": order.topic, "anew": order.anew}
        return {"topic": None, "anew": False}

    def notes(self, trainer: str) -> dict[str, dict[str, Any]]:
        """Topic to what was last said of it, of those that this trainer did not have last."""
        with self._lock:
            return {topic: dict(note) for topic, note in self._broker.notes(trainer).items()}

    def check(self, trainer: str, life: str) -> str:
        """Between two micro-steps: ``go`` on, ``wait`` and ask again, or ``stop`` the round."""
        with self._lock:
            [order] = self._broker.check(trainer, life, self._clock())
            self._noted(isinstance(order, Grant | Renew))
        if isinstance(order, Stop):
            return STOP
        return GO if isinstance(order, Grant | Renew) else WAIT

    def rest(self, trainer: str, life: str) -> None:
        """A trainer does not compute for a while; its topic stays its own."""
        with self._lock:
            self._broker.rest(trainer, life, self._clock())

    def release(self, trainer: str, life: str, note: Mapping[str, Any] | None) -> None:
        """A trainer's round has ended, see Broker.release."""
        with self._lock:
            self._broker.release(trainer, life, note, self._clock())

    def keep(
        self, held: Mapping[str, Amounts], absent: Iterable[str], died: Iterable[str]
    ) -> list[tuple[str, str]]:
        """What the trainers' keeper sees, several times a second.

        Args:
            held: every trainer to what Ray books for it.
            absent: those that were freed and not placed again.
            died: those whose processes have ended by themselves since the last call.

        Returns:
            ``kill``, ``free`` or ``place`` and the trainer that is meant.
        """
        with self._lock:
            self._broker.kept(held, absent)
            for trainer in died:
                self._broker.died(trainer, self._clock())
            orders = self._broker.tick(self._clock())
        return [(_ORDERS[type(o)], o.trainer) for o in orders if type(o) in _ORDERS]

    def pending(
        self,
        demands: Iterable[tuple[Amounts, int]],
        free: Mapping[str, Amounts] | None,
    ) -> None:
        """Which replicas of Serve wait for room.

        Args:
            demands: what a replica needs, and how many such wait.
            free: node to what nobody has booked there, None where that is not known.
        """
        with self._lock:
            waiting = [Demand(dict(amounts), count) for amounts, count in demands]
            self._broker.pending(waiting, free, self._clock())

    def pause(self) -> None:
        """No training until :meth:`resume`, idle or not."""
        with self._lock:
            self._broker.pause(self._clock())

    def resume(self) -> None:
        """Training again, when idle."""
        with self._lock:
            self._broker.resume(self._clock())

    def drain(self, on: bool) -> None:
        """Have the front door take nothing new, and training pause, or end that."""
        with self._lock:
            self._broker.drain(self._clock(), on=on)

    def snapshot(self) -> dict[str, Any]:
        """Present load, leave and leases, with what was counted; see Broker.snapshot."""
        with self._lock:
            view = self._broker.snapshot(self._clock())
            return view | {"asked": self._asked, "granted": self._granted}

    def yields(self) -> list[float]:
        """How long trainers took to yield since the last call of this, seconds."""
        with self._lock:
            return self._broker.ledger.drained()

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def _noted(self, granted: bool) -> bool:
        self._asked += 1
        self._granted += granted
        return granted
