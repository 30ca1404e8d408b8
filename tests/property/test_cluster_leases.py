"""The scheduler's policy under drawn replicas, trainers that hang and die, and bookings of Ray."""

from __future__ import annotations

import math
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.actors.training.permits import (
    Permit,
    ResourceSlot,
    TopicProgress,
    TrainerIdentity,
)
from paceline.cluster.scheduler.idle import IdleDetector
from paceline.cluster.scheduler.leases import (
    Action,
    Instruction,
    ReplicaDemand,
    SchedulerSettings,
)
from paceline.cluster.scheduler.policy import SchedulerPolicy, TopicQueue
from paceline.cluster.scheduler.preemption import fits

TOPICS = ("a", "b", "c")
NAMES = ("t0", "t1", "t2")
STEP_S = 0.25
LEASES = SchedulerSettings(
    yield_timeout_s=1.0, silent_after_s=20.0, restart_after_s=2.0, pending_stale_s=5.0, settle_s=0.0
)
PATIENCE_S = LEASES.yield_timeout_s * LEASES.max_backoff
GAINS = st.dictionaries(st.sampled_from(TOPICS), st.floats(0.0, 5.0) | st.just(math.nan))


@dataclass
class Process:
    """A trainer's process as the world has it."""

    name: str
    life: int = 0
    there: bool = True
    hangs: bool = False
    works: bool = False


