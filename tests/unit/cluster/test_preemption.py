"""Selection of trainers to preempt for pending replicas."""

from __future__ import annotations

from paceline.actors.training.permits import ResourceSlot
from paceline.cluster.scheduler.leases import ReplicaDemand, SchedulerSettings
from paceline.cluster.scheduler.preemption import PreemptionTracker, select_preemptions


def quarter(name: str, node: str | None = "n") -> ResourceSlot:
    return ResourceSlot(name, node, {"GPU": 0.25})


def test_none_is_preempted_if_replicas_fit_or_if_it_does_not_help() -> None:
    demands = [ReplicaDemand({"GPU": 0.5})]
    assert select_preemptions(demands, {"n": {"GPU": 0.5}}, [quarter("a")]) == set()
    assert select_preemptions(demands, {"n": {"GPU": 0.2}}, [quarter("a")]) == set()
    assert select_preemptions([], {"n": {}}, [quarter("a")]) == set()
    assert (
        select_preemptions([ReplicaDemand({"CPU": 1.0})], {"n": {"CPU": 0.0}}, [quarter("a")])
        == set()
    )
    only_a_gpu = [ReplicaDemand({"GPU": 0.5, "serving": 1.0})]
    assert select_preemptions(only_a_gpu, {"n": {"GPU": 0.3}}, [quarter("a")]) == set()


def test_as_few_are_preempted_as_will_do() -> None:
    three = [quarter("a"), quarter("b"), quarter("c", "m")]
    assert select_preemptions(
        [ReplicaDemand({"GPU": 0.5})], {"n": {"GPU": 0.0}, "m": {"GPU": 0.25}}, three
    ) == {"c"}
    assert select_preemptions(
        [ReplicaDemand({"GPU": 0.5})], {"n": {"GPU": 0.0}, "m": {}}, three
    ) == {"a", "b"}
    both = select_preemptions(
        [ReplicaDemand({"GPU": 0.25}, 2)], {"n": {"GPU": 0.0}}, [quarter("a"), quarter("b")]
    )
    assert both == {"a", "b"}
    one = select_preemptions(
        [ReplicaDemand({"GPU": 0.25}, 2)], {"n": {"GPU": 0.25}}, [quarter("a"), quarter("b")]
    )
    assert len(one) == 1


def test_a_replica_that_fits_takes_its_resources_from_the_next() -> None:
    demands = [ReplicaDemand({"GPU": 0.5}, 2)]
    assert select_preemptions(demands, {"n": {"GPU": 0.75}}, [quarter("a")]) == {"a"}


def test_trainers_on_an_unknown_node_are_preempted_last() -> None:
    slots = [quarter("a", None), quarter("b")]
    assert select_preemptions([ReplicaDemand({"GPU": 0.25})], {"n": {}}, slots) == {"b"}
    assert select_preemptions([ReplicaDemand({"GPU": 0.5})], {"n": {}}, slots) == {"a", "b"}


def test_without_figures_of_nodes_all_that_book_what_is_wanted_are_preempted() -> None:
    slots = [quarter("a"), ResourceSlot("cpu", "n", {"CPU": 1.0})]
    assert select_preemptions([ReplicaDemand({"GPU": 0.5})], None, slots) == {"a"}


def report(tracker: PreemptionTracker, replicas: int, free: float, now: float) -> set[str]:
    tracker.report([ReplicaDemand({"GPU": 0.5}, replicas)], {"n": {"GPU": free}}, now)
    return tracker.select({"a": "n", "b": "n"}, now)


def test_a_report_expires() -> None:
    tracker = PreemptionTracker(SchedulerSettings(pending_stale_s=5.0))
    tracker.sync({"a": {"GPU": 0.5}}, ())
    assert report(tracker, 1, 0.0, 10.0) == {"a"}
    assert tracker.select({"a": "n"}, 15.0) == {"a"}  # the supervisor has fallen silent
    assert tracker.select({"a": "n"}, 15.1) == set()
    assert tracker.pending(15.1) == 0


def test_an_ended_trainer_counts_as_gone_before_ray_shows_it() -> None:
    tracker = PreemptionTracker(SchedulerSettings(settle_s=3.0))
    tracker.sync({"a": {"GPU": 0.5}, "b": {"GPU": 0.5}}, ())
    assert report(tracker, 1, 0.0, 10.0) == {"a"}
    tracker.ended("a", "n", 10.0)
    assert report(tracker, 1, 0.0, 11.0) == set()
    assert report(tracker, 1, 0.0, 13.1) == {"b"}  # it had not helped


def test_one_trainer_on_an_unknown_node_is_ended_at_a_time() -> None:
    tracker = PreemptionTracker(SchedulerSettings(settle_s=3.0))
    tracker.sync({name: {"GPU": 0.5} for name in ("a", "b", "c")}, ())

    def select(free: float, now: float) -> set[str]:
        tracker.report([ReplicaDemand({"GPU": 0.5})], {"n": {"GPU": free}}, now)
        return tracker.select({"c": "n"} if now == 12.0 else {}, now).copy()

    assert select(0.0, 10.0) == {"a"}
    tracker.ended("a", None, 10.0)
    assert select(0.0, 11.0) == set()
    assert select(0.0, 12.0) == {"c"}  # its node is known by now
    assert select(0.5, 13.0) == set()
    assert select(0.0, 13.1) == {"b"}  # room on another node did not help


def test_trainers_are_preempted_one_by_one_if_no_device_has_the_room_of_its_node() -> None:
    """Of two devices with 0.45 and 0.25 free, say: with 0.45 and 0.5 when a has ended."""
    tracker = PreemptionTracker(SchedulerSettings(settle_s=3.0))
    tracker.sync({"a": {"GPU": 0.25}, "b": {"GPU": 0.25}, "c": {"GPU": 0.25}}, ())

    def select(free: float, now: float) -> set[str]:
        tracker.report([ReplicaDemand({"GPU": 0.6})], {"n": {"GPU": free}, "m": {}}, now)
        return tracker.select({"a": "n", "b": "n", "c": "m"}, now)

    assert select(0.7, 10.0) == set()  # Ray may be about to place it
    assert select(0.7, 12.9) == set()
    assert select(0.7, 13.0) == {"a"}
    assert select(0.7, 14.0) == {"a"}
    tracker.ended("a", "n", 14.0)
    assert select(0.95, 15.0) == set()
    assert select(0.95, 17.9) == set()
    assert select(0.95, 18.0) == {"b"}
    assert report(tracker, 0, 0.35, 18.5) == set()  # it was placed
    assert report(tracker, 1, 0.5, 19.0) == set()


def test_a_trainer_restarts_after_the_last_replica_if_it_fits() -> None:
    tracker = PreemptionTracker(SchedulerSettings(restart_after_s=5.0, settle_s=0.0))
    tracker.sync({"a": {"GPU": 0.5}, "b": {"GPU": 0.5}}, ())
    assert report(tracker, 2, 0.0, 10.0) == {"a", "b"}
    for name in ("a", "b"):
        tracker.ended(name, "n", 10.0)
    report(tracker, 0, 1.0, 12.0)
    assert tracker.restart(12.0) is None  # too soon
    report(tracker, 0, 0.25, 16.0)
    assert tracker.restart(16.0) is None  # no room
    report(tracker, 0, 0.5, 17.0)
    assert tracker.restart(17.0) == "a"
    assert tracker.restart(17.1) is None  # b would need what a has just got
    report(tracker, 0, 0.5, 18.0)
    assert tracker.restart(18.0) == "b"
