"""Policy of the trainer scheduler: assignments of topics, leases, preemption. Pure, no clock."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline.actors.training.permits import (
    IDLE_WAIT_S,
    Assignment,
    Permit,
    ResourceSlot,
    TopicProgress,
    TrainerIdentity,
)
from paceline.cluster.scheduler.idle import IdleDetector
from paceline.cluster.scheduler.leases import (
    Action,
    Instruction,
    Lease,
    LeaseEnd,
    LeaseStatus,
    SchedulerSettings,
    SchedulerStatus,
)
from paceline.cluster.scheduler.preemption import PreemptionTracker

USED, WAITING, UNWANTED = "used", "waiting", "unwanted"
_MAX_UNEXPORTED_YIELDS = 10_000
_YIELD_WINDOW = 1_000
_QUEUED_S = 1.5 * IDLE_WAIT_S  # a trainer that asked for a permit within this time keeps its turn


class SchedulerStats:
    """Totals since the start of the scheduler.

    Attributes:
        idle_s: use to seconds in which serving was idle and training allowed: ``used`` if a
            trainer held a lease, ``waiting`` if one had a topic and no lease (it loads, saves, or
            retries after a denial), ``unwanted`` if none had a topic.
        lease_ends: leases that ended, by reason.
        grants: leases that began.
        permits_requested: by trainers, scorer and generator of synthetic records.
        permits_granted: of these.
        last_yield_s: from the last revocation to the trainer's stop.
        longest_yield_s: the longest of these.
    """

    def __init__(self) -> None:
        self.idle_s = {USED: 0.0, WAITING: 0.0, UNWANTED: 0.0}
        self.lease_ends: Counter[LeaseEnd] = Counter()
        self.grants = self.permits_requested = self.permits_granted = 0
        self.last_yield_s: float | None = None
        self.longest_yield_s: float | None = None
        self._unexported: deque[float] = deque(maxlen=_MAX_UNEXPORTED_YIELDS)
        self._window: deque[float] = deque(maxlen=_YIELD_WINDOW)

    def record_permit(self, *, granted: bool) -> None:
        """Count a requested permit."""
        self.permits_requested += 1
        self.permits_granted += granted

    def record_yield(self, seconds: float) -> None:
        """Count the time from a revocation to the trainer's stop."""
        self.last_yield_s = seconds
        self.longest_yield_s = max(seconds, self.longest_yield_s or 0.0)
        self._unexported.append(seconds)
        self._window.append(seconds)

    def pop_yield_times(self) -> list[float]:
        """Yields since the last call, seconds."""
        yields = list(self._unexported)
        self._unexported.clear()
        return yields

    @property
    def idle_used_share(self) -> float | None:
        """Share of the idle time in which a trainer had a topic; None without any."""
        wanted = self.idle_s[USED] + self.idle_s[WAITING]
        return self.idle_s[USED] / wanted if wanted > 0.0 else None

    def yield_percentile(self, share: float) -> float | None:
        """Percentile of the last thousand yields, seconds; None without any."""
        ordered = sorted(self._window)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else None


@dataclass(slots=True)
class _Topic:
    """``last_trainer`` has the newest state of the topic in memory, None if none has."""

    waiting_since: float
    last_trainer: str | None = None
    progress: TopicProgress | None = None


