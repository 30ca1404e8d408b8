"""The broker's decisions: which trainer learns which topic, and when it computes. No clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.cluster.idle import IdleRule
from paceline.cluster.leases import (
    Assign,
    Ending,
    Fraction,
    Free,
    Instruction,
    Lease,
    LeaseSettings,
    Place,
    Renew,
    Stop,
    Wait,
)
from paceline.cluster.ledger import UNWANTED, USED, WAITING, Ledger
from paceline.cluster.room import Amounts, Demand
from paceline.cluster.tenants import Tenants
from paceline.cluster.topics import TopicBook
from paceline.cluster.vacancy import Vacancies


class Broker:
    """Events in, instructions out; every event says when it is, in monotonic seconds.

    No fraction ever has two leases and no topic two trainers. What is instructed is to be done by
    the caller: an answer to the trainer that asked, or the end or start of a process.
    """

    def __init__(self, idle: IdleRule, settings: LeaseSettings | None = None) -> None:
        """Know of no trainer.

        Args:
            idle: tells when serving is idle; the broker feeds it.
            settings: see LeaseSettings.
        """
        self.ledger = Ledger()
        self._idle = idle
        self._settings = settings or LeaseSettings()
        self._topics = TopicBook(self._settings)
        self._trainers = Tenants(self._settings, self.ledger, self._topics)
        self._rooms = Vacancies(self._settings)
        self._now = -math.inf

    def report(self, replica: str, running: int, waiting: int, now: float) -> list[Instruction]:
        """A replica tells its load, see IdleRule."""
        self._account(now)
        self._idle.report(replica, running, waiting, now)
        return self._revoke_unless_idle(now)

    def announce(self, now: float) -> list[Instruction]:
        """A request has come that no replica has reported yet, see IdleRule."""
        self._account(now)
        self._idle.announce(now)
        return self._revoke_unless_idle(now)

    def pause(self, now: float) -> list[Instruction]:
        """Nobody computes until :meth:`resume`."""
        self._account(now)
        self._idle.pause()
        return self._revoke_unless_idle(now)

    def resume(self, now: float) -> None:
        """Leases again, when serving is idle."""
        self._account(now)
        self._idle.resume()

    def drain(self, now: float, *, on: bool) -> list[Instruction]:
        """The server takes nothing new, or does again."""
        self._account(now)
        self._idle.drain(on=on)
        return self._revoke_unless_idle(now)

    def may_compute(self, now: float) -> bool:
        """Whether serving leaves room for one forward that no lease is needed for."""
        return self._idle.may_train(now)

    def ask(
        self,
        name: str,
        life: str,
        fractions: Sequence[Fraction],
        gains: Mapping[str, float],
        now: float,
    ) -> list[Instruction]:
        """A trainer that has no round under way wants a topic.

        Args:
            name: of the trainer.
            life: of its process; another one than before says that the earlier has died.
            fractions: that it could compute on, one of them at a time.
            gains: topic that it could teach to the gain that it expects.
            now: monotonic seconds.

        Returns:
            an Assign, or nothing where no topic is free or the trainer is to go.
        """
        self._account(now)
        trainer = self._trainers.welcome(name, life, fractions, now)
        taken = self.assignments().values()
        others = {t.name for t in self._trainers.all()} - {name}
        topic = self._topics.choose(name, gains, taken, others, now)
        if topic is None or name in self._rooms.leaving | self._rooms.absent:
            return []
        trainer.topic = topic
        return [Assign(name, topic, self._topics.holder(topic) != name)]

    def check(self, name: str, life: str, now: float) -> list[Instruction]:
        """A trainer stands between two micro-steps and asks for the next.

        Returns:
            Grant or Renew: it may compute. Wait: not now. Stop: it has no topic any more.
        """
        self._account(now)
        trainer = self._trainers.find(name, life)
        if trainer is None or trainer.topic is None:
            return [Stop(name)]
        trainer.heard_at = now
        self._trainers.yielded(trainer, now)
        if name in self._rooms.leaving or not self._idle.may_train(now):
            self._trainers.end(trainer, Ending.REVOKED)
            trainer.refused_since = now if trainer.refused_since is None else trainer.refused_since
            return [Wait(name)]
        if trainer.lease is not None:
            trainer.lease.renewed_at = now
            return [Renew(name)]
        return [self._trainers.grant(trainer, trainer.topic, now)]

    def rest(self, name: str, life: str, now: float) -> None:
        """A trainer does something else for a while than compute, and keeps its topic."""
        self._account(now)
        trainer = self._trainers.find(name, life)
        if trainer is not None:
            trainer.heard_at, trainer.refused_since = now, None
            self._trainers.leave_off(trainer, now)

    def release(self, name: str, life: str, note: Mapping[str, Any] | None, now: float) -> None:
        """A trainer has ended its round; ``note`` is for whoever has the topic next.

        None: it has taught nothing, and who had the topic before still knows it best.
        """
        self.rest(name, life, now)
        trainer = self._trainers.find(name, life)
        if trainer is not None and trainer.topic is not None:
            if note is not None:
                self._topics.ended(trainer.topic, name, now, note)
            trainer.topic = None

    def died(self, name: str, now: float) -> None:
        """A trainer's process has ended by itself; its lease and its topic are free."""
        self._account(now)
        self._trainers.forget(name, Ending.DIED, now)

    def kept(self, held: Mapping[str, Amounts], absent: Iterable[str]) -> None:
        """What Ray books for each trainer, and which were freed and not placed again."""
        self._rooms.kept(held, absent)

    def pending(
        self, demands: Iterable[Demand], free: Mapping[str, Amounts] | None, now: float
    ) -> None:
        """Which replicas of Serve wait for room, and what is free on each node (None: unknown).

        What follows is told by the next :meth:`tick`.
        """
        self._rooms.pending(demands, free, now)

    def tick(self, now: float) -> list[Instruction]:
        """Time has passed; call it several times a second.

        Returns:
            Revoke, Kill, Free and Place.
        """
        self._account(now)
        out = self._revoke_unless_idle(now)
        out += self._make_room(now)
        out += self._trainers.revoke_silent(now)
        out += self._trainers.kill_late(now)
        back = self._rooms.returning(now)
        return out if back is None else [*out, Place(back)]

    def snapshot(self, now: float) -> dict[str, Any]:
        """Load, leave, leases and totals, as plain data."""
        self._account(now)
        leases = [
            {
                "trainer": trainer.name,
                "topic": trainer.topic,
                "state": trainer.state,
                "fraction": None if trainer.lease is None else trainer.lease.fraction.name,
                "for_s": None if trainer.lease is None else now - trainer.lease.granted_at,
            }
            for trainer in self._trainers.all()
        ]
        return self._idle.snapshot(now) | {
            "leases": leases,
            "replicas_pending": self._rooms.waiting(now),
            "trainers_freed": sorted(self._rooms.absent),
            **self.ledger.figures(),
        }

    def notes(self, name: str) -> dict[str, Mapping[str, Any]]:
        """See TopicBook.notes."""
        return self._topics.notes(name)

    def leases(self) -> list[Lease]:
        """Those that have not ended."""
        return self._trainers.leases()

    def assignments(self) -> dict[str, str]:
        """Trainer to the topic of its round."""
        return self._trainers.assignments()

    def _revoke_unless_idle(self, now: float) -> list[Instruction]:
        if self._idle.may_train(now):
            return []
        return [order for t in self._trainers.all() for order in self._trainers.revoke(t, now)]

    def _make_room(self, now: float) -> list[Instruction]:
        nodes = {t.name: t.fractions[0].node for t in self._trainers.all() if t.fractions}
        limit = min(self._settings.yield_timeout_s, self._settings.leave_timeout_s)
        out: list[Instruction] = []
        for name in sorted(self._rooms.plan(nodes, now)):
            trainer = self._trainers.find(name)
            if trainer is not None and trainer.lease is not None:
                out += self._trainers.revoke(trainer, now)
                since = trainer.lease.revoked_at
                if since is not None and now - since < limit:
                    continue
            self._rooms.let_go(name, nodes.get(name), now)
            self._trainers.forget(name, Ending.FREED, now)
            out.append(Free(name))
        return out

    def _account(self, now: float) -> None:
        """Count the idle time since the last event; whatever changes is changed afterwards."""
        before, self._now = self._now, max(now, self._now)
        begun = self._idle.idle_since(now)
        if begun is None or before == -math.inf:
            return
        use = UNWANTED
        if self.leases():
            use = USED
        elif self.assignments():
            use = WAITING
        self.ledger.idle(now - max(before, begun), use)
