"""Leases and preemptions one by one; tests/property has them under drawn events."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.actors.training.permits import (
    Assignment,
    Permit,
    ResourceSlot,
    TopicProgress,
    TrainerIdentity,
)
from paceline.actors.training.round_counts import RoundCounts
from paceline.cluster.scheduler.idle import IdleDetector
from paceline.cluster.scheduler.leases import (
    Action,
    Instruction,
    LeaseEnd,
    ReplicaDemand,
    SchedulerSettings,
)
from paceline.cluster.scheduler.policy import SchedulerPolicy

GRANTED, DENIED = Permit.GRANTED, Permit.DENIED
CORE = (ResourceSlot("core", "node"),)
GAINS = {"sql": 1.0, "code": 0.5}


def request(
    policy: SchedulerPolicy,
    name: str,
    gains: dict[str, float],
    now: float,
    *,
    incarnation: str = "life",
    slots: tuple[ResourceSlot, ...] = CORE,
) -> Assignment:
    return policy.acquire_topic(TrainerIdentity(name, slots), incarnation, gains, now)


def revoked(policy: SchedulerPolicy) -> dict[str, float]:
    """Trainer to the time of its lease's revocation."""
    leases = policy.leases()
    return {lease.trainer: lease.revoked_at for lease in leases if lease.revoked_at is not None}


def kill(name: str) -> list[Instruction]:
    return [Instruction(Action.KILL, name)]


def make(**changes: float) -> SchedulerPolicy:
    return SchedulerPolicy(
        IdleDetector(idle_after_s=0.1), SchedulerSettings(yield_timeout_s=2.0, **changes)
    )


def at_work(policy: SchedulerPolicy, name: str = "t", now: float = 0.0) -> None:
    assert request(policy, name, {"sql": 1.0}, now).topic == "sql"
    assert policy.acquire_permit(name, "life", now) is GRANTED
    lease = policy.leases()[-1]
    assert (lease.trainer, lease.topic, lease.slot.name) == (name, "sql", "core")


def test_a_lease_is_granted_renewed_and_given_back() -> None:
    policy = make()
    assert request(policy, "t", GAINS, 0.0) == Assignment("sql", stale=True)
    assert policy.acquire_permit("t", "life", 0.0) is GRANTED
    [lease] = policy.leases()
    assert (lease.trainer, lease.topic, lease.slot.name) == ("t", "sql", "core")
    assert policy.acquire_permit("t", "life", 0.1) is GRANTED
    assert policy.leases() == [lease]
    assert (lease.granted_at, lease.renewed_at, policy.stats.grants) == (0.0, 0.1, 1)
    progress = TopicProgress(counts=RoundCounts(rejections=1))
    policy.release_topic("t", "life", progress, 0.2)
    assert (policy.leases(), policy.assignments()) == ([], {})
    assert request(policy, "t", {"sql": 1.0}, 0.3) == Assignment("sql", stale=False)
    assert policy.topics.progress_of_others("t") == {}
    assert policy.topics.progress_of_others("other") == {"sql": progress}
    assert policy.stats.lease_ends[LeaseEnd.RELEASED] == 1


def test_a_request_revokes_and_the_next_call_is_the_yield() -> None:
    policy = make()
    at_work(policy)
    policy.report_load("r", 1, 0, 1.0)
    assert revoked(policy) == {"t": 1.0}
    policy.report_load("r", 2, 0, 1.01)
    assert revoked(policy) == {"t": 1.0}  # once
    assert policy.acquire_permit("t", "life", 1.03) is DENIED
    assert policy.leases() == []
    assert policy.assignments() == {"t": "sql"}  # the round is under way
    assert policy.stats.last_yield_s == pytest.approx(0.03)
    assert policy.stats.pop_yield_times() == [pytest.approx(0.03)]
    assert policy.stats.pop_yield_times() == []
    assert [policy.stats.yield_percentile(p) for p in (0.5, 0.99)] == [pytest.approx(0.03)] * 2
    policy.report_load("r", 0, 0, 2.0)
    assert policy.acquire_permit("t", "life", 2.05) is DENIED
    assert policy.acquire_permit("t", "life", 2.11) is GRANTED