class TopicQueue:
    """Topics that wait for a trainer, and the progress of their last rounds.

    Args:
        settings: ``ageing_s``, ``longest_wait_s`` and ``takeover_weight`` are used.
    """

    def __init__(self, settings: SchedulerSettings) -> None:
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
        """Choose a topic for a trainer, None if none is free.

        The largest gain wins, weighted by the topic's wait; a topic that has waited longer than
        ``longest_wait_s`` precedes all that have not, so that none starves.

        Args:
            trainer: that requests a topic.
            gains: topic to expected gain; a topic without a finite gain is left out.
            taken: topics of other trainers.
            others: other running trainers.
            now: monotonic seconds.
        """
        for topic in gains:
            self._topics.setdefault(topic, _Topic(now))
        free = {
            topic: gain
            for topic, gain in gains.items()
            if topic not in taken and math.isfinite(gain) and gain >= 0.0
        }

        def weight(topic: str) -> tuple[float, float]:
            known, settings = self._topics[topic], self._settings
            waited = now - known.waiting_since
            overdue = waited if waited >= settings.longest_wait_s else 0.0
            away = known.last_trainer != trainer and known.last_trainer in others
            factor = settings.takeover_weight if away else 1.0
            return overdue, free[topic] * (1.0 + waited / settings.ageing_s) * factor

        return max(free, key=weight, default=None)

    def last_trainer(self, topic: str) -> str | None:
        """The trainer that has the topic's newest state in memory."""
        known = self._topics.get(topic)
        return None if known is None else known.last_trainer

    def round_ended(
        self, topic: str, trainer: str, now: float, progress: TopicProgress | None = None
    ) -> None:
        """Record a trainer's round; without progress the last one stands."""
        before = self._topics.get(topic)
        if progress is None and before is not None:
            progress = before.progress
        self._topics[topic] = _Topic(now, trainer, progress)

    def round_lost(self, topic: str, now: float) -> None:
        """Record that the topic's newest state was lost with its trainer."""
        known = self._topics.setdefault(topic, _Topic(now))
        known.waiting_since, known.last_trainer = now, None

    def trainer_lost(self, trainer: str) -> None:
        """Record that a trainer has no topic in memory any more."""
        for known in self._topics.values():
            if known.last_trainer == trainer:
                known.last_trainer = None

    def progress_of_others(self, trainer: str) -> dict[str, TopicProgress]:
        """Topic to its progress, of the topics that this trainer did not train last."""
        return {
            topic: known.progress
            for topic, known in self._topics.items()
            if known.last_trainer != trainer and known.progress is not None
        }


@dataclass(slots=True)
class TrainerState:
    """A running trainer. Times are monotonic seconds.

    Attributes:
        name: of the trainer.
        incarnation: of its process.
        slots: that it can compute on.
        last_seen: its last call.
        topic: of its round, None between two rounds.
        lease: that it holds.
        denied_since: since when it asks for a permit in vain.
    """

    name: str
    incarnation: str
    slots: tuple[ResourceSlot, ...]
    last_seen: float
    topic: str | None = None
    lease: Lease | None = None
    denied_since: float | None = None

    @property
    def state(self) -> str:
        """State in words, see LeaseStatus."""
        if self.lease is not None:
            return "working" if self.lease.revoked_at is None else "revoked"
        return "no topic" if self.topic is None else "waiting"

    def status(self, now: float) -> LeaseStatus:
        """The trainer at ``now``, monotonic seconds."""
        slot, for_s = None, None
        if self.lease is not None:
            slot, for_s = self.lease.slot.name, now - self.lease.granted_at
        return LeaseStatus(self.name, self.topic, self.state, slot, for_s)


