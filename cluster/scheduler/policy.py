"""The broker's decisions: which trainer learns which topic, and when it computes. No clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.cluster.scheduler.idle import IdleRule
from paceline.cluster.scheduler.leases import (
    Assign,
    Ending,
    Fraction,
    Free,
    Grant,
    Instruction,
    Kill,
    Lease,
    LeaseSettings,
    Place,
    Renew,
    Revoke,
    Stop,
    Wait,
)

USED, WAITING, UNWANTED = "used", "waiting", "unwanted"
_MOST_YIELDS = 10_000
_LATELY = 1_000


class Ledger:
    """Totals since the broker's start."""

    def __init__(self) -> None:
        """Begin at 0."""
        self.idle_s = {USED: 0.0, WAITING: 0.0, UNWANTED: 0.0}
        self.endings: Counter[Ending] = Counter()
        self.grants = 0
        self.last_yield_s: float | None = None
        self.longest_yield_s: float | None = None
        self._yields: deque[float] = deque(maxlen=_MOST_YIELDS)
        self._lately: deque[float] = deque(maxlen=_LATELY)

    def idle(self, seconds: float, use: str) -> None:
        """Note idle time.

        Args:
            seconds: in which serving was idle and training allowed.
            use: ``used`` where a trainer held a lease, ``waiting`` where one had a topic and none
                (it loads, saves or is between two micro-steps of a burst), ``unwanted`` where no
                trainer had a topic.
        """
        self.idle_s[use] += max(0.0, seconds)

    def yielded(self, seconds: float) -> None:
        """Note the time from a revocation to the trainer's stop."""
        self.last_yield_s = seconds
        self.longest_yield_s = max(seconds, self.longest_yield_s or 0.0)
        self._yields.append(seconds)
        self._lately.append(seconds)

    def drained(self) -> list[float]:
        """Yields since the last call, seconds."""
        found = []
        while self._yields:
            found.append(self._yields.popleft())
        return found

    def figures(self) -> dict[str, Any]:
        """All totals; ``idle_used_share`` is of the idle time in which a trainer had a topic.

        The shares of yields are of the last thousand.
        """
        wanted = self.idle_s[USED] + self.idle_s[WAITING]
        return {
            "idle_s": dict(self.idle_s),
            "idle_used_share": self.idle_s[USED] / wanted if wanted > 0.0 else None,
            "leases_granted": self.grants,
            "leases_ended": {ending.value: self.endings[ending] for ending in Ending},
            "last_yield_s": self.last_yield_s,
            "longest_yield_s": self.longest_yield_s,
            "yield_p50_s": self._within(0.5),
            "yield_p99_s": self._within(0.99),
        }

    def _within(self, share: float) -> float | None:
        """The time in which this share of the last yields was done."""
        found = sorted(self._lately)
        return found[min(int(share * len(found)), len(found) - 1)] if found else None


@dataclass(slots=True)
class _Topic:
    """Since when it waits, and what the trainer that had it last left to say of it."""

    since: float
    holder: str | None = None
    note: Mapping[str, Any] = field(default_factory=dict)


