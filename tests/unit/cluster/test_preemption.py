"""Who makes room for waiting replicas."""

from __future__ import annotations

from paceline.cluster.scheduler.leases import LeaseSettings
from paceline.cluster.scheduler.policy import Demand, Holder, Vacancies, leavers


def quarter(name: str, node: str | None = "n") -> Holder:
    return Holder(name, node, {"GPU": 0.25})


def test_nobody_leaves_where_there_is_room_or_no_use() -> None:
    demands = [Demand({"GPU": 0.5})]
    assert leavers(demands, {"n": {"GPU": 0.5}}, [quarter("a")]) == set()
    assert leavers(demands, {"n": {"GPU": 0.2}}, [quarter("a")]) == set()
    assert leavers([], {"n": {}}, [quarter("a")]) == set()
    assert leavers([Demand({"CPU": 1.0})], {"n": {"CPU": 0.0}}, [quarter("a")]) == set()
    only_a_gpu = [Demand({"GPU": 0.5, "serving": 1.0})]
    assert leavers(only_a_gpu, {"n": {"GPU": 0.3}}, [quarter("a")]) == set()


def test_as_few_leave_as_will_do() -> None:
    three = [quarter("a"), quarter("b"), quarter("c", "m")]
    assert leavers([Demand({"GPU": 0.5})], {"n": {"GPU": 0.0}, "m": {"GPU": 0.25}}, three) == {"c"}
    assert leavers([Demand({"GPU": 0.5})], {"n": {"GPU": 0.0}, "m": {}}, three) == {"a", "b"}
    both = leavers([Demand({"GPU": 0.25}, 2)], {"n": {"GPU": 0.0}}, [quarter("a"), quarter("b")])
    assert both == {"a", "b"}
    one = leavers([Demand({"GPU": 0.25}, 2)], {"n": {"GPU": 0.25}}, [quarter("a"), quarter("b")])
    assert len(one) == 1


def test_a_replica_that_finds_room_takes_it_from_the_next() -> None:
    demands = [Demand({"GPU": 0.5}, 2)]
    assert leavers(demands, {"n": {"GPU": 0.75}}, [quarter("a")]) == {"a"}


def test_trainers_of_unknown_place_leave_last() -> None:
    holders = [quarter("a", None), quarter("b")]
    assert leavers([Demand({"GPU": 0.25})], {"n": {}}, holders) == {"b"}
    assert leavers([Demand({"GPU": 0.5})], {"n": {}}, holders) == {"a", "b"}


def test_where_nothing_is_known_of_the_nodes_all_leave_that_hold_what_is_wanted() -> None:
    holders = [quarter("a"), Holder("cpu", "n", {"CPU": 1.0})]
    assert leavers([Demand({"GPU": 0.5})], None, holders) == {"a"}


def told(rooms: Vacancies, replicas: int, free: float, now: float) -> set[str]:
    rooms.pending([Demand({"GPU": 0.5}, replicas)], {"n": {"GPU": free}}, now)
    return rooms.plan({"a": "n", "b": "n"}, now)


def test_what_was_told_holds_for_a_while_only() -> None:
    rooms = Vacancies(LeaseSettings(pending_stale_s=5.0))
    rooms.kept({"a": {"GPU": 0.5}}, ())
    assert told(rooms, 1, 0.0, 10.0) == {"a"}
    assert rooms.plan({"a": "n"}, 15.0) == {"a"}  # whoever tells has fallen silent
    assert rooms.plan({"a": "n"}, 15.1) == set()
    assert rooms.waiting(15.1) == 0


def test_one_that_was_let_go_counts_as_gone_before_ray_shows_it() -> None:
    rooms = Vacancies(LeaseSettings(settle_s=3.0))
    rooms.kept({"a": {"GPU": 0.5}, "b": {"GPU": 0.5}}, ())
    assert told(rooms, 1, 0.0, 10.0) == {"a"}
    rooms.let_go("a", "n", 10.0)
    assert told(rooms, 1, 0.0, 11.0) == set()
    assert told(rooms, 1, 0.0, 13.1) == {"b"}  # it had not helped


def test_a_trainer_returns_after_the_last_replica_where_there_is_room() -> None:
    rooms = Vacancies(LeaseSettings(return_after_s=5.0, settle_s=0.0))
    rooms.kept({"a": {"GPU": 0.5}, "b": {"GPU": 0.5}}, ())
    assert told(rooms, 2, 0.0, 10.0) == {"a", "b"}
    for name in ("a", "b"):
        rooms.let_go(name, "n", 10.0)
    told(rooms, 0, 1.0, 12.0)
    assert rooms.returning(12.0) is None  # too soon
    told(rooms, 0, 0.25, 16.0)
    assert rooms.returning(16.0) is None  # no room
    told(rooms, 0, 0.5, 17.0)
    assert rooms.returning(17.0) == "a"
    assert rooms.returning(17.1) is None  # b would need what a has just got
    told(rooms, 0, 0.5, 18.0)
    assert rooms.returning(18.0) == "b"
