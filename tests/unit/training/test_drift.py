"""Drift of live acceptance, and what the schedule makes of it and of canaries."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from paceline.actors.training.drift import Drift, DriftSettings
from paceline.actors.training.topic_schedule import (
    ScheduleSettings,
    TopicView,
    is_ready,
    round_length,
    select_topic,
    topic_priorities,
)
from paceline.actors.training.topic_stats import LiveStats
from paceline.actors.weights.versions import TopicStatus


class Counters:
    """Requests of 20 rounds whose acceptance scatters from one to the next."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.now = (0, 0, 0)

    def serve(self, rate: float) -> tuple[int, int, int]:
        own = float(np.clip(self._rng.normal(rate, 0.15), 0, 1))
        accepted = int(self._rng.binomial(20, own))
        self.now = (self.now[0] + 1, self.now[1] + 20, self.now[2] + accepted)
        return self.now


def fed(drift: Drift, counters: Counters, rate: float, requests: int) -> list[int]:
    """At which of the requests drift began."""
    return [i for i in range(requests) if drift.update(*counters.serve(rate))]


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_is_seen_once_and_soon_and_chance_is_none(seed: int) -> None:
    drift, counters = Drift(DriftSettings()), Counters(seed)
    assert fed(drift, counters, 0.6, 1_000) == []
    began = fed(drift, counters, 0.3, 100)
    assert len(began) == 1
    assert began[0] < 40
    assert drift.drifting
    fed(drift, counters, 0.3, 2_000)
    assert not drift.drifting  # it is the new level
    assert len(fed(drift, counters, 0.05, 100)) == 1


def test_learning_is_no_drift() -> None:
    drift, counters = Drift(DriftSettings()), Counters()
    assert fed(drift, counters, 0.2, 300) == []
    assert fed(drift, counters, 0.7, 1_000) == []


def test_a_few_requests_are_no_drift() -> None:
    drift, counters = Drift(DriftSettings()), Counters()
    fed(drift, counters, 0.9, 4)
    assert fed(drift, counters, 0.1, 40) == []


def test_at_the_edge_the_state_does_not_flicker() -> None:
    settings = DriftSettings(fall=0.2, recovered=0.1, fast=1.0, slow=1e9, min_requests=1)
    drift, total = Drift(settings), itertools.count(1)
    accepted, states = 0, []
    for rate in [1.0] * 50 + [0.7, 0.85, 0.7, 0.85, 0.7, 1.0, 1.0, 1.0]:
        accepted += round(100 * rate)
        number = next(total)
        drift.update(number, 100 * number, accepted)
        states.append(drift.drifting)
    changes = sum(a != b for a, b in itertools.pairwise(states))
    assert changes == 2


def test_counters_that_start_over_are_no_drift() -> None:
    drift, counters = Drift(DriftSettings()), Counters()
    fed(drift, counters, 0.6, 500)
    again = Counters(1)
    assert fed(drift, again, 0.6, 500) == []
    assert drift.status().requests == 999  # all but the first reading


def test_a_fall_before_the_first_reading_is_no_drift() -> None:
    counters = Counters()
    for rate in [0.7] * 5_000 + [0.5] * 3_000:
        before = counters.serve(rate)
    drift = Drift(DriftSettings())
    assert not drift.update(*before)
    assert drift.status().fast is None
    assert fed(drift, counters, 0.5, 100) == []


def test_how_often_one_looks_changes_little() -> None:
    often, seldom, counters = Drift(DriftSettings()), Drift(DriftSettings()), Counters(3)
    for number in range(400):
        now = counters.serve(0.6 if number < 300 else 0.5)
        often.update(*now)
        if number % 10 == 9:
            seldom.update(*now)
    one, other = often.status(), seldom.status()
    assert (one.fast, one.slow) == pytest.approx((other.fast, other.slow), abs=0.03)


def test_live_stats_stay_if_the_registry_does_not_answer() -> None:
    live_stats = LiveStats(("sql", "math"), DriftSettings())
    live = TopicStatus(stable=1, requests=9, rounds=90, accepted=50, canary_requests=2)
    assert live_stats.update({"sql": dataclasses.replace(live, candidate=4)}) == []
    assert live_stats.update(None) == []
    assert live_stats.candidate("sql") == 4
    assert live_stats.undecided("sql")
    assert not live_stats.undecided("math")
    live_stats.update({"sql": dataclasses.replace(live, candidate=5, canary_requests=0)})
    assert not live_stats.undecided("sql")  # nothing would be thrown away
    earlier = dataclasses.replace(live, candidate=6, canary_requests=0, restored_from=2)
    live_stats.update({"sql": earlier})
    assert live_stats.undecided("sql")  # it would not be started again


def view(**changes: object) -> TopicView:
    base = TopicView("sql", 100, 20, new_records=0, traffic=10.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_a_plateau_ends_by_drift_much_traffic_or_maintenance() -> None:
    settings = ScheduleSettings()
    plateau = view(rejections=3, fruitless=3, new_records=settings.min_new)
    assert not is_ready(plateau, settings)
    assert is_ready(dataclasses.replace(plateau, drifting=True), settings)
    assert is_ready(dataclasses.replace(plateau, new_records=25), settings)
    assert is_ready(dataclasses.replace(plateau, waited_s=settings.maintenance_s), settings)
    # with nothing new at all
    assert not is_ready(view(rejections=3, fruitless=3, waited_s=1e6), settings)


def test_a_topic_on_trial_is_trained_with_new_records_only() -> None:
    settings = ScheduleSettings()
    assert not is_ready(view(undecided=True), settings)
    assert is_ready(view(undecided=True, new_records=settings.min_new), settings)
    assert is_ready(view(), settings)


def test_a_drifting_topic_comes_first() -> None:
    lost = dataclasses.replace(view(drifting=True, acceptance=0.5), name="code")
    assert select_topic(topic_priorities([view(acceptance=0.5), lost])) == "code"


def test_rounds_are_shorter_under_load_and_in_drift() -> None:
    settings = ScheduleSettings()

    def length(permit: float, *, drifting: bool = False) -> float:
        return round_length(8.0, permit, 45.0, drifting=drifting, settings=settings)

    assert length(1.0) == 8.0
    assert length(1.0, drifting=True) == 4.0
    assert length(0.1) == pytest.approx(4.5)  # ends within its wall time
    assert length(0.0) == 2.0
    lengths = [length(permit / 20) for permit in range(21)]
    assert lengths == sorted(lengths)
