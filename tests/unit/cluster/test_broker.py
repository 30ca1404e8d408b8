"""The broker's leases one by one; tests/property has them in a drawn world."""

from __future__ import annotations

import pytest

from paceline.cluster.scheduler.idle import IdleRule
from paceline.cluster.scheduler.leases import (
    Assign,
    Fraction,
    Free,
    Grant,
    Instruction,
    Kill,
    LeaseSettings,
    Place,
    Renew,
    Revoke,
    Stop,
    Wait,
)
from paceline.cluster.scheduler.policy import Broker, Demand

CORE = (Fraction("core", "node"),)
GAINS = {"sql": 1.0, "code": 0.5}


def make(**changes: float) -> Broker:
    return Broker(IdleRule(idle_after_s=0.1), LeaseSettings(yield_timeout_s=2.0, **changes))


def at_work(broker: Broker, name: str = "t", now: float = 0.0) -> None:
    assert broker.ask(name, "life", CORE, {"sql": 1.0}, now)
    assert broker.check(name, "life", now) == [Grant(name, "sql", "core")]


def test_a_lease_is_granted_renewed_and_given_back() -> None:
    broker = make()
    assert broker.ask("t", "life", CORE, GAINS, 0.0) == [Assign("t", "sql", anew=True)]
    assert broker.check("t", "life", 0.0) == [Grant("t", "sql", "core")]
    assert broker.check("t", "life", 0.1) == [Renew("t")]
    broker.release("t", "life", {"rejections": 1}, 0.2)
    assert (broker.leases(), broker.assignments()) == ([], {})
    assert broker.ask("t", "life", CORE, {"sql": 1.0}, 0.3) == [Assign("t", "sql", anew=False)]
    assert broker.notes("t") == {}
    assert broker.notes("other") == {"sql": {"rejections": 1}}
    assert broker.ledger.figures()["leases_ended"]["released"] == 1


def test_a_request_revokes_and_the_next_question_is_the_yield() -> None:
    broker = make()
    at_work(broker)
    assert broker.report("r", 1, 0, 1.0) == [Revoke("t")]
    assert broker.report("r", 2, 0, 1.01) == []  # told once
    assert broker.check("t", "life", 1.03) == [Wait("t")]
    assert broker.leases() == []
    assert broker.assignments() == {"t": "sql"}  # the round is under way
    figures = broker.ledger.figures()
    assert figures["last_yield_s"] == pytest.approx(0.03)
    assert broker.ledger.drained() == [pytest.approx(0.03)]
    assert broker.ledger.drained() == []
    assert (figures["yield_p50_s"], figures["yield_p99_s"]) == (pytest.approx(0.03),) * 2
    broker.report("r", 0, 0, 2.0)
    assert broker.check("t", "life", 2.05) == [Wait("t")]
    assert broker.check("t", "life", 2.11) == [Grant("t", "sql", "core")]


@pytest.mark.parametrize("how", ["pause", "drain"])
def test_pause_and_drain_revoke(how: str) -> None:
    broker = make()
    at_work(broker)
    orders = broker.pause(1.0) if how == "pause" else broker.drain(1.0, on=True)
    assert orders == [Revoke("t")]
    assert broker.check("t", "life", 1.1) == [Wait("t")]


def test_who_does_not_yield_is_killed_and_waited_for_longer_the_next_time() -> None:
    broker = make()
    now = 0.0
    for patience in (2.0, 4.0, 8.0):
        at_work(broker, now=now)
        broker.report("r", 1, 0, now)
        assert broker.tick(now + patience - 0.1) == []
        assert broker.tick(now + patience) == [Kill("t")]
        assert (broker.leases(), broker.assignments()) == ([], {})
        now += 100.0
        broker.report("r", 0, 0, now - 1.0)
    at_work(broker, now=now)
    broker.report("r", 1, 0, now)
    assert broker.check("t", "life", now + 1.0) == [Wait("t")]  # in time: all is forgiven
    broker.report("r", 0, 0, now + 2.0)
    assert broker.check("t", "life", now + 3.0) == [Grant("t", "sql", "core")]
    broker.report("r", 1, 0, now + 4.0)
    assert broker.tick(now + 6.0) == [Kill("t")]


def test_a_broker_that_knows_nothing_has_trainers_ask_anew() -> None:
    broker = make()
    assert broker.check("t", "life", 0.0) == [Stop("t")]
    at_work(broker)
    assert broker.check("t", "another life", 0.1) == [Stop("t")]
    broker.release("t", "another life", {}, 0.1)
    assert len(broker.leases()) == 1


def test_a_new_life_frees_what_the_old_one_had() -> None:
    broker = make()
    at_work(broker)
    assert broker.ask("t", "next", CORE, {"sql": 1.0}, 1.0) == [Assign("t", "sql", anew=True)]
    assert broker.leases() == []
    assert broker.ledger.figures()["leases_ended"]["died"] == 1


