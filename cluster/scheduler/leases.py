"""Leases of trainers, settings and status of the scheduler, instructions to the supervisor.

A trainer is *assigned* a topic for a round and holds a *lease* on a slot while it computes. A lease
is revoked when serving needs the processor; the assignment lasts until the round ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from paceline.actors.training.permits import ResourceSlot

Amounts = Mapping[str, float]  # Ray resource to amount


class LeaseEnd(StrEnum):
    """Reason for a lease's end; the values are metric labels."""

    RELEASED = "released"  # by the trainer
    REVOKED = "revoked"  # the trainer yielded in time
    KILLED = "killed"  # the trainer did not yield in time
    PREEMPTED = "preempted"  # ended for a pending replica
    DIED = "died"  # the process ended by itself


@dataclass(slots=True)
class Lease:
    """Right of a trainer to compute. Times are monotonic seconds.

    Attributes:
        trainer: its holder.
        slot: that it computes on.
        topic: that it trains.
        granted_at: start.
        renewed_at: the last permit.
        revoked_at: since when the trainer should yield, None unless revoked.
    """

    trainer: str
    slot: ResourceSlot
    topic: str
    granted_at: float
    renewed_at: float
    revoked_at: float | None = None


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Timeouts and weights of the trainer scheduler.

    Attributes:
        yield_timeout_s: from a revocation until a trainer that still computes is killed.
        preempt_timeout_s: upper bound of the same if a replica waits for its resources.
        max_backoff: upper bound of the factor on timeouts of a trainer that was killed: each kill
            in a row doubles it, since a micro-step may be that slow.
        silent_after_s: without a sign for so long a trainer loses its lease and its topic.
        ageing_s: wait that doubles the weight of a topic.
        longest_wait_s: a topic that has waited for so long precedes all that have not.
        takeover_weight: factor for a topic that another trainer holds in memory.
        pending_stale_s: age at which a report of pending replicas expires.
        settle_s: until Ray's figures show the resources of an ended trainer as free.
        restart_after_s: from the last pending replica to the restart of a preempted trainer.
    """

    yield_timeout_s: float = 2.0
    preempt_timeout_s: float = 2.0
    max_backoff: float = 32.0
    silent_after_s: float = 120.0
    ageing_s: float = 60.0
    longest_wait_s: float = 600.0
    takeover_weight: float = 0.5
    pending_stale_s: float = 15.0
    settle_s: float = 3.0
    restart_after_s: float = 5.0


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """A running trainer, as the status shows it.

    Attributes:
        trainer: its name.
        topic: of its round, None between two rounds.
        state: ``working``, ``revoked``, ``waiting`` for a permit, or ``no topic``.
        slot: that it computes on, None without a lease.
        for_s: age of the lease, seconds.
    """

    trainer: str
    topic: str | None
    state: str
    slot: str | None
    for_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStatus:
    """Load of serving, leases, and totals since the start of the scheduler.

    Attributes:
        may_train: whether a micro-step may start now.
        paused: see IdleDetector.
        draining: see IdleDetector.
        running: requests being decoded.
        waiting: requests in the replicas' queues.
        replicas: target replicas that report.
        replicas_pending: replicas of Serve that wait for resources.
        trainers_preempted: trainers that were ended for these and not started again.
        trainers_wanted: trainers that the supervisor has to keep running, preempted ones too.
        leases: of the running trainers.
        permits_requested: by trainers, scorer and generator of synthetic records.
        permits_granted: of these.
        leases_granted: leases that began.
        leases_ended: by reason, see LeaseEnd.
        idle_s: see SchedulerStats.
        idle_used_share: of the idle time in which a trainer had a topic; None without any.
        last_yield_s: see SchedulerStats.
        longest_yield_s: see SchedulerStats.
        yield_p50_s: median of the last thousand yields, None without any.
        yield_p99_s: their 99th percentile.
    """

    may_train: bool
    paused: bool
    draining: bool
    running: int
    waiting: int
    replicas: int
    replicas_pending: int
    trainers_preempted: tuple[str, ...]
    trainers_wanted: int
    leases: tuple[LeaseStatus, ...]
    permits_requested: int
    permits_granted: int
    leases_granted: int
    leases_ended: Mapping[str, int]
    idle_s: Mapping[str, float]
    idle_used_share: float | None
    last_yield_s: float | None
    longest_yield_s: float | None
    yield_p50_s: float | None
    yield_p99_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaDemand:
    """Pending replicas of Serve that need the same.

    Attributes:
        amounts: resources of each.
        count: number of replicas.
    """

    amounts: Amounts
    count: int = 1


class Action(StrEnum):
    """What the supervisor does to a trainer."""

    KILL = "kill"  # Ray starts it again on the same slot
    PREEMPT = "preempt"  # end it: a pending replica needs its resources
    START = "start"  # start a preempted trainer again


@dataclass(frozen=True, slots=True)
class Instruction:
    """Instruction of the scheduler to the supervisor of trainers."""

    action: Action
    trainer: str
