"""The broker against a drawn world of replicas, trainers that hang and die, and Ray's books."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
    Revoke,
    Stop,
)
from paceline.cluster.scheduler.policy import Broker, Demand, TopicBook, fits

TOPICS = ("a", "b", "c")
NAMES = ("t0", "t1", "t2")
STEP_S = 0.25
LEASES = LeaseSettings(
    yield_timeout_s=1.0, silent_after_s=20.0, return_after_s=2.0, pending_stale_s=5.0, settle_s=0.0
)
PATIENCE_S = LEASES.yield_timeout_s * LEASES.most_patience
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
    """Two trainers that book half a GPU each on a node of one, and one on a shared core."""

    @initialize(shared=st.booleans())
    def begin(self, shared: bool) -> None:
        self.now = 0.0
        self.idle = IdleRule(idle_after_s=0.1, stale_after_s=6.0)
        self.broker = Broker(self.idle, LEASES)
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

    def fractions(self, name: str) -> tuple[Fraction, ...]:
        if self.held(name):
            return (Fraction(name, "gpu", self.held(name)),)
        return (Fraction("core-0", "cpu"),)

    def tick(self) -> None:
        """One step of the trainers' keeper, and of Ray."""
        there = {name: self.held(name) for name, p in self.processes.items() if p.there}
        gone = {name: self.held(name) for name, p in self.processes.items() if not p.there}
        used = sum(a.get("GPU", 0.0) for a in there.values()) + 0.5 * self.replicas
        self.free["gpu"]["GPU"] = 1.0 - used
        while self.pending and fits({"GPU": 0.5}, self.free["gpu"]):
            self.pending.pop(0)
            self.replicas += 1
            self.free["gpu"]["GPU"] -= 0.5
        self.broker.kept(there | gone, gone)
        demands = [Demand({"GPU": 0.5}, len(self.pending))]
        self.broker.pending(demands, self.free, self.now)
        for order in self.broker.tick(self.now):
            self.carry_out(order)

    def carry_out(self, order: Any) -> None:
        process = self.processes[order.trainer]
        if isinstance(order, Revoke):
            self.revoked[order.trainer] = self.now
            return
        if isinstance(order, Place):
            assert not process.there
            assert not self.pending
            process.there = True
        else:
            assert isinstance(order, Kill | Free)
            assert process.there
            assert order.trainer not in self.broker.assignments()
            # Who has a lease has time to yield; a broker that was restarted knows of none.
            if process.works and order.trainer in self.revoked:
                waited = self.now - self.revoked[order.trainer]
                assert waited >= LEASES.yield_timeout_s
            process.there = isinstance(order, Kill)
        process.life, process.hangs, process.works = process.life + 1, False, False

    def alive(self, name: str) -> Process | None:
        process = self.processes[name]
        return process if process.there and not process.hangs else None

    def has_a_round(self, process: Process) -> bool:
        """By the broker's books, which may still be an earlier life's."""
        return (
            self.broker._trainers.find(process.name, str(process.life)) is not None
            and process.name in self.broker.assignments()
        )

    @rule()
    def everybody_works(self) -> None:
        for name, process in self.processes.items():
            if name not in self.broker.assignments():
                self.ask_for_a_topic(name, dict.fromkeys(TOPICS, 1.0))
            if not process.works:
                self.ask_for_leave(name)

    @rule(steps=st.integers(1, 30))
    def time_passes(self, steps: int) -> None:
        for _ in range(steps):
            self.now += STEP_S
            for process in self.processes.values():  # who works looks up after a micro-step
                if process.works and not process.hangs:
                    self.ask_for_leave(process.name)
            self.tick()

    @rule(busy=st.booleans())
    def load(self, busy: bool) -> None:
        self.busy = busy
        for order in self.broker.report("r", int(busy), 0, self.now):
            self.carry_out(order)

    @rule()
    def a_request_comes(self) -> None:
        for order in self.broker.announce(self.now):
            self.carry_out(order)

    @rule(name=st.sampled_from(NAMES), gains=GAINS)
    def ask_for_a_topic(self, name: str, gains: dict[str, float]) -> None:
        process = self.alive(name)
        if process is None:
            return
        process.works = False
        orders = self.broker.ask(name, str(process.life), self.fractions(name), gains, self.now)
        for order in orders:
            assert isinstance(order, Assign)
            assert order.topic in gains
            assert not math.isnan(gains[order.topic])

    @rule(name=st.sampled_from(NAMES))
    def ask_for_leave(self, name: str) -> None:
        process = self.alive(name)
        if process is None:
            return
        [order] = self.broker.check(name, str(process.life), self.now)
        process.works = isinstance(order, Grant | Renew)
        if process.works:
            assert self.idle.may_train(self.now)
            assert name not in self.broker._rooms.leaving
        if isinstance(order, Stop):
            assert not self.has_a_round(process)

    @rule(name=st.sampled_from(NAMES), ends=st.booleans())
    def leaves_off(self, name: str, ends: bool) -> None:
        process = self.alive(name)
        if process is None:
            return
        process.works = False
        if ends:
            self.broker.release(name, str(process.life), {}, self.now)
            assert not self.has_a_round(process)
        else:
            self.broker.rest(name, str(process.life), self.now)

    @rule(name=st.sampled_from(NAMES))
    def hangs(self, name: str) -> None:
        self.processes[name].hangs = True

    @rule(name=st.sampled_from(NAMES), told=st.booleans())
    def dies(self, name: str, told: bool) -> None:
        process = self.processes[name]
        if process.there:
            process.life, process.hangs, process.works = process.life + 1, False, False
            if told:
                self.broker.died(name, self.now)
                assert name not in self.broker.assignments()

    @rule()
    def a_replica_comes(self) -> None:
        if len(self.pending) + self.replicas < 2:
            self.pending.append(self.now)
            self.tick()

    @rule()
    def a_replica_goes(self) -> None:
        self.replicas = max(0, self.replicas - 1)

    @rule()
    def the_broker_dies(self) -> None:
        self.idle = IdleRule(idle_after_s=0.1, stale_after_s=6.0)
        self.broker = Broker(self.idle, LEASES)
        self.revoked.clear()
        if self.busy:
            self.broker.report("r", 1, 0, self.now)
        self.tick()

    @invariant()
    def no_fraction_has_two_leases(self) -> None:
        names = [lease.fraction.name for lease in self.broker.leases()]
        assert len(names) == len(set(names))

    @invariant()
    def no_topic_has_two_trainers(self) -> None:
        topics = list(self.broker.assignments().values())
        assert len(topics) == len(set(topics))
        for lease in self.broker.leases():
            assert self.broker.assignments()[lease.trainer] == lease.topic

    @invariant()
    def every_lease_ends_once(self) -> None:
        ledger = self.broker.ledger
        assert ledger.grants == sum(ledger.endings.values()) + len(self.broker.leases())

    @invariant()
    def nobody_goes_on_for_long_who_is_to_yield(self) -> None:
        for lease in self.broker.leases():
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
        for lease in self.broker.leases():
            process = self.processes[lease.trainer]
            known = self.broker._trainers.find(lease.trainer)
            assert known is not None
            if known.life != str(process.life) or process.hangs:
                limit = LEASES.silent_after_s * LEASES.most_patience + PATIENCE_S + STEP_S
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
    broker, now, rounds = Broker(IdleRule()), 0.0, 0
    offer = {f"topic-{index}": gain for index, gain in enumerate(gains)}
    fractions = [(Fraction(str(t), "node"),) for t in range(trainers)]
    ends = dict.fromkeys(range(trainers), 0.0)
    waits = dict.fromkeys(offer, 0.0)
    limit = LeaseSettings().longest_wait_s + (len(gains) + 1) * max(lengths)
    while now < 4_000.0:
        trainer = min(ends, key=lambda t: ends[t])
        now = ends[trainer]
        name = str(trainer)
        broker.release(name, "life", {}, now)
        orders = broker.ask(name, "life", fractions[trainer], offer, now)
        length = lengths[rounds % len(lengths)]
        for order in orders:
            assert isinstance(order, Assign)
            waits[order.topic] = now + length
        ends[trainer] = now + length
        rounds += 1
        assert now - min(waits.values()) <= limit