class TopicBook:
    """What the broker remembers of topics."""

    def __init__(self, settings: LeaseSettings) -> None:
        """Know of none.

        Args:
            settings: ``ageing_s``, ``longest_wait_s`` and ``away`` are used.
        """
        self._settings = settings
        self._topics: dict[str, _Topic] = {}

    def choose(
        self,
        trainer: str,
        gains: Mapping[str, float],
        taken: Collection[str],
        others: Collection[str],
        now: float,
    ) -> str | None:
        """The topic for a trainer, None where none is free.

        The largest gain wins, more the longer the topic has waited; one that has waited for too
        long comes before all that have not, so that none starves.

        Args:
            trainer: that asks.
            gains: topic that it could teach to the gain that it expects; no number: left out.
            taken: topics of other trainers.
            others: trainers that are there beside this one.
            now: monotonic seconds.
        """
        free = {
            topic: gain
            for topic, gain in gains.items()
            if topic not in taken and math.isfinite(gain) and gain >= 0.0
        }

        def weight(topic: str) -> tuple[float, float]:
            known, settings = self._topics.setdefault(topic, _Topic(now)), self._settings
            waited = now - known.since
            due = waited if waited >= settings.longest_wait_s else 0.0
            away = settings.away if known.holder != trainer and known.holder in others else 1.0
            return due, free[topic] * (1.0 + waited / settings.ageing_s) * away

        for topic in gains:  # those that another has now wait from now on, too
            self._topics.setdefault(topic, _Topic(now))
        return max(free, key=weight, default=None)

    def holder(self, topic: str) -> str | None:
        """The trainer whose memory has the last that was learnt of a topic."""
        known = self._topics.get(topic)
        return None if known is None else known.holder

    def ended(
        self, topic: str, trainer: str, now: float, note: Mapping[str, Any] | None = None
    ) -> None:
        """A trainer's round has ended; without a note the one before it stands."""
        before = self._topics.get(topic)
        kept = before.note if before is not None and note is None else note
        self._topics[topic] = _Topic(now, trainer, dict(kept or {}))

    def lost(self, topic: str, now: float) -> None:
        """A trainer's memory of a topic is gone."""
        known = self._topics.setdefault(topic, _Topic(now))
        known.since, known.holder = now, None

    def forget(self, trainer: str) -> None:
        """All memory of a trainer is gone."""
        for known in self._topics.values():
            if known.holder == trainer:
                known.holder = None

    def notes(self, trainer: str) -> dict[str, Mapping[str, Any]]:
        """Topic to what was last said of it, of the topics that this trainer did not have last."""
        return {
            topic: known.note
            for topic, known in self._topics.items()
            if known.holder != trainer and known.note
        }


_LITTLE = 1e-6  # Ray books in ten-thousandths, and adds up in floats
_MOST = 256  # replicas that are looked at

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Demand:
    """Replicas that wait for room.

    Attributes:
        amounts: resource to what each of them needs.
        count: of replicas.
    """

    amounts: Amounts
    count: int = 1


@dataclass(frozen=True, slots=True)
class Holder:
    """A trainer for which Ray books something.

    Attributes:
        trainer: its name.
        node: where it is, None where that is not known yet.
        amounts: resource to what is booked.
    """

    trainer: str
    node: str | None
    amounts: Amounts


def leavers(
    demands: Iterable[Demand], free: Mapping[str, Amounts] | None, holders: Sequence[Holder]
) -> set[str]:
    """Trainers that make room by leaving: on each node as few as will do, on as few as can be.

    A replica that finds room, or that would find none with every trainer gone, has nobody leave.
    A trainer of unknown place leaves where the others do not suffice.

    Args:
        demands: replicas that wait.
        free: node to what nobody has booked there; None where that is not known: then all
            trainers leave that hold something which is wanted.
        holders: trainers that may leave.
    """
    wanted = [demand.amounts for demand in demands for _ in range(demand.count)][:_MOST]
    if free is None:
        return {h.trainer for h in holders if any(touch(h.amounts, a) for a in wanted)}
    left = {node: dict(amounts) for node, amounts in free.items()}
    leaving: set[str] = set()
    for amounts in wanted:
        staying = [h for h in holders if h.trainer not in leaving and touch(h.amounts, amounts)]
        found = _place(amounts, left, staying)
        if found is None:
            continue
        node, going = found
        for holder in going:
            leaving.add(holder.trainer)
            _add(left[node], holder.amounts)
        _add(left[node], amounts, -1.0)
    return leaving


def fits(amounts: Amounts, free: Amounts) -> bool:
    """Whether a node with so much free has room for these amounts."""
    return all(free.get(name, 0.0) >= need - _LITTLE for name, need in amounts.items())


def touch(held: Amounts, wanted: Amounts) -> bool:
    """Whether something is held that is wanted."""
    return any(held.get(name, 0.0) > 0.0 and need > 0.0 for name, need in wanted.items())


def _place(
    amounts: Amounts, left: Mapping[str, Amounts], staying: Sequence[Holder]
) -> tuple[str, list[Holder]] | None:
    """The node where fewest leave for it, and who they are; None where nothing helps."""
    best: tuple[str, list[Holder]] | None = None
    for node, free in left.items():
        here = [h for h in staying if h.node == node] + [h for h in staying if h.node is None]
        going = _going(amounts, free, here)
        if going is not None and (best is None or len(going) < len(best[1])):
            best = node, going
    return best