@pytest.mark.parametrize("how", ["pause", "drain"])
def test_pause_and_drain_revoke(how: str) -> None:
    policy = make()
    at_work(policy)
    if how == "pause":
        policy.pause(1.0)
    else:
        policy.drain(1.0, on=True)
    assert revoked(policy) == {"t": 1.0}
    assert policy.acquire_permit("t", "life", 1.1) is DENIED


def test_a_trainer_that_does_not_yield_is_killed_and_has_longer_the_next_time() -> None:
    policy = make()
    now = 0.0
    for patience in (2.0, 4.0, 8.0):
        at_work(policy, now=now)
        policy.report_load("r", 1, 0, now)
        assert policy.tick(now + patience - 0.1) == []
        assert policy.tick(now + patience) == kill("t")
        assert (policy.leases(), policy.assignments()) == ([], {})
        policy.trainer_died("t", now + patience)
        now += 100.0
        policy.report_load("r", 0, 0, now - 1.0)
    at_work(policy, now=now)
    policy.report_load("r", 1, 0, now)
    assert policy.acquire_permit("t", "life", now + 1.0) is DENIED  # in time: all is forgiven
    policy.report_load("r", 0, 0, now + 2.0)
    assert policy.acquire_permit("t", "life", now + 3.0) is GRANTED
    policy.report_load("r", 1, 0, now + 4.0)
    assert policy.tick(now + 6.0) == kill("t")


@pytest.mark.parametrize(
    "end",
    [
        lambda policy: policy.trainer_died("t", 5.0),
        lambda policy: request(policy, "t", {}, 5.0),
        lambda policy: request(policy, "t", {}, 5.0, incarnation="next"),
    ],
)
def test_a_kill_is_repeated_until_the_process_ends_or_its_round_does(
    end: Callable[[SchedulerPolicy], object],
) -> None:
    policy = make()
    at_work(policy)
    policy.report_load("r", 1, 0, 1.0)
    assert policy.tick(3.0) == kill("t")
    assert policy.acquire_permit("t", "life", 3.5) is Permit.UNASSIGNED
    assert policy.tick(4.0) == kill("t")
    end(policy)
    assert policy.tick(6.0) == []


def test_an_unknown_trainer_is_unassigned() -> None:
    policy = make()
    assert policy.acquire_permit("t", "life", 0.0) is Permit.UNASSIGNED
    at_work(policy)
    assert policy.acquire_permit("t", "another life", 0.1) is Permit.UNASSIGNED
    policy.release_topic("t", "another life", TopicProgress(), 0.1)
    assert len(policy.leases()) == 1


def test_a_new_life_frees_what_the_old_one_had() -> None:
    policy = make()
    at_work(policy)
    again = request(policy, "t", {"sql": 1.0}, 1.0, incarnation="next")
    assert again == Assignment("sql", stale=True)
    assert policy.leases() == []
    assert policy.stats.lease_ends[LeaseEnd.DIED] == 1


def test_two_trainers_have_two_topics_and_a_third_has_none() -> None:
    policy = make()
    two = (ResourceSlot("one", "node"), ResourceSlot("two", "node"))
    topics = []
    for name in ("a", "b"):
        topics.append(request(policy, name, GAINS, 0.0, slots=two).topic)
        assert policy.acquire_permit(name, "life", 0.0) is GRANTED
    assert topics == ["sql", "code"]
    assert {lease.slot.name for lease in policy.leases()} == {"one", "two"}
    assert request(policy, "c", GAINS, 0.0, slots=two) == Assignment(None)


def test_a_topic_prefers_its_last_trainer_but_does_not_wait_for_it() -> None:
    policy = make()
    request(policy, "a", {"sql": 1.0}, 0.0)
    policy.release_topic("a", "life", TopicProgress(), 1.0)
    assert request(policy, "b", {"sql": 1.0, "code": 0.8}, 1.0) == Assignment("code", stale=True)
    policy.release_topic("b", "life", TopicProgress(), 2.0)
    assert request(policy, "b", {"sql": 1.0}, 2.0) == Assignment("sql", stale=True)


def test_a_silent_trainer_loses_its_topic_and_one_that_works_its_lease() -> None:
    policy = make(silent_after_s=10.0)
    request(policy, "a", {"sql": 1.0}, 0.0)
    assert policy.tick(10.0) == []
    assert policy.tick(10.1) == kill("a")  # it has a topic, and hangs where it needs no lease
    assert policy.assignments() == {}
    policy.trainer_died("a", 10.2)
    at_work(policy, now=20.0)
    assert policy.tick(30.1) == []
    assert revoked(policy) == {"t": 30.1}
    assert policy.tick(32.1) == kill("t")


