"""A front door tells the trainer scheduler of requests as they come."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.deploy.api.traffic import ArrivalNotifier


class Scheduler:
    """Counts what it is told, as Ray's handle of an actor takes it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.told = 0
        self._error = error

    @property
    def announce_request(self) -> Any:
        return self

    def remote(self) -> None:
        if self._error is not None:
            raise self._error
        self.told += 1


def test_the_first_of_a_burst_is_told_and_the_next_after_a_while() -> None:
    scheduler, now = Scheduler(), [100.0]
    arrivals = ArrivalNotifier(scheduler, lambda: now[0])
    for at in (100.0, 100.001, 100.019, 100.021, 105.0):
        now[0] = at
        arrivals.notify()
    assert scheduler.told == 3


@pytest.mark.parametrize("scheduler", [None, Scheduler(RuntimeError("no such actor"))])
def test_a_scheduler_that_is_not_there_costs_no_request(scheduler: Any) -> None:
    ArrivalNotifier(scheduler, lambda: 0.0).notify()
