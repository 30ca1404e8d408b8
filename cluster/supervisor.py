"""Supervision of the learning actors: start them, and start them again when they die or hang.

A process owns the actors that it starts: they end with it. Ray restarts those whose processes die;
those that it has given up on (a constructor failed, the storage was locked) are started again here,
and those that have stopped answering are killed, so that Ray restarts them.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import ray
from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from paceline.actors.handles import Reference, RemoteMethod, remote_method
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.training.trainer import TrainerHandle
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber
from paceline.actors.weights.topics import TopicActors, TopicsView
from paceline.cluster.pending_replicas import PendingReplicas, find_pending
from paceline.cluster.scheduler.leases import Action, Amounts, Instruction
from paceline.cluster.scheduler.trainer_scheduler import TrainerSchedulerHandle

logger = logging.getLogger(__name__)

_TICK_S = 1.0
_PING_S = 2.0
_PENDING_S = 1.0
_RETRY_S = 2.0
_ANSWER_S = 5.0
_JOIN_S = 10.0
_HANGS_AFTER_S = 120.0
# Of an unanswered call, while this process ran: a host that slept has not waited.
_HANG_POLLS = int(_HANGS_AFTER_S / _TICK_S)
_TOPICS_TIMEOUT_S = 30.0


class ActorHandle(Protocol):
    """Handle of a supervised actor."""

    @property
    def ping(self) -> RemoteMethod[[], bool]:
        """Return True: the actor answers."""


HandleT = TypeVar("HandleT", bound=ActorHandle)
ActorFactory = Callable[[], HandleT]  # starts an actor, returns its handle


@dataclass(frozen=True, slots=True)
class SupervisorStatus:
    """What a supervisor did.

    Attributes:
        starts: actor to how often it was started here.
        last_error: of a start, or of a death; None without one.
        warning: for operators, None without one.
    """

    starts: Mapping[str, int]
    last_error: str | None = None
    warning: str | None = None


@dataclass(slots=True)
class _Actor(Generic[HandleT]):
    """``ping`` is an unanswered call, for ``unanswered`` polls; ``answers``: the last one was."""

    handle: HandleT
    ping: Reference[bool] | None = None
    pinged_at: float = 0.0
    unanswered: int = 0
    answers: bool = False


class SupervisedActors(Generic[HandleT]):
    """Actors that are started from factories. One thread calls it; any may read ``handles``.

    Args:
        factories: name to factory.
        ordered: whether an actor needs those before it.

    Attributes:
        starts: name to how often the actor was started.
        start_error: why an actor is not started yet.
        death: the last one, in words.
    """

    def __init__(
        self, factories: Mapping[str, ActorFactory[HandleT]], *, ordered: bool = False
    ) -> None:
        self._factories = factories
        self._ordered = ordered
        self._actors: dict[str, _Actor[HandleT]] = {}
        self._retry_at = 0.0
        self.start_error: str | None = None
        self.death: str | None = None
        self.starts = dict.fromkeys(factories, 0)

    def handles(self) -> dict[str, HandleT]:
        """Name to handle of the actors that are started."""
        return {name: actor.handle for name, actor in list(self._actors.items())}

    def silent(self) -> int:
        """Number of started actors that do not answer, or not yet."""
        return sum(not actor.answers for actor in list(self._actors.values()))

    def missing(self, excluded: Collection[str] = ()) -> list[str]:
        """Names of actors that should be started now."""
        if time.monotonic() < self._retry_at:
            return []
        return [n for n in self._factories if n not in self._actors and n not in excluded]

    def start_missing(self, excluded: Collection[str] = ()) -> None:
        """Start actors; those that fail are retried after ``_RETRY_S``."""
        failed = None
        for name in (missing := self.missing(excluded)):
            try:
                self._actors[name] = _Actor(self._factories[name]())
                self.starts[name] += 1
            except Exception as error:  # the name is free only when the predecessor is dead
                failed = f"{name}: {type(error).__name__}: {error}"
                self._retry_at = time.monotonic() + _RETRY_S
                logger.info("%s is not started yet (%s)", name, error)
                if self._ordered:
                    break
        if missing:
            self.start_error = failed

    def complete(self) -> bool:
        """Whether every actor is started."""
        return self._actors.keys() == self._factories.keys()

    def kill(self, name: str, *, restart: bool) -> None:
        """Kill an actor's process; Ray restarts it, or the actor is dropped."""
        actor = self._actors.get(name)
        if actor is None:
            return
        actor.answers = False
        ray.kill(actor.handle, no_restart=not restart)
        if not restart:
            del self._actors[name]

    def kill_all(self) -> None:
        """End all actors for good."""
        for name in list(self._actors):
            self.kill(name, restart=False)

    def poll(self) -> list[str]:
        """Names of actors that have died since the last call; drops those Ray has given up on.

        Call it every ``_TICK_S``. One that has answered and has hung since is killed; one that
        never has is still constructed, or waits for its resources.
        """
        dead = []
        now = time.monotonic()
        for name, actor in list(self._actors.items()):
            if actor.ping is None:
                if now - actor.pinged_at >= _PING_S:
                    actor.ping, actor.pinged_at = actor.handle.ping.remote(), now
                    actor.unanswered = 0
                continue
            if not ray.wait([actor.ping], timeout=0)[0]:
                actor.unanswered += 1
                if actor.answers and actor.unanswered >= _HANG_POLLS:
                    self.death = f"{name}: no answer for {_HANGS_AFTER_S:.0f} s"
                    logger.warning("%s hangs and is killed: Ray restarts it", name)
                    try:
                        self.kill(name, restart=True)
                    except Exception:  # of Ray's control store: later
                        logger.warning("%s was not killed", name, exc_info=True)
                        actor.answers, actor.unanswered = True, 0
                continue
            ping, actor.ping = actor.ping, None
            try:
                ray.get(ping)
                actor.answers = True
            except ActorDiedError as error:
                self.death = f"{name}: {' '.join(str(error).split())[-300:]}"
                logger.warning("%s has died and is started again: %s", name, error)
                del self._actors[name]
                self._retry_at = now + _RETRY_S
                dead.append(name)
            except RayError as error:  # it restarts, was killed for memory, or is not placed
                if not isinstance(error, ActorUnavailableError):
                    logger.info("%s: %s: %s", name, type(error).__name__, error)
                actor.answers = False
                dead.append(name)
        return dead