class World(RuleBasedStateMachine):
    """Two trainers that queue half a GPU each on a node of one, and one on a shared core."""

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        self.now = 0.0
        self.idle = IdleDetector(idle_after_s=0.1, stale_after_s=6.0)
        self.policy = SchedulerPolicy(self.idle, LEASES)
        self.processes = {name: Process(name) for name in NAMES}
        self.shared = shared
        self.free = {"gpu": {"GPU": 0.0}, "cpu": {}}
        self.replicas = 0  # that run
        self.pending: list[float] = []  # since when each waits
        self.busy = False
        self.revoked: dict[str, float] = {}
        self.tick()

    def held(self, name: str) -> dict[str, float]:
        return {} if self.shared or name == "t2" else {"GPU": 0.5}

    def slots(self, name: str) -> tuple[ResourceSlot, ...]:
        if self.held(name):
            return (ResourceSlot(name, "gpu", self.held(name)),)
        return (ResourceSlot("core-0", "cpu"),)

    def tick(self) -> None:
        """One step of the supervisor, and of Ray."""
        there = {name: self.held(name) for name, p in self.processes.items() if p.there}
        gone = {name: self.held(name) for name, p in self.processes.items() if not p.there}
        used = sum(a.get("GPU", 0.0) for a in there.values()) + 0.5 * self.replicas
        self.free["gpu"]["GPU"] = 1.0 - used
        while self.pending and fits({"GPU": 0.5}, self.free["gpu"]):
            self.pending.pop(0)
            self.replicas += 1
            self.free["gpu"]["GPU"] -= 0.5
        self.policy.preemption.sync(there | gone, gone)
        demands = [ReplicaDemand({"GPU": 0.5}, len(self.pending))]
        self.policy.preemption.report(demands, self.free, self.now)
        instructions = self.policy.tick(self.now)
        for instruction in instructions:
            self.carry_out(instruction)
        self.note_revocations()

    def note_revocations(self) -> None:
        for lease in self.policy.leases():
            if lease.revoked_at is not None:
                self.revoked[lease.trainer] = lease.revoked_at

    def carry_out(self, order: Instruction) -> None:
        process = self.processes[order.trainer]
        if order.action is Action.START:
            assert not process.there
            assert not self.pending
            process.there = True
        else:
            assert process.there
            assert order.trainer not in self.policy.assignments()
            # A trainer with a lease has time to yield; a scheduler that was restarted knows none.
            if process.works and order.trainer in self.revoked:
                waited = self.now - self.revoked[order.trainer]
                assert waited >= LEASES.yield_timeout_s
            process.there = order.action is Action.KILL
            self.policy.trainer_died(order.trainer, self.now)
        process.life, process.hangs, process.works = process.life + 1, False, False

    def alive(self, name: str) -> Process | None:
        process = self.processes[name]
        return process if process.there and not process.hangs else None

    def has_a_round(self, process: Process) -> bool:
        """By the policy's state, which may still be of an earlier incarnation."""
        return (
            self.policy._find(process.name, str(process.life)) is not None
            and process.name in self.policy.assignments()
        )

    @rule()
    def everybody_works(self) -> None:
        for name, process in self.processes.items():
            if name not in self.policy.assignments():
                self.ask_for_a_topic(name, dict.fromkeys(TOPICS, 1.0))
            if not process.works:
                self.ask_for_a_permit(name)

    @rule(steps=st.integers(1, 30))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.now += STEP_S
            for process in self.processes.values():  # trainers check after a micro-step
                if process.works and not process.hangs:
                    self.ask_for_a_permit(process.name)
            self.tick()

    @rule(busy=st.booleans())
    def load(self, busy: bool) -> None:
        self.busy = busy
        self.policy.report_load("r", int(busy), 0, self.now)
        self.note_revocations()

    @rule()
    def a_request_comes(self) -> None:
        self.policy.announce_request(self.now)
        self.note_revocations()

    @rule(name=st.sampled_from(NAMES), gains=GAINS)
    def ask_for_a_topic(self, name: str, gains: dict[str, float]) -> None:
        process = self.alive(name)
        if process is None:
            return
        process.works = False
        identity = TrainerIdentity(name, self.slots(name))
        topic = self.policy.acquire_topic(identity, str(process.life), gains, self.now).topic
        if topic is not None:
            assert topic in gains
            assert not math.isnan(gains[topic])

    @rule(name=st.sampled_from(NAMES))
    def ask_for_a_permit(self, name: str) -> None:
        process = self.alive(name)
        if process is None:
            return
        permit = self.policy.acquire_permit(name, str(process.life), self.now)
        process.works = permit is Permit.GRANTED
        if process.works:
            assert self.idle.may_train(self.now)
            assert name not in self.policy.preemption.selected
        if permit is Permit.UNASSIGNED:
            assert not self.has_a_round(process)

    @rule(name=st.sampled_from(NAMES), ends=st.booleans())
    def leaves_off(self, name: str, ends: bool) -> None:
        process = self.alive(name)
        if process is None:
            return
        process.works = False
        if ends:
            self.policy.release_topic(name, str(process.life), TopicProgress(), self.now)
            assert not self.has_a_round(process)
        else:
            self.policy.release_permit(name, str(process.life), self.now)

    @rule(name=st.sampled_from(NAMES))
    def hangs(self, name: str) -> None:
        self.processes[name].hangs = True

    @rule(name=st.sampled_from(NAMES), noticed=st.booleans())
    def dies(self, name: str, noticed: bool) -> None:
        process = self.processes[name]
        if process.there:
            process.life, process.hangs, process.works = process.life + 1, False, False
            if noticed:
                self.policy.trainer_died(name, self.now)
                assert name not in self.policy.assignments()

    @rule()
    def a_replica_comes(self) -> None:
        if len(self.pending) + self.replicas < 2:
            self.pending.append(self.now)
            self.tick()

    @rule()
    def a_replica_goes(self) -> None:
        self.replicas = max(0, self.replicas - 1)

    @rule()
    def the_scheduler_dies(self) -> None:
        self.idle = IdleDetector(idle_after_s=0.1, stale_after_s=6.0)
        self.policy = SchedulerPolicy(self.idle, LEASES)
        self.revoked.clear()
        if self.busy:
            self.policy.report_load("r", 1, 0, self.now)
        self.tick()

    @invariant()
    def no_slot_has_two_leases(self) -> None:
        names = [lease.slot.name for lease in self.policy.leases()]
        assert len(names) == len(set(names))

    @invariant()
    def no_topic_has_two_trainers(self) -> None:
        topics = list(self.policy.assignments().values())
        assert len(topics) == len(set(topics))
        for lease in self.policy.leases():
            assert self.policy.assignments()[lease.trainer] == lease.topic

    @invariant()
    def every_lease_ends_once(self) -> None:
        stats = self.policy.stats
        assert stats.grants == sum(stats.lease_ends.values()) + len(self.policy.leases())

    @invariant()
    def no_trainer_goes_on_for_long_after_a_revocation(self) -> None:
        for lease in self.policy.leases():
            if not self.idle.may_train(self.now):
                assert lease.revoked_at is not None
            if lease.revoked_at is not None:
                assert self.now - lease.revoked_at <= PATIENCE_S + STEP_S

    @invariant()
    def a_waiting_replica_is_served(self) -> None:
        """Within the time to yield, a step to be seen and one to be placed."""
        for since in self.pending:
            assert self.now - since <= LEASES.yield_timeout_s + 3 * STEP_S

    @invariant()
    def a_dead_trainer_holds_nothing_for_long(self) -> None:
        for lease in self.policy.leases():
            process = self.processes[lease.trainer]
            known = self.policy._trainers[lease.trainer]
            if known.incarnation != str(process.life) or process.hangs:
                limit = LEASES.silent_after_s * LEASES.max_backoff + PATIENCE_S + STEP_S
                assert self.now - lease.renewed_at <= limit


