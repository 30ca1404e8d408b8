"""The actor that gives trainers topics and permits, by the load that replicas report."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from paceline.actors.handles import remote_method
from paceline.actors.training.permits import (
    Assignment,
    Permit,
    ResourceSlot,
    TopicProgress,
    TrainerIdentity,
)
from paceline.cluster.scheduler.idle import IdleDetector
from paceline.cluster.scheduler.leases import (
    Amounts,
    Instruction,
    ReplicaDemand,
    SchedulerSettings,
    SchedulerStatus,
)
from paceline.cluster.scheduler.policy import SchedulerPolicy

_LONGEST_GAP_S = 1.0  # the supervisor calls once a second
_LONGEST_WAIT_S = 0.5  # without reading the clock: a longer gap counts as less


class RunningClock:
    """Seconds in which the scheduler ran: of a gap between two readings at most one second counts.

    After a suspension (SIGSTOP, a frozen container) all that was to happen meanwhile is late. Its
    trainers must not be killed for it, and its replicas not be taken for silent. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with the reading of a monotonic clock, seconds."""
        self._clock = clock
        self._read = self._now = clock()

    def __call__(self) -> float:
        """Seconds, monotonic."""
        read = self._clock()
        self._now += min(read - self._read, _LONGEST_GAP_S)
        self._read = read
        return self._now


class TrainerScheduler:
    """Actor around :class:`SchedulerPolicy`; books no CPU, a call costs about a millisecond.

    It persists nothing: restarted, it knows no replica and no trainer and is not paused; busy
    replicas report within a second, and trainers without a known assignment end their rounds and
    request a topic.

    For the thread of one event loop; :meth:`status` and :meth:`pop_yield_times` for any, since one
    beside the actor's own exports its figures.
    """

    def __init__(
        self,
        idle_after_s: float = 0.05,
        stale_after_s: float = 6.0,
        occupied_above: int = 0,
        settings: SchedulerSettings | None = None,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Start without replicas and trainers.

        Args:
            idle_after_s: see IdleDetector.
            stale_after_s: see IdleDetector.
            occupied_above: see IdleDetector.
            settings: see SchedulerSettings.
            clock: monotonic seconds; None is a RunningClock.
        """
        idle = IdleDetector(idle_after_s, stale_after_s, occupied_above)
        self._policy = SchedulerPolicy(idle, settings)
        self._clock = RunningClock() if clock is None else clock
        self._lock = threading.Lock()
        self._sooner = asyncio.Event()  # set, and replaced, when serving may be idle sooner

    def report_load(self, replica_id: str, running: int, waiting: int) -> None:
        """Take a replica's load; see LoadReporter for when replicas call it."""
        with self._change() as now:
            self._policy.report_load(replica_id, running, waiting, now)

    def announce_request(self) -> None:
        """Take note of a request before it is routed; called by the ingress."""
        with self._lock:
            self._policy.announce_request(self._clock())

    def may_train(self) -> bool:
        """Whether a forward without a lease may run: the scorer's, or for synthetic records."""
        with self._lock:
            granted = self._policy.may_train(self._clock())
            self._policy.stats.record_permit(granted=granted)
            return granted

    async def until_idle(self, timeout_s: float) -> None:
        """Return when training may go on, or after ``timeout_s``.

        A trainer that was denied waits here: one that asked again and again would take processor
        time from the requests that it waits for. So would looking again and again, for it.
        """
        until = None
        while True:
            sooner = self._sooner
            with self._lock:
                now = self._clock()
                until = now + timeout_s if until is None else until
                idle_from = min(until, self._policy.idle_from(now))
            if now >= idle_from:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(sooner.wait(), min(idle_from - now, _LONGEST_WAIT_S))

    @contextmanager
    def _change(self) -> Iterator[float]:
        """Guard a change at the time that it yields; wake those that wait if it may help them."""
        with self._lock:
            now = self._clock()
            before = self._policy.idle_from(now)
            yield now
            if self._policy.idle_from(now) < before:
                sooner, self._sooner = self._sooner, asyncio.Event()
                sooner.set()

    def acquire_topic(
        self, trainer: TrainerIdentity, incarnation: str, gains: Mapping[str, float]
    ) -> Assignment:
        """Assign a topic to a trainer, see SchedulerPolicy."""
        if not trainer.slots:
            trainer = replace(trainer, slots=(ResourceSlot(trainer.name),))
        with self._lock:
            return self._policy.acquire_topic(trainer, incarnation, gains, self._clock())

    def topic_progress(self, trainer: str) -> dict[str, TopicProgress]:
        """Topic to the progress that other trainers have made last."""
        with self._lock:
            return self._policy.topics.progress_of_others(trainer)

    def acquire_permit(self, trainer: str, incarnation: str) -> Permit:
        """Grant or deny one micro-step."""
        with self._lock:
            permit = self._policy.acquire_permit(trainer, incarnation, self._clock())
            self._policy.stats.record_permit(granted=permit is Permit.GRANTED)
            return permit

    def release_permit(self, trainer: str, incarnation: str) -> None:
        """End a trainer's lease; its topic stays assigned."""
        with self._lock:
            self._policy.release_permit(trainer, incarnation, self._clock())

    def release_topic(self, trainer: str, incarnation: str, progress: TopicProgress | None) -> None:
        """End a trainer's round, see SchedulerPolicy."""
        with self._lock:
            self._policy.release_topic(trainer, incarnation, progress, self._clock())

    def sync_trainers(
        self,
        booked: Mapping[str, Amounts],
        preempted: Iterable[str],
        died: Iterable[str],
    ) -> list[Instruction]:
        """Take the supervisor's view and return its instructions; called once a second.

        Args:
            booked: trainer to what Ray books for it.
            preempted: trainers that were ended and not started again.
            died: trainers whose processes have ended, or were killed, since the last call.
        """
        with self._lock:
            now = self._clock()
            self._policy.preemption.sync(booked, preempted)
            for trainer in died:
                self._policy.trainer_died(trainer, now)
            return self._policy.tick(now)

    def report_pending(
        self, demands: Iterable[ReplicaDemand], free: Mapping[str, Amounts] | None
    ) -> None:
        """Take the replicas of Serve that wait for resources.

        Args:
            demands: pending replicas.
            free: node to unbooked resources, None if unknown.
        """
        with self._lock:
            self._policy.preemption.report(demands, free, self._clock())

    def pause(self) -> None:
        """Grant no permits until :meth:`resume`."""
        with self._lock:
            self._policy.pause(self._clock())

    def resume(self) -> None:
        """End a pause."""
        with self._change() as now:
            self._policy.resume(now)

    def drain(self, on: bool) -> None:
        """Start or end a drain: no new requests and no permits."""
        with self._change() as now:
            self._policy.drain(now, on=on)

    def status(self) -> SchedulerStatus:
        """Load, leases and totals."""
        with self._lock:
            return self._policy.status(self._clock())

    def pop_yield_times(self) -> list[float]:
        """Seconds from revocation to yield, of the yields since the last call."""
        with self._lock:
            return self._policy.stats.pop_yield_times()

    def ping(self) -> bool:
        """Return True: the actor answers."""
        return True


class TrainerSchedulerHandle:
    """Actor handle of a TrainerScheduler."""

    report_load = remote_method(TrainerScheduler.report_load)
    announce_request = remote_method(TrainerScheduler.announce_request)
    may_train = remote_method(TrainerScheduler.may_train)
    until_idle = remote_method(TrainerScheduler.until_idle)
    acquire_topic = remote_method(TrainerScheduler.acquire_topic)
    topic_progress = remote_method(TrainerScheduler.topic_progress)
    acquire_permit = remote_method(TrainerScheduler.acquire_permit)
    release_permit = remote_method(TrainerScheduler.release_permit)
    release_topic = remote_method(TrainerScheduler.release_topic)
    sync_trainers = remote_method(TrainerScheduler.sync_trainers)
    report_pending = remote_method(TrainerScheduler.report_pending)
    pause = remote_method(TrainerScheduler.pause)
    resume = remote_method(TrainerScheduler.resume)
    drain = remote_method(TrainerScheduler.drain)
    status = remote_method(TrainerScheduler.status)
    ping = remote_method(TrainerScheduler.ping)
