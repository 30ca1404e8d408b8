"""Reports of a replica's load: start and end of work at once, other changes seldom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.actors.engine.target import LoadReporter


class Scheduler:
    def __init__(self) -> None:
        self.now = 100.0
        self.reports: list[tuple[float, int, int]] = []
        self.fails = False
        self.report = LoadReporter(self.take, lambda: self.now)

    def take(self, running: int, waiting: int) -> None:
        if self.fails:
            raise ConnectionError
        self.reports.append((self.now, running, waiting))

    def after(self, seconds: float, running: int, waiting: int = 0) -> None:
        self.now += seconds
        self.report.update(running, waiting)


def test_start_and_end_of_work_are_reported_at_once() -> None:
    scheduler = Scheduler()
    for running in (0, 1, 0, 2, 0):
        scheduler.after(0.001, running)
    assert [running for _, running, _ in scheduler.reports] == [0, 1, 0, 2, 0]


def test_changes_of_a_busy_replica_are_reported_later() -> None:
    scheduler = Scheduler()
    for running in (2, 3, 4, 3, 1):
        scheduler.after(0.01, running)
    assert [running for _, running, _ in scheduler.reports] == [2]
    scheduler.after(1.0, 4)
    assert scheduler.reports[-1][1:] == (4, 0)


def test_a_burst_is_reported_at_once() -> None:
    """Beside a light load a trainer may hold a permit: it must lose it to sixteen requests."""
    scheduler = Scheduler()
    scheduler.after(0.001, 1)
    scheduler.after(0.004, 1, 1)
    scheduler.after(0.004, 1, 15)
    assert [report[1:] for report in scheduler.reports] == [(1, 0), (1, 15)]


def test_a_reported_waiting_request_is_reported_as_running_at_once() -> None:
    """Where a light load may run beside training, waiting is busy and one running is not."""
    scheduler = Scheduler()
    scheduler.after(0.001, 0, 1)
    scheduler.after(0.004, 1)
    scheduler.after(0.004, 1, 1)
    assert [report[1:] for report in scheduler.reports] == [(0, 1), (1, 0)]


def test_an_unchanged_load_is_reported_once_a_second() -> None:
    scheduler = Scheduler()
    for _ in range(300):
        scheduler.after(0.01, 3)
    assert len(scheduler.reports) == 3


def test_a_failing_report_is_ignored() -> None:
    scheduler = Scheduler()
    scheduler.fails = True
    scheduler.after(0.1, 1)
    scheduler.fails = False
    scheduler.after(0.1, 0)
    assert [report[1:] for report in scheduler.reports] == [(0, 0)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 4), st.integers(0, 3)), max_size=80))
def test_idle_and_doubled_load_are_always_reported(
    steps: list[tuple[int, int, int]],
) -> None:
    scheduler = Scheduler()
    for ms, running, waiting in steps:
        scheduler.after(ms / 1e3, running, waiting)
        reported = sum(scheduler.reports[-1][1:])
        assert bool(running + waiting) == bool(reported)
        assert running + waiting <= 2 * reported
    gaps = [b[0] - a[0] for a, b in zip(scheduler.reports, scheduler.reports[1:], strict=False)]
    busy = [
        gap
        for gap, one, two in zip(gaps, scheduler.reports, scheduler.reports[1:], strict=False)
        if one[1] and 0 < sum(two[1:]) <= 2 * sum(one[1:])
    ]
    assert all(gap >= 1.0 - 1e-9 for gap in busy)