def _going(amounts: Amounts, free: Amounts, here: Sequence[Holder]) -> list[Holder] | None:
    room, going = dict(free), []
    for holder in here:
        if fits(amounts, room):
            break
        lacking = {name: need for name, need in amounts.items() if not fits({name: need}, room)}
        if touch(holder.amounts, lacking):
            going.append(holder)
            _add(room, holder.amounts)
    return going if fits(amounts, room) else None


def _add(room: dict[str, float], amounts: Amounts, sign: float = 1.0) -> None:
    for name, amount in amounts.items():
        room[name] = room.get(name, 0.0) + sign * amount


class Vacancies:
    """What the trainers' keeper tells of replicas, nodes and trainers, and what follows."""

    def __init__(self, settings: LeaseSettings) -> None:
        """Nobody waits, and no trainer is known.

        Args:
            settings: ``pending_stale_s``, ``settle_s`` and ``return_after_s`` are used.
        """
        self._settings = settings
        self._held: dict[str, Amounts] = {}
        self._left: dict[str, tuple[float, str | None]] = {}  # let go lately: when, from where
        self._demands: tuple[Demand, ...] = ()
        self._free: Mapping[str, Amounts] | None = None
        self._told_at = self._last_demand = -math.inf
        self.absent: set[str] = set()
        self.leaving: set[str] = set()

    def kept(self, held: Mapping[str, Amounts], absent: Iterable[str]) -> None:
        """Take what each trainer books, and which of them were let go and not placed again."""
        self._held = {name: dict(amounts) for name, amounts in held.items()}
        self.absent = set(absent)

    def pending(
        self, demands: Iterable[Demand], free: Mapping[str, Amounts] | None, now: float
    ) -> None:
        """Take which replicas wait and what is free on each node; it holds for a while."""
        self._demands = tuple(demand for demand in demands if demand.count > 0)
        self._free, self._told_at = free, now

    def waiting(self, now: float) -> int:
        """Replicas that wait for room, by the last that was told."""
        return sum(demand.count for demand in self._fresh(now))

    def plan(self, nodes: Mapping[str, str], now: float) -> set[str]:
        """The trainers that are to leave now, also in ``leaving``.

        Args:
            nodes: trainer to its node, where that is known.
            now: monotonic seconds.
        """
        demands = self._fresh(now)
        holders = [
            Holder(name, nodes.get(name), amounts)
            for name, amounts in self._held.items()
            if name not in self.absent and any(amounts.values())
        ]
        if any(touch(a, d.amounts) for a in self._held.values() for d in demands):
            self._last_demand = now
        self.leaving = leavers(demands, self._reckoned(now), holders)
        return self.leaving

    def let_go(self, name: str, node: str | None, now: float) -> None:
        """A trainer is ended; until Ray's figures show it, its room counts as free."""
        self._left[name] = now, node
        self.absent.add(name)
        self.leaving.discard(name)

    def returning(self, now: float) -> str | None:
        """A trainer that there is room for again, None where there is none.

        Only one for each telling of :meth:`pending`: what is left is seen with the next.
        """
        quiet = now - self._last_demand >= self._settings.return_after_s
        if not quiet or now - self._told_at > self._settings.pending_stale_s:
            return None
        for name in sorted(self.absent):
            amounts = self._held.get(name, {})
            if self._free is None or any(fits(amounts, free) for free in self._free.values()):
                self.absent.discard(name)
                self._told_at = -math.inf
                return name
        return None

    def _fresh(self, now: float) -> tuple[Demand, ...]:
        fresh = now - self._told_at <= self._settings.pending_stale_s
        return self._demands if fresh else ()

    def _reckoned(self, now: float) -> Mapping[str, Amounts] | None:
        """What is free, with what those who were let go lately leave."""
        if self._free is None:
            return None
        free = {node: dict(amounts) for node, amounts in self._free.items()}
        for name, (when, node) in list(self._left.items()):
            if now - when > self._settings.settle_s:
                del self._left[name]
            elif node in free:
                for resource, amount in self._held.get(name, {}).items():
                    free[node][resource] = free[node].get(resource, 0.0) + amount
        return free


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
