"""What the schedule makes of drift and of canaries."""

from __future__ import annotations

import dataclasses

import pytest

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


def test_live_stats_stay_if_the_registry_does_not_answer() -> None:
    live_stats = LiveStats()
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
