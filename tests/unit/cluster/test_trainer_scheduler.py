"""The idle detector and the trainer scheduler."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.training.permits import Permit, TrainerIdentity
from paceline.cluster.scheduler import trainer_scheduler
from paceline.cluster.scheduler.idle import IdleDetector
from paceline.cluster.scheduler.leases import SchedulerStatus
from paceline.cluster.scheduler.trainer_scheduler import RunningClock, TrainerScheduler


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_trains_when_nothing_was_ever_reported() -> None:
    assert IdleDetector().may_train(0.0)


def test_stops_at_once_and_resumes_after_the_quiet_time() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.report_load("a", 1, 0, 10.0)
    assert not idle.may_train(10.0)
    assert not idle.may_train(12.0)
    idle.report_load("a", 0, 0, 12.0)
    assert not idle.may_train(12.05)
    assert idle.may_train(12.11)


def test_idle_reports_do_not_prolong_the_quiet_time() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.report_load("a", 0, 0, 10.0)
    assert idle.may_train(10.0)


def test_waiting_requests_are_load() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.report_load("a", 0, 3, 10.0)
    assert not idle.may_train(11.0)


def test_one_busy_replica_among_several_is_enough() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.report_load("a", 1, 0, 10.0)
    idle.report_load("b", 0, 0, 10.5)
    assert not idle.may_train(11.0)


def test_a_replica_that_died_busy_is_forgotten() -> None:
    idle = IdleDetector(idle_after_s=0.1, stale_after_s=5.0)
    idle.report_load("a", 4, 0, 10.0)
    assert not idle.may_train(14.99)
    assert idle.may_train(15.0)
    assert idle.replicas == 0


def test_an_announced_request_counts_before_its_replica_reports_it() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.announce_request(10.0)
    assert not idle.may_train(10.2)
    idle.report_load("a", 1, 0, 10.21)
    assert not idle.may_train(12.0)
    idle.report_load("a", 0, 0, 12.0)
    assert not idle.may_train(12.05)
    assert idle.may_train(12.11)


def test_the_end_of_another_request_leaves_an_announced_one_announced() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.report_load("a", 1, 0, 9.0)
    idle.announce_request(10.0)
    idle.report_load("a", 0, 0, 10.01)
    assert not idle.may_train(10.2)
    idle.report_load("a", 1, 0, 10.21)
    idle.report_load("a", 0, 0, 10.22)
    assert idle.idle_from(10.23) == pytest.approx(10.32)


def test_idle_time_begins_when_a_replica_that_died_busy_is_taken_for_gone() -> None:
    idle = IdleDetector(idle_after_s=0.1, stale_after_s=5.0)
    idle.report_load("a", 4, 0, 10.0)
    assert idle.idle_from(12.0) == 15.0
    assert idle.idle_from(20.0) == 15.0


def test_one_that_no_replica_ever_reports_is_forgotten() -> None:
    idle = IdleDetector(idle_after_s=0.1)
    idle.announce_request(10.0)
    idle.report_load("a", 0, 0, 10.1)  # of an idle replica, which says nothing of it
    assert not idle.may_train(10.2)
    assert idle.may_train(10.26)


def test_permits_are_denied_from_the_announcement_on() -> None:
    clock = Clock()
    scheduler = TrainerScheduler(clock=clock)
    assert scheduler.acquire_topic(TrainerIdentity("t"), "life", {"sql": 1.0}).topic == "sql"
    assert scheduler.acquire_permit("t", "life") is Permit.GRANTED
    scheduler.announce_request()
    assert scheduler.acquire_permit("t", "life") is Permit.DENIED


def test_announcements_stop_nothing_that_may_run_beside_a_request() -> None:
    idle = IdleDetector(occupied_above=2)
    idle.announce_request(10.0)
    assert idle.may_train(10.0)


def test_pause_wins_over_idleness() -> None:
    clock = Clock()
    scheduler = TrainerScheduler(clock=clock)
    scheduler.pause()
    assert not scheduler.may_train()
    scheduler.resume()
    assert scheduler.may_train()
    assert scheduler.status() == SchedulerStatus(
        may_train=True,
        paused=False,
        draining=False,
        running=0,
        waiting=0,
        replicas=0,
        replicas_pending=0,
        trainers_preempted=(),
        trainers_wanted=0,
        leases=(),
        permits_requested=2,
        permits_granted=1,
        leases_granted=0,
        leases_ended=dict.fromkeys(("released", "revoked", "killed", "preempted", "died"), 0),
        idle_s={"used": 0.0, "waiting": 0.0, "unwanted": 0.0},
        idle_used_share=None,
        last_yield_s=None,
        longest_yield_s=None,
        yield_p50_s=None,
        yield_p99_s=None,
    )


def test_a_denied_trainer_waits_until_serving_is_idle() -> None:
    scheduler = TrainerScheduler(idle_after_s=0.05)

    async def waits() -> tuple[bool, bool]:
        scheduler.report_load("a", 1, 0)
        await scheduler.until_idle(0.1)
        busy = scheduler.may_train()
        waiting = asyncio.create_task(scheduler.until_idle(60.0))
        await asyncio.sleep(0.1)
        early = waiting.done()
        scheduler.report_load("a", 0, 0)
        await asyncio.wait_for(waiting, 30.0)
        return busy, early

    assert asyncio.run(waits()) == (False, False)
    assert scheduler.may_train()


WAKES: dict[str, tuple[Callable[[TrainerScheduler], None], Callable[[TrainerScheduler], None]]] = {
    "a replica falls idle": (
        lambda scheduler: scheduler.report_load("a", 1, 0),
        lambda scheduler: scheduler.report_load("a", 0, 0),
    ),
    "a pause ends": (TrainerScheduler.pause, TrainerScheduler.resume),
    "a drain ends": (
        lambda scheduler: scheduler.drain(on=True),
        lambda scheduler: scheduler.drain(on=False),
    ),
}


@pytest.mark.parametrize("name", WAKES)
def test_who_waits_is_woken_by_what_ends_the_wait(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_scheduler, "_LONGEST_WAIT_S", 60.0)
    begin, end = WAKES[name]
    scheduler = TrainerScheduler(idle_after_s=0.01, stale_after_s=60.0)

    async def waits() -> None:
        begin(scheduler)
        waiting = [asyncio.create_task(scheduler.until_idle(60.0)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        end(scheduler)
        await asyncio.wait_for(asyncio.gather(*waiting), 10.0)

    asyncio.run(waits())


def test_who_waits_looks_when_serving_may_be_idle_sooner_and_no_more() -> None:
    looks: list[float] = []

    def clock() -> float:
        looks.append(time.monotonic())
        return looks[-1]

    scheduler = TrainerScheduler(idle_after_s=0.2, clock=clock)

    async def waits() -> float:
        scheduler.report_load("a", 1, 0)
        waiting = asyncio.create_task(scheduler.until_idle(60.0))
        for _ in range(6):
            await asyncio.sleep(0.05)
            scheduler.report_load("a", 1, 0)
        scheduler.report_load("a", 0, 0)
        reported = looks[-1]
        await asyncio.wait_for(waiting, 30.0)
        return looks[-1] - reported

    assert asyncio.run(waits()) >= 0.2
    # Eight reports; at first, half a second later if so long, after the last report, and at the end
    assert len(looks) <= 8 + 4


LOADS = st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 2))


@given(
    st.lists(st.tuples(st.integers(0, 8), LOADS | st.just("announced")), max_size=12),
    st.integers(0, 2),
    st.lists(st.integers(0, 40), min_size=1, max_size=8),
)
def test_serving_is_idle_from_the_time_that_was_foretold(
    reports: list[tuple[int, tuple[str, int, int] | str]], occupied: int, later: list[int]
) -> None:
    """In quarters of a second, which add up exactly, if nothing more is reported."""
    idle, now = IdleDetector(0.5, 6.0, occupied), 0.0
    for quarters, report in reports:
        now += quarters / 4
        if isinstance(report, str):
            idle.announce_request(now)
        else:
            idle.report_load(*report, now)
    foretold = idle.idle_from(now)
    for quarters in sorted(later):
        then = now + quarters / 4
        assert idle.may_train(then) == (then >= foretold)


def test_a_suspension_is_held_against_no_trainer_and_no_replica() -> None:
    clock = Clock()
    scheduler = TrainerScheduler(clock=RunningClock(clock))
    assert scheduler.acquire_topic(TrainerIdentity("t"), "life", {"sql": 1.0}).topic == "sql"
    assert scheduler.acquire_permit("t", "life") is Permit.GRANTED
    scheduler.report_load("a", 1, 0)  # while the trainer computes
    clock.now += 60.0
    assert scheduler.sync_trainers({}, (), ()) == []
    assert not scheduler.may_train()
    for _ in range(8):  # 4 s, of which it runs: one that does not yield then is killed
        clock.now += 0.5
        scheduler.report_load("a", 1, 0)
        told = scheduler.sync_trainers({}, (), ())
        if told:
            break
    assert [instruction.trainer for instruction in told] == ["t"]


def test_gaps_between_requests_of_a_steady_stream_are_used() -> None:
    clock = Clock()
    scheduler = TrainerScheduler(idle_after_s=0.08, clock=clock)
    granted = 0
    for _ in range(10):  # 200 ms of work, 300 ms of gap
        for busy, ticks in ((1, 20), (0, 30)):
            scheduler.report_load("a", busy, 0)
            for _ in range(ticks):
                clock.now += 0.01
                granted += scheduler.may_train()
    assert granted == 10 * 23


def test_a_quiet_replica_counts_as_idle_up_to_the_given_occupancy() -> None:
    idle = IdleDetector(idle_after_s=0.1, occupied_above=2)
    idle.report_load("a", 2, 0, 0.0)
    assert idle.may_train(0.0)
    idle.report_load("a", 3, 0, 1.0)
    assert not idle.may_train(1.0)
    idle.report_load("a", 2, 0, 2.0)
    assert not idle.may_train(2.05)
    assert idle.may_train(2.2)
    idle.report_load("a", 1, 1, 3.0)
    assert not idle.may_train(3.2)