class SchedulerPolicy:
    """State machine of the scheduler; every event has its time, in monotonic seconds.

    No slot ever has two leases and no topic two trainers. Trainers learn of a revocation by their
    next permit; :meth:`tick` returns what the supervisor has to do.

    Attributes:
        stats: totals.
        topics: topics and their progress.
        preemption: pending replicas and preempted trainers.
    """

    def __init__(self, idle: IdleDetector, settings: SchedulerSettings | None = None) -> None:
        """Start without trainers.

        Args:
            idle: decides whether serving is idle; the policy feeds it.
            settings: see SchedulerSettings.
        """
        self._settings = settings or SchedulerSettings()
        self.stats = SchedulerStats()
        self.topics = TopicQueue(self._settings)
        self.preemption = PreemptionTracker(self._settings)
        self._idle = idle
        self._trainers: dict[str, TrainerState] = {}
        self._kills: dict[str, int] = {}  # in a row, by trainer
        self._to_kill: set[str] = set()
        self._now = -math.inf

    # Load of serving

    def report_load(self, replica: str, running: int, waiting: int, now: float) -> None:
        """Take a replica's load, see IdleDetector."""
        self._account(now)
        self._idle.report_load(replica, running, waiting, now)
        self._revoke_unless_idle(now)

    def announce_request(self, now: float) -> None:
        """Take note of a request that no replica has reported yet, see IdleDetector."""
        self._account(now)
        self._idle.announce_request(now)
        self._revoke_unless_idle(now)

    def pause(self, now: float) -> None:
        """Grant no permits until :meth:`resume`."""
        self._account(now)
        self._idle.paused = True
        self._revoke_unless_idle(now)

    def resume(self, now: float) -> None:
        """End a pause."""
        self._account(now)
        self._idle.paused = False

    def drain(self, now: float, *, on: bool) -> None:
        """Start or end a drain of the server."""
        self._account(now)
        self._idle.draining = on
        self._revoke_unless_idle(now)

    def may_train(self, now: float) -> bool:
        """Whether serving is idle and training allowed."""
        return self._idle.may_train(now)

    def idle_from(self, now: float) -> float:
        """When serving is idle if nothing is reported until then, see IdleDetector."""
        return self._idle.idle_from(now)

    # Calls of trainers

    def acquire_topic(
        self, trainer: TrainerIdentity, incarnation: str, gains: Mapping[str, float], now: float
    ) -> Assignment:
        """Assign a topic to a trainer that is between two rounds.

        Args:
            trainer: with at least one slot.
            incarnation: of its process; another one than before implies that the earlier died.
            gains: topic that it could train to the expected gain.
            now: monotonic seconds.

        Returns:
            an assignment without a topic if none is free or the trainer is to be preempted.
        """
        self._account(now)
        state = self._between_rounds(trainer, incarnation, now)
        name, taken = trainer.name, self.assignments().values()
        others = self._trainers.keys() - {name}
        topic = self.topics.choose(name, gains, taken, others, now)
        if topic is None or name in self.preemption.selected | self.preemption.preempted:
            return Assignment(None)
        state.topic = topic
        return Assignment(topic, stale=self.topics.last_trainer(topic) != name)

    def acquire_permit(self, name: str, incarnation: str, now: float) -> Permit:
        """Grant or deny one micro-step; the trainer does not compute while it asks."""
        self._account(now)
        trainer = self._find(name, incarnation)
        if trainer is None or trainer.topic is None:
            return Permit.UNASSIGNED
        trainer.last_seen = now
        self._record_yield(trainer, now)
        if name in self.preemption.selected or not self._idle.may_train(now):
            self._end_lease(trainer, LeaseEnd.REVOKED)
            trainer.denied_since = now if trainer.denied_since is None else trainer.denied_since
            return Permit.DENIED
        if trainer.lease is not None:
            trainer.lease.renewed_at = now
            return Permit.GRANTED
        return self._grant(trainer, trainer.topic, now)

    def release_permit(self, name: str, incarnation: str, now: float) -> None:
        """End a trainer's lease; its topic stays assigned."""
        self._account(now)
        trainer = self._find(name, incarnation)
        if trainer is not None:
            trainer.last_seen, trainer.denied_since = now, None
            self._release_lease(trainer, now)

    def release_topic(
        self, name: str, incarnation: str, progress: TopicProgress | None, now: float
    ) -> None:
        """End a trainer's round.

        Args:
            name: of the trainer.
            incarnation: of its process.
            progress: for the topic's next trainer; None if the round trained nothing: the last
                trainer of the topic stays the last.
            now: monotonic seconds.
        """
        self.release_permit(name, incarnation, now)
        trainer = self._find(name, incarnation)
        if trainer is not None and trainer.topic is not None:
            if progress is not None:
                self.topics.round_ended(trainer.topic, name, now, progress)
            trainer.topic = None

    # Calls of the supervisor

    def trainer_died(self, name: str, now: float) -> None:
        """Free the lease and the topic of a trainer whose process has ended."""
        self._account(now)
        self._remove(name, LeaseEnd.DIED, now)

    def tick(self, now: float) -> list[Instruction]:
        """Revoke, kill, preempt and restart as time passes; call it about once a second.

        The instruction to kill a trainer is repeated until its process ends or its round does.
        """
        self._account(now)
        self._revoke_unless_idle(now)
        instructions = [Instruction(Action.PREEMPT, name) for name in self._preempt(now)]
        self._expire_silent(now)
        self._expire_revoked(now)
        instructions += [Instruction(Action.KILL, name) for name in sorted(self._to_kill)]
        restarted = self.preemption.restart(now)
        if restarted is not None:
            instructions.append(Instruction(Action.START, restarted))
        return instructions

    # Views

    def status(self, now: float) -> SchedulerStatus:
        """Load, leases and totals."""
        self._account(now)
        idle, stats, preemption = self._idle, self.stats, self.preemption
        return SchedulerStatus(
            may_train=idle.may_train(now),
            paused=idle.paused,
            draining=idle.draining,
            running=idle.running,
            waiting=idle.waiting,
            replicas=idle.replicas,
            replicas_pending=preemption.pending(now),
            trainers_preempted=tuple(sorted(preemption.preempted)),
            trainers_wanted=preemption.trainers,
            leases=tuple(trainer.status(now) for trainer in self._trainers.values()),
            permits_requested=stats.permits_requested,
            permits_granted=stats.permits_granted,
            leases_granted=stats.grants,
            leases_ended={reason.value: stats.lease_ends[reason] for reason in LeaseEnd},
            idle_s=dict(stats.idle_s),
            idle_used_share=stats.idle_used_share,
            last_yield_s=stats.last_yield_s,
            longest_yield_s=stats.longest_yield_s,
            yield_p50_s=stats.yield_percentile(0.5),
            yield_p99_s=stats.yield_percentile(0.99),
        )

    def leases(self) -> list[Lease]:
        """Current leases."""
        return [t.lease for t in self._trainers.values() if t.lease is not None]

    def assignments(self) -> dict[str, str]:
        """Trainer to the topic of its round."""
        return {t.name: t.topic for t in self._trainers.values() if t.topic is not None}

    # Leases

    def _find(self, name: str, incarnation: str) -> TrainerState | None:
        found = self._trainers.get(name)
        return found if found is not None and found.incarnation == incarnation else None

    def _between_rounds(
        self, trainer: TrainerIdentity, incarnation: str, now: float
    ) -> TrainerState:
        """Register a trainer, or end what is left of its last round."""
        name = trainer.name
        if name in self._trainers and self._find(name, incarnation) is None:
            self._remove(name, LeaseEnd.DIED, now)
        state = self._trainers.get(name)
        if state is None:
            state = self._trainers[name] = TrainerState(name, incarnation, (), now)
        self._release_lease(state, now)
        if state.topic is not None:  # the call that ended its round was lost
            self.topics.round_ended(state.topic, name, now)
        self._to_kill.discard(name)
        state.topic, state.denied_since = None, None
        state.slots, state.last_seen = trainer.slots, now
        return state

    def _grant(self, trainer: TrainerState, topic: str, now: float) -> Permit:
        """Lease a free slot unless trainers that have waited longer need all of them."""
        taken = {lease.slot.name for lease in self.leases()}
        free = [slot for slot in trainer.slots if slot.name not in taken]
        if trainer.denied_since is None:
            trainer.denied_since = now
        turn = trainer.denied_since, trainer.name
        ahead = sum(
            other.lease is None
            and other.denied_since is not None
            and (other.denied_since, other.name) < turn
            and now - other.last_seen <= _QUEUED_S
            and any(slot in free for slot in other.slots)
            for other in self._trainers.values()
        )
        if len(free) <= ahead:
            return Permit.DENIED
        trainer.lease = Lease(trainer.name, free[ahead], topic, now, now)
        trainer.denied_since = None
        self.stats.grants += 1
        return Permit.GRANTED

    def _record_yield(self, trainer: TrainerState, now: float) -> None:
        """End the lease of a trainer that has yielded to a revocation."""
        lease = trainer.lease
        if lease is not None and lease.revoked_at is not None:
            self.stats.record_yield(now - lease.revoked_at)
            self._kills.pop(trainer.name, None)
            self._end_lease(trainer, LeaseEnd.REVOKED)

    def _release_lease(self, trainer: TrainerState, now: float) -> None:
        self._record_yield(trainer, now)
        self._end_lease(trainer, LeaseEnd.RELEASED)

    def _end_lease(self, trainer: TrainerState, reason: LeaseEnd) -> None:
        if trainer.lease is not None:
            trainer.lease = None
            self.stats.lease_ends[reason] += 1

    def _remove(self, name: str, reason: LeaseEnd, now: float) -> None:
        """End the lease and the round of a process that has ended."""
        self._to_kill.discard(name)
        trainer = self._trainers.pop(name, None)
        if trainer is not None:
            self._end_lease(trainer, reason)
            if trainer.topic is not None:
                self.topics.round_lost(trainer.topic, now)
        self.topics.trainer_lost(name)

    # Revocation, killing, preemption

    def _revoke_unless_idle(self, now: float) -> None:
        if not self._idle.may_train(now):
            for trainer in self._trainers.values():
                _revoke(trainer, now)

    def _preempt(self, now: float) -> list[str]:
        """Revoke leases of trainers selected for preemption; return those that have yielded."""
        nodes = {t.name: t.slots[0].node for t in self._trainers.values() if t.slots}
        limit = min(self._settings.yield_timeout_s, self._settings.preempt_timeout_s)
        preempted = []
        for name in sorted(self.preemption.select(nodes, now)):
            trainer = self._trainers.get(name)
            if trainer is not None and trainer.lease is not None:
                _revoke(trainer, now)
                since = trainer.lease.revoked_at
                if since is not None and now - since < limit:
                    continue
            self.preemption.ended(name, nodes.get(name), now)
            self._remove(name, LeaseEnd.PREEMPTED, now)
            preempted.append(name)
        return preempted

    def _expire_silent(self, now: float) -> None:
        """Revoke leases of silent trainers; kill those that are silent without a lease."""
        limit = self._settings.silent_after_s
        for trainer in list(self._trainers.values()):
            silent = now - trainer.last_seen
            if trainer.lease is not None:
                if silent > limit:
                    _revoke(trainer, now)
            elif silent <= limit * self._backoff(trainer):  # loading and saving may take long
                continue
            elif trainer.topic is None:
                self._remove(trainer.name, LeaseEnd.DIED, now)
            else:
                self._kill(trainer, now)

    def _expire_revoked(self, now: float) -> None:
        """Kill trainers that have not yielded in time."""
        for trainer in list(self._trainers.values()):
            since = None if trainer.lease is None else trainer.lease.revoked_at
            limit = self._settings.yield_timeout_s * self._backoff(trainer)
            if since is not None and now - since >= limit:
                self._kill(trainer, now)

    def _kill(self, trainer: TrainerState, now: float) -> None:
        self._kills[trainer.name] = self._kills.get(trainer.name, 0) + 1
        self._remove(trainer.name, LeaseEnd.KILLED, now)
        self._to_kill.add(trainer.name)

    def _backoff(self, trainer: TrainerState) -> float:
        kills = self._kills.get(trainer.name, 0)
        return min(2.0 ** min(kills, 30), self._settings.max_backoff)

    def _account(self, now: float) -> None:
        """Count the idle time since the last event; call it before a change of state."""
        before, self._now = self._now, max(now, self._now)
        begun = self._idle.idle_from(now)
        if before == -math.inf:
            return
        use = USED if self.leases() else WAITING if self.assignments() else UNWANTED
        self.stats.idle_s[use] += max(0.0, now - max(before, begun))


def _revoke(trainer: TrainerState, now: float) -> None:
    if trainer.lease is not None and trainer.lease.revoked_at is None:
        trainer.lease.revoked_at = now