@given(st.floats(0.0, 10.0), st.floats(0.0, 10.0))
def test_the_larger_gain_comes_first_and_equal_ones_by_waiting(one: float, two: float) -> None:
    book = TopicBook(LeaseSettings())
    chosen = book.choose("t", {"one": one, "two": two}, (), (), 0.0)
    assert chosen == ("one" if one >= two else "two")
    book.ended("one", "t", 1.0)
    assert book.choose("t", {"one": 1.0, "two": 1.0}, (), (), 30.0) == "two"
    assert book.choose("t", {"one": 1.0, "two": 1.0}, ("two",), (), 30.0) == "one"


@pytest.mark.parametrize("trainers", [1, 2, 3])
def test_trainers_on_one_core_take_turns(trainers: int) -> None:
    broker, now = Broker(IdleRule()), 0.0
    names, core = [str(t) for t in range(trainers)], (Fraction("core", "node"),)
    offer = {str(number): 1.0 for number in range(trainers)}
    for name in names:
        assert broker.ask(name, "life", core, offer, now)
    steps = dict.fromkeys(names, 0)
    for _ in range(60 * trainers):
        for name in names:
            now += 0.01
            [order] = broker.check(name, "life", now)
            works = isinstance(order, Grant | Renew)
            steps[name] += works
            if works and steps[name] % 10 == 0:  # it judges, or its round ends
                broker.rest(name, "life", now)
    assert min(steps.values()) >= 60 * 0.6