def test_two_trainers_have_two_topics_and_a_third_has_none() -> None:
    broker = make()
    two = (Fraction("one", "node"), Fraction("two", "node"))
    topics = []
    for name in ("a", "b"):
        [order] = broker.ask(name, "life", two, GAINS, 0.0)
        assert isinstance(order, Assign)
        topics.append(order.topic)
        [grant] = broker.check(name, "life", 0.0)
        assert isinstance(grant, Grant)
    assert topics == ["sql", "code"]
    assert {lease.fraction.name for lease in broker.leases()} == {"one", "two"}
    assert broker.ask("c", "life", two, GAINS, 0.0) == []


def test_a_topic_stays_with_who_had_it_but_does_not_wait_for_him() -> None:
    broker = make()
    broker.ask("a", "life", CORE, {"sql": 1.0}, 0.0)
    broker.release("a", "life", {}, 1.0)
    both = {"sql": 1.0, "code": 0.8}
    assert broker.ask("b", "life", CORE, both, 1.0) == [Assign("b", "code", anew=True)]
    broker.release("b", "life", {}, 2.0)
    assert broker.ask("b", "life", CORE, {"sql": 1.0}, 2.0) == [Assign("b", "sql", anew=True)]


def test_a_silent_trainer_loses_its_topic_and_one_that_works_its_lease() -> None:
    broker = make(silent_after_s=10.0)
    broker.ask("a", "life", CORE, {"sql": 1.0}, 0.0)
    assert broker.tick(10.0) == []
    assert broker.tick(10.1) == [Kill("a")]  # it has a topic, and hangs where it needs no lease
    assert broker.assignments() == {}
    at_work(broker, now=20.0)
    assert broker.tick(30.1) == [Revoke("t")]
    assert broker.tick(32.1) == [Kill("t")]


def test_idle_time_is_counted_by_its_use() -> None:
    broker = make()
    broker.report("r", 1, 0, 0.0)
    broker.report("r", 0, 0, 1.0)  # idle from 1.1
    broker.tick(2.1)
    broker.ask("t", "life", CORE, GAINS, 3.1)
    broker.check("t", "life", 3.6)
    broker.report("r", 1, 0, 5.6)
    broker.check("t", "life", 5.7)
    broker.tick(9.0)
    figures = broker.ledger.figures()
    assert figures["idle_s"] == pytest.approx({"unwanted": 2.0, "waiting": 0.5, "used": 2.0})
    assert figures["idle_used_share"] == pytest.approx(0.8)


def pending(
    broker: Broker, demands: list[Demand], free: dict[str, dict[str, float]], now: float
) -> list[Instruction]:
    broker.pending(demands, free, now)
    return broker.tick(now)


def held(broker: Broker) -> None:
    broker.kept({"t": {"GPU": 0.25}}, ())
    gpu = (Fraction("t", "node", {"GPU": 0.25}),)
    assert broker.ask("t", "life", gpu, GAINS, 0.0)
    assert broker.check("t", "life", 0.0) == [Grant("t", "sql", "t")]


def test_a_waiting_replica_has_the_trainer_yield_and_then_go() -> None:
    broker = make(return_after_s=5.0)
    held(broker)
    want, none = [Demand({"GPU": 0.5})], {"node": {"GPU": 0.25}}
    assert pending(broker, want, none, 1.0) == [Revoke("t")]
    assert broker.check("t", "life", 1.05) == [Wait("t")]
    assert broker.tick(1.1) == [Free("t")]
    assert broker.ask("t", "next", CORE, GAINS, 1.2) == []  # it goes in a moment
    broker.kept({"t": {"GPU": 0.25}}, ("t",))
    assert pending(broker, [], {"node": {"GPU": 0.0}}, 20.0) == []
    assert pending(broker, [], {"node": {"GPU": 0.5}}, 21.0) == [Place("t")]
    broker.kept({"t": {"GPU": 0.25}}, ())
    assert broker.tick(22.0) == []


def test_a_trainer_that_hangs_makes_room_all_the_same() -> None:
    broker = make(leave_timeout_s=1.5)
    held(broker)
    want, none = [Demand({"GPU": 0.5})], {"node": {"GPU": 0.25}}
    assert pending(broker, want, none, 1.0) == [Revoke("t")]
    assert broker.tick(2.4) == []
    assert broker.tick(2.5) == [Free("t")]
    assert broker.ledger.figures()["leases_ended"]["freed"] == 1


def test_a_replica_that_no_longer_waits_frees_nobody() -> None:
    broker = make()
    held(broker)
    assert pending(broker, [Demand({"GPU": 0.5})], {"node": {"GPU": 0.25}}, 1.0) == [Revoke("t")]
    assert pending(broker, [], {"node": {"GPU": 0.0}}, 1.5) == []
    assert broker.check("t", "life", 1.6) == [Grant("t", "sql", "t")]
