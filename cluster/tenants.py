"""The trainers that are there, and their leases: granted, renewed, revoked, ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.cluster.leases import (
    Ending,
    Fraction,
    Grant,
    Instruction,
    Kill,
    Lease,
    LeaseSettings,
    Revoke,
    Wait,
)
from paceline.cluster.ledger import Ledger
from paceline.cluster.topics import TopicBook

_PRESENT_S = 1.0  # who asked for leave within this time is in line for a fraction


@dataclass(slots=True)
class Tenant:
    """What is known of a running trainer.

    Attributes:
        name: of the trainer.
        life: of its process.
        fractions: that it could compute on.
        heard_at: its last sign.
        topic: of its round, None between two rounds.
        lease: that it holds.
        refused_since: since when it asks for one in vain.
    """

    name: str
    life: str
    fractions: tuple[Fraction, ...]
    heard_at: float
    topic: str | None = None
    lease: Lease | None = None
    refused_since: float | None = None

    @property
    def state(self) -> str:
        """In words."""
        if self.lease is not None:
            return "working" if self.lease.revoked_at is None else "revoked"
        return "no topic" if self.topic is None else "waiting"


class Tenants:
    """Running trainers by name. No fraction has two leases; who waits longest has the next."""

    def __init__(self, settings: LeaseSettings, ledger: Ledger, topics: TopicBook) -> None:
        """Know of no trainer.

        Args:
            settings: see LeaseSettings.
            ledger: counts grants, endings and yields.
            topics: hears of rounds that were lost.
        """
        self._settings = settings
        self._ledger = ledger
        self._topics = topics
        self._all: dict[str, Tenant] = {}
        self._kills: dict[str, int] = {}  # in a row

    def all(self) -> list[Tenant]:
        """All of them."""
        return list(self._all.values())

    def find(self, name: str, life: str | None = None) -> Tenant | None:
        """A trainer, None where it is not known, or another process now."""
        found = self._all.get(name)
        return found if found is not None and life in (None, found.life) else None

    def leases(self) -> list[Lease]:
        """Those that have not ended."""
        return [t.lease for t in self._all.values() if t.lease is not None]

    def assignments(self) -> dict[str, str]:
        """Trainer to its topic."""
        return {t.name: t.topic for t in self._all.values() if t.topic is not None}

    def welcome(self, name: str, life: str, fractions: Sequence[Fraction], now: float) -> Tenant:
        """A trainer between two rounds; another life than before says that the earlier died."""
        known = self._all.get(name)
        if known is not None and known.life != life:
            self.forget(name, Ending.DIED, now)
            known = None
        if known is None:
            known = self._all[name] = Tenant(name, life, (), now)
        self.leave_off(known, now)
        if known.topic is not None:  # its round ended, and the word of it was lost
            self._topics.ended(known.topic, name, now)
        known.topic, known.refused_since = None, None
        known.fractions, known.heard_at = tuple(fractions), now
        return known

    def grant(self, trainer: Tenant, topic: str, now: float) -> Instruction:
        """A lease on a free fraction, but those who wait longer come first; Wait without."""
        taken = {lease.fraction.name for lease in self.leases()}
        free = [f for f in trainer.fractions if f.name not in taken]
        if trainer.refused_since is None:
            trainer.refused_since = now
        turn = trainer.refused_since, trainer.name
        before = [
            other
            for other in self._all.values()
            if other.lease is None
            and other.refused_since is not None
            and (other.refused_since, other.name) < turn
            and now - other.heard_at <= _PRESENT_S
            and any(fraction in free for fraction in other.fractions)
        ]
        if len(free) <= len(before):
            return Wait(trainer.name)
        fraction = free[len(before)]
        trainer.lease = Lease(trainer.name, fraction, topic, now, now)
        trainer.refused_since = None
        self._ledger.grants += 1
        return Grant(trainer.name, topic, fraction.name)

    def yielded(self, trainer: Tenant, now: float) -> None:
        """A trainer that was to yield stands still."""
        lease = trainer.lease
        if lease is not None and lease.revoked_at is not None:
            self._ledger.yielded(now - lease.revoked_at)
            self._kills.pop(trainer.name, None)
            self.end(trainer, Ending.REVOKED)

    def leave_off(self, trainer: Tenant, now: float) -> None:
        """A trainer computes no more for now."""
        self.yielded(trainer, now)
        self.end(trainer, Ending.RELEASED)

    def end(self, trainer: Tenant, how: Ending) -> None:
        """End a lease, where there is one."""
        if trainer.lease is not None:
            trainer.lease = None
            self._ledger.endings[how] += 1

    def forget(self, name: str, how: Ending, now: float) -> None:
        """A process has ended: so have its lease and its round."""
        trainer = self._all.pop(name, None)
        if trainer is not None:
            self.end(trainer, how)
            if trainer.topic is not None:
                self._topics.lost(trainer.topic, now)
        self._topics.forget(name)

    def revoke(self, trainer: Tenant, now: float) -> list[Instruction]:
        """Have a trainer yield."""
        if trainer.lease is None or trainer.lease.revoked_at is not None:
            return []
        trainer.lease.revoked_at = now
        return [Revoke(trainer.name)]

    def revoke_silent(self, now: float) -> list[Instruction]:
        """Of trainers that hang, or are gone and nobody has said so."""
        out: list[Instruction] = []
        for trainer in list(self._all.values()):
            silent, limit = now - trainer.heard_at, self._settings.silent_after_s
            if trainer.lease is not None:
                if silent > limit:
                    out += self.revoke(trainer, now)
                continue
            # What needs no lease (loading, saving) may take long: the next time it is given longer.
            if silent <= limit * self._patience(trainer):
                continue
            if trainer.topic is None:
                self.forget(trainer.name, Ending.DIED, now)
            else:
                self._kill(trainer, now)
                out.append(Kill(trainer.name))
        return out

    def _kill(self, trainer: Tenant, now: float) -> None:
        self._kills[trainer.name] = self._kills.get(trainer.name, 0) + 1
        self.forget(trainer.name, Ending.KILLED, now)

    def kill_late(self, now: float) -> list[Instruction]:
        """Those that were to yield and have not, in time."""
        out: list[Instruction] = []
        for trainer in list(self._all.values()):
            since = trainer.lease.revoked_at if trainer.lease is not None else None
            limit = self._settings.yield_timeout_s * self._patience(trainer)
            if since is not None and now - since >= limit:
                self._kill(trainer, now)
                out.append(Kill(trainer.name))
        return out

    def _patience(self, trainer: Tenant) -> float:
        kills = self._kills.get(trainer.name, 0)
        return min(2.0 ** min(kills, 30), self._settings.most_patience)