def test_a_trainer_that_waits_for_idle_serving_keeps_its_turn() -> None:
    policy = make()
    policy.report_load("r", 1, 0, 0.0)
    for name, topic, now in (("a", "sql", 0.0), ("b", "code", 0.1)):
        request(policy, name, {topic: 1.0}, now)
        assert policy.acquire_permit(name, "life", now) is DENIED
    policy.report_load("r", 0, 0, 1.9)
    assert policy.acquire_permit("b", "life", 2.1) is DENIED  # the other waited longer
    assert policy.acquire_permit("a", "life", 2.2) is GRANTED


def test_idle_time_is_counted_by_its_use() -> None:
    policy = make()
    policy.report_load("r", 1, 0, 0.0)
    policy.report_load("r", 0, 0, 1.0)  # idle from 1.1
    policy.tick(2.1)
    request(policy, "t", GAINS, 3.1)
    policy.acquire_permit("t", "life", 3.6)
    policy.report_load("r", 1, 0, 5.6)
    policy.acquire_permit("t", "life", 5.7)
    policy.tick(9.0)
    assert policy.stats.idle_s == pytest.approx({"unwanted": 2.0, "waiting": 0.5, "used": 2.0})
    assert policy.stats.idle_used_share == pytest.approx(0.8)


def pending(
    policy: SchedulerPolicy,
    demands: list[ReplicaDemand],
    free: dict[str, dict[str, float]],
    now: float,
) -> list[Instruction]:
    policy.preemption.report(demands, free, now)
    return policy.tick(now)


def booked(policy: SchedulerPolicy) -> None:
    policy.preemption.sync({"t": {"GPU": 0.25}}, ())
    gpu = (ResourceSlot("t", "node", {"GPU": 0.25}),)
    assert request(policy, "t", GAINS, 0.0, slots=gpu).topic == "sql"
    assert policy.acquire_permit("t", "life", 0.0) is GRANTED


def test_a_pending_replica_revokes_and_then_preempts() -> None:
    policy = make(restart_after_s=5.0)
    booked(policy)
    want, none = [ReplicaDemand({"GPU": 0.5})], {"node": {"GPU": 0.25}}
    assert pending(policy, want, none, 1.0) == []
    assert revoked(policy) == {"t": 1.0}
    assert policy.acquire_permit("t", "life", 1.05) is DENIED
    assert policy.tick(1.1) == [Instruction(Action.PREEMPT, "t")]
    again = request(policy, "t", GAINS, 1.2, incarnation="next")
    assert again == Assignment(None)  # it ends in a moment
    policy.preemption.sync({"t": {"GPU": 0.25}}, ("t",))
    assert pending(policy, [], {"node": {"GPU": 0.0}}, 20.0) == []
    assert pending(policy, [], {"node": {"GPU": 0.5}}, 21.0) == [Instruction(Action.START, "t")]
    policy.preemption.sync({"t": {"GPU": 0.25}}, ())
    assert policy.tick(22.0) == []


def test_a_trainer_that_hangs_is_preempted_all_the_same() -> None:
    policy = make(preempt_timeout_s=1.5)
    booked(policy)
    want, none = [ReplicaDemand({"GPU": 0.5})], {"node": {"GPU": 0.25}}
    assert pending(policy, want, none, 1.0) == []
    assert revoked(policy) == {"t": 1.0}
    assert policy.tick(2.4) == []
    assert policy.tick(2.5) == [Instruction(Action.PREEMPT, "t")]
    assert policy.stats.lease_ends[LeaseEnd.PREEMPTED] == 1


def test_a_replica_that_no_longer_waits_preempts_none() -> None:
    policy = make()
    booked(policy)
    assert pending(policy, [ReplicaDemand({"GPU": 0.5})], {"node": {"GPU": 0.25}}, 1.0) == []
    assert revoked(policy) == {"t": 1.0}
    assert pending(policy, [], {"node": {"GPU": 0.0}}, 1.5) == []
    assert policy.acquire_permit("t", "life", 1.6) is GRANTED