World.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase


@settings(deadline=None, max_examples=25)
@given(
    gains=st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=6),
    lengths=st.lists(st.floats(1.0, 60.0), min_size=1, max_size=20),
    trainers=st.integers(1, 3),
)
def test_no_topic_starves(gains: list[float], lengths: list[float], trainers: int) -> None:
    """However small its gain: rounds that are under way end, then the longest wait is over."""
    policy, now, rounds = SchedulerPolicy(IdleDetector()), 0.0, 0
    offer = {f"topic-{index}": gain for index, gain in enumerate(gains)}
    slots = [(ResourceSlot(str(t), "node"),) for t in range(trainers)]
    ends = dict.fromkeys(range(trainers), 0.0)
    waits = dict.fromkeys(offer, 0.0)
    limit = SchedulerSettings().longest_wait_s + (len(gains) + 1) * max(lengths)
    while now < 4_000.0:
        trainer = min(ends, key=lambda t: ends[t])
        now = ends[trainer]
        name = str(trainer)
        policy.release_topic(name, "life", TopicProgress(), now)
        identity = TrainerIdentity(name, slots[trainer])
        topic = policy.acquire_topic(identity, "life", offer, now).topic
        length = lengths[rounds % len(lengths)]
        if topic is not None:
            waits[topic] = now + length
        ends[trainer] = now + length
        rounds += 1
        assert now - min(waits.values()) <= limit


@given(st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_larger_gain_comes_first_and_equal_ones_by_waiting(one: float, two: float) -> None:
    queue = TopicQueue(SchedulerSettings())
    chosen = queue.choose("t", {"one": one, "two": two}, (), (), 0.0)
    assert chosen == ("one" if one >= two else "two")
    queue.round_ended("one", "t", 1.0)
    assert queue.choose("t", {"one": 1.0, "two": 1.0}, (), (), 30.0) == "two"
    assert queue.choose("t", {"one": 1.0, "two": 1.0}, ("two",), (), 30.0) == "one"


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_trainers_on_one_core_take_turns(trainers: int) -> None:
    policy, now = SchedulerPolicy(IdleDetector()), 0.0
    names, core = [str(t) for t in range(trainers)], (ResourceSlot("core", "node"),)
    offer = {str(number): 1.0 for number in range(trainers)}
    for name in names:
        identity = TrainerIdentity(name, core)
        assert policy.acquire_topic(identity, "life", offer, now).topic is not None
    steps = dict.fromkeys(names, 0)
    for _ in range(60 * trainers):
        for name in names:
            now += 0.01
            works = policy.acquire_permit(name, "life", now) is Permit.GRANTED
            steps[name] += works
            if works and steps[name] % 10 == 0:  # it evaluates, or its round ends
                policy.release_permit(name, "life", now)
    assert min(steps.values()) >= 60 * 0.6
