"""The idle rule and the load board."""

from __future__ import annotations

from paceline.cluster.scheduler.board import GO, WAIT, LoadBoard
from paceline.cluster.scheduler.idle import IdleRule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_trains_when_nothing_was_ever_reported() -> None:
    assert IdleRule().may_train(0.0)


def test_stops_at_once_and_resumes_after_the_quiet_time() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.report("a", 1, 0, 10.0)
    assert not rule.may_train(10.0)
    assert not rule.may_train(12.0)
    rule.report("a", 0, 0, 12.0)
    assert not rule.may_train(12.05)
    assert rule.may_train(12.11)


def test_idle_reports_do_not_prolong_the_quiet_time() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.report("a", 0, 0, 10.0)
    assert rule.may_train(10.0)


def test_waiting_requests_are_load() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.report("a", 0, 3, 10.0)
    assert not rule.may_train(11.0)


def test_one_busy_replica_among_several_is_enough() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.report("a", 1, 0, 10.0)
    rule.report("b", 0, 0, 10.5)
    assert not rule.may_train(11.0)


def test_a_replica_that_died_busy_is_forgotten() -> None:
    rule = IdleRule(idle_after_s=0.1, stale_after_s=5.0)
    rule.report("a", 4, 0, 10.0)
    assert not rule.may_train(15.0)
    assert rule.may_train(15.01)
    assert rule.snapshot(15.01)["replicas"] == 0


def test_an_announced_request_counts_before_its_replica_reports_it() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.announce(10.0)
    assert not rule.may_train(10.2)
    rule.report("a", 1, 0, 10.21)
    assert not rule.may_train(12.0)
    rule.report("a", 0, 0, 12.0)
    assert not rule.may_train(12.05)
    assert rule.may_train(12.11)


def test_one_that_no_replica_ever_reports_is_forgotten() -> None:
    rule = IdleRule(idle_after_s=0.1)
    rule.announce(10.0)
    rule.report("a", 0, 0, 10.1)  # of an idle replica, which says nothing of it
    assert not rule.may_train(10.2)
    assert rule.may_train(10.26)


def test_the_board_refuses_leave_from_the_announcement_on() -> None:
    clock = Clock()
    board = LoadBoard(clock=clock)
    assert board.ask("t", "life", (), {"sql": 1.0})["topic"] == "sql"
    assert board.check("t", "life") == GO
    board.announce()
    assert board.check("t", "life") == WAIT


def test_announcements_stop_nothing_that_may_run_beside_a_request() -> None:
    rule = IdleRule(occupied_above=2)
    rule.announce(10.0)
    assert rule.may_train(10.0)


def test_pause_wins_over_idleness() -> None:
    clock = Clock()
    board = LoadBoard(clock=clock)
    board.pause()
    assert not board.may_train()
    board.resume()
    assert board.may_train()
    assert board.snapshot() == {
        "may_train": True,
        "paused": False,
        "draining": False,
        "running": 0,
        "waiting": 0,
        "replicas": 0,
        "asked": 2,
        "granted": 1,
        "leases": [],
        "replicas_pending": 0,
        "trainers_freed": [],
        "idle_s": {"used": 0.0, "waiting": 0.0, "unwanted": 0.0},
        "idle_used_share": None,
        "leases_granted": 0,
        "leases_ended": dict.fromkeys(("released", "revoked", "killed", "freed", "died"), 0),
        "last_yield_s": None,
        "longest_yield_s": None,
        "yield_p50_s": None,
        "yield_p99_s": None,
    }


def test_gaps_between_requests_of_a_steady_stream_are_used() -> None:
    clock = Clock()
    board = LoadBoard(idle_after_s=0.08, clock=clock)
    granted = 0
    for _ in range(10):  # 200 ms of work, 300 ms of gap
        for busy, ticks in ((1, 20), (0, 30)):
            board.report("a", busy, 0)
            for _ in range(ticks):
                clock.now += 0.01
                granted += board.may_train()
    assert granted == 10 * 23


def test_a_quiet_replica_counts_as_idle_up_to_the_given_occupancy() -> None:
    rule = IdleRule(idle_after_s=0.1, occupied_above=2)
    rule.report("a", 2, 0, 0.0)
    assert rule.may_train(0.0)
    rule.report("a", 3, 0, 1.0)
    assert not rule.may_train(1.0)
    rule.report("a", 2, 0, 2.0)
    assert not rule.may_train(2.05)
    assert rule.may_train(2.2)
    rule.report("a", 1, 1, 3.0)
    assert not rule.may_train(3.2)