class TrainerSupervisor:
    """Starts trainers and carries out the trainer scheduler's instructions, in threads.

    Without the scheduler nothing changes.
    """

    def __init__(
        self,
        factories: Mapping[str, ActorFactory[TrainerHandle]],
        booked: Amounts,
        scheduler: TrainerSchedulerHandle,
        pending: Callable[[Amounts, int], PendingReplicas] = find_pending,
    ) -> None:
        """Start nothing yet, see :meth:`start`.

        Args:
            factories: trainer to factory.
            booked: what Ray books for each trainer.
            scheduler: actor handle of the TrainerScheduler.
            pending: finds pending replicas; called if something is booked.
        """
        self._trainers = SupervisedActors(factories)
        self._names = list(factories)
        self._booked = {name: amount for name, amount in booked.items() if amount > 0.0}
        self._scheduler = scheduler
        self._pending = pending
        self._preempted: set[str] = set()
        self._ended: set[str] = set()  # since the scheduler last answered
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> "TrainerSupervisor":
        """Start the trainers and supervise them from now on; returns itself."""
        if not self._names:
            return self
        self._trainers.start_missing()
        loops = [(self._tick, _TICK_S)]
        if self._booked:
            loops.append((self._report_pending, _PENDING_S))
        for step, period_s in loops:
            thread = threading.Thread(
                target=self._run, args=(step, period_s), name="paceline-trainers", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        """End the trainers for good."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._trainers.kill_all()

    def handles(self) -> dict[str, TrainerHandle]:
        """Trainer to actor handle, of those that are started."""
        return self._trainers.handles()

    def status(self) -> SupervisorStatus:
        """Starts of the trainers, and their last error."""
        error = self._trainers.start_error or self._trainers.death
        return SupervisorStatus(dict(self._trainers.starts), error)

    def _run(self, step: Callable[[], None], period_s: float) -> None:
        while not self._stopped.wait(period_s):
            try:
                step()
            except Exception as error:  # of the scheduler or Ray's control store: later
                logger.info("trainers: %s: %s", type(error).__name__, error)

    def _tick(self) -> None:
        self._ended.update(self._trainers.poll())
        self._trainers.start_missing(self._preempted)
        booked, ended = dict.fromkeys(self._names, self._booked), sorted(self._ended)
        answer = self._scheduler.sync_trainers.remote(booked, sorted(self._preempted), ended)
        instructions = ray.get(answer, timeout=_ANSWER_S)
        self._ended.clear()
        for instruction in instructions:
            try:
                self._carry_out(instruction)
            except Exception:  # the scheduler repeats it
                logger.warning("%s was not carried out", instruction, exc_info=True)

    def _report_pending(self) -> None:
        found = self._pending(self._booked, self._trainers.silent())
        call = self._scheduler.report_pending.remote(found.demands, found.free)
        ray.get(call, timeout=_ANSWER_S)

    def _carry_out(self, instruction: Instruction) -> None:
        name = instruction.trainer
        if instruction.action is Action.START:
            logger.info("%s is started again: there are free resources", name)
            self._preempted.discard(name)
            self._trainers.start_missing(self._preempted)
        elif instruction.action is Action.PREEMPT:
            logger.info("%s is preempted: a replica needs its resources", name)
            self._trainers.kill(name, restart=False)
            self._preempted.add(name)
        else:
            logger.warning("%s is killed: it did not yield in time", name)
            self._trainers.kill(name, restart=True)
            self._ended.add(name)


class TopicSupervisor:
    """Starts the actors of topics that are added while the server runs, in a thread.

    A registry that was killed comes back without their handles, and gets them again.
    """

    def __init__(
        self,
        registry: RegistryHandle,
        shards: dict[str, ShardHandle],
        shard_of: Callable[[str], ShardHandle],
        start_expert: Callable[[str, list[str]], tuple[str, str]] | None,
    ) -> None:
        """Start the thread.

        Args:
            registry: actor handle of the weight registry.
            shards: expert to handle, of the configured ones; those of added topics are put in.
            shard_of: gives a topic's shard.
            start_expert: starts the expert of a topic, given all added topics, and returns the
                names of its deployment and application; None without a pool.
        """
        self._registry = registry
        self._configured = frozenset(shards)
        self._shards = shards
        self._shard_of, self._start_expert = shard_of, start_expert
        self._parts: dict[str, TopicActors] = {}
        self._stopped = threading.Event()
        self._starting = threading.Lock()
        self._subscriber = RegistrySubscriber(registry, on_topics=self._start_parts)
        self._subscriber.start()

    def stop(self) -> None:
        """End what was started here; nothing is started or waits for Ray afterwards."""
        self._stopped.set()
        self._subscriber.stop(_TOPICS_TIMEOUT_S)
        with self._starting:
            for parts in self._parts.values():
                if parts.expert is not None:
                    serve.delete(parts.expert[1])

    def _start_parts(self, view: TopicsView) -> None:
        """Start what is missing and report it to the registry.

        Raises:
            RuntimeError: something has to be retried.
        """
        missing = []
        added = [topic.name for topic in view.topics]
        for topic in added:
            if topic in self._configured or topic in view.actors:
                continue
            try:
                parts = self._parts.get(topic) or self._start(topic, added)
                call = self._registry.register_actors.remote(topic, parts)
                self._subscriber.get(call, _TOPICS_TIMEOUT_S)
            except Exception:
                if not self._stopped.is_set():
                    logger.warning("%s: not all of its actors are started", topic, exc_info=True)
                missing.append(topic)
        if missing:
            raise RuntimeError(f"{', '.join(missing)}: not all actors are started")

    def _start(self, topic: str, added: list[str]) -> TopicActors:
        with self._starting:
            if self._stopped.is_set():
                raise RuntimeError("the server ends")
            self._shards[topic] = self._shard_of(topic)
            expert = None if self._start_expert is None else self._start_expert(topic, added)
            self._parts[topic] = TopicActors(self._shards[topic], expert)
            return self._parts[topic]


class Supervisor:
    """Serve deployment on a cluster that starts the learning actors and supervises them.

    They end with it: nothing of a deleted application goes on learning or holds the storage's
    lock, and a new configuration starts new actors.
    """

    def __init__(
        self,
        factories: Mapping[str, ActorFactory[ActorHandle]],
        trainers: Mapping[str, ActorFactory[TrainerHandle]],
        booked: Amounts,
        scheduler: TrainerSchedulerHandle,
        warning: str | None,
    ) -> None:
        """Start the thread.

        Args:
            factories: name to factory of the others, each after those it needs.
            trainers: trainer to factory; trainers need all of ``factories``.
            booked: what Ray books for each trainer.
            scheduler: the TrainerScheduler.
            warning: for log and status, or None.
        """
        self._warning = warning
        self._actors = SupervisedActors(factories, ordered=True)
        self._trainers = TrainerSupervisor(trainers, booked, scheduler)
        self._polled_at = time.monotonic()
        threading.Thread(target=self._run, name="paceline-supervisor", daemon=True).start()

    async def status(self) -> SupervisorStatus:
        """Starts of all actors, the last error, and the warning."""
        trainers = self._trainers.status()
        return SupervisorStatus(
            {**self._actors.starts, **trainers.starts},
            self._actors.start_error or trainers.last_error or self._actors.death,
            self._warning,
        )

    def check_health(self) -> None:
        """Raise RuntimeError if the thread hangs: Serve replaces the replica."""
        if time.monotonic() - self._polled_at > _HANGS_AFTER_S:
            raise RuntimeError("the supervisor hangs")

    def _run(self) -> None:
        if self._warning is not None:
            logger.warning(self._warning)
        trains = False
        while True:
            self._actors.poll()
            if self._actors.missing():
                self._polled_at = math.inf  # fingerprints of large models take minutes
                self._actors.start_missing()
            if not trains and self._actors.complete():
                self._trainers.start()
                trains = True
            self._polled_at = time.monotonic()
            time.sleep(_TICK_S)


class SupervisorHandle:
    """Serve handle of a Supervisor."""

    status = remote_method(Supervisor.status)
