"""What shards say of their topics, as the schedule counts it."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_client import Ticks, trainer_settings
from replay_samples import make_record

from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.topic_stats import LiveStats, TopicStats, requests
from paceline.actors.weights.versions import TopicStatus


@pytest.mark.parametrize("left_out", [0, 5])
def test_requests_that_left_no_record_are_traffic_all_the_same(left_out: int) -> None:
    shard = ReplayShard("sql", clock=lambda: 0.0)
    shard.insert(encode(make_record(request_id="a", created=0.0)))
    shard.insert(encode(make_record(request_id="b", created=0.0)), left_out)
    assert requests(shard.stats()) == 2 + left_out
    assert shard.stats().inserted_total == 2


def test_records_that_a_restarted_shard_has_from_disk_are_no_traffic(tmp_path: Path) -> None:
    topics = TopicStats(trainer_settings(tmp_path), Ticks())
    first = ReplayShard("sql", persist_dir=str(tmp_path), clock=lambda: 0.0)
    for number in range(5):
        first.insert(encode(make_record(request_id=str(number), created=0.0)))
    first.delete("0")  # fewer come back than were counted
    stats = {"sql": first.stats()}
    topics.views(stats, {})
    topics.state("sql").inserted = topics.inserted("sql", stats)

    again = ReplayShard("sql", persist_dir=str(tmp_path), clock=lambda: 0.0).stats()
    sql = next(view for view in topics.views({"sql": again}, {}) if view.name == "sql")
    assert again.records("train", "held_out") == 4
    assert (sql.new_records, sql.traffic) == (0, 0.0)


def test_a_silent_shard_has_not_started_again() -> None:
    topics = TopicStats(trainer_settings(Path()), Ticks())
    shards = {name: ReplayShard(name, clock=lambda: 0.0) for name in ("general", "sql")}
    for number in range(4):
        shards["sql"].insert(encode(make_record(request_id=str(number), created=0.0)))
    for number in range(3):
        shards["general"].insert(encode(make_record(request_id=str(number), created=0.0)))
    every = {name: shard.stats() for name, shard in shards.items()}
    general = topics.state("general")
    general.inserted = topics.inserted("general", every)

    def new_records(topic: str, *answered: str) -> int:
        views = topics.views({name: every[name] for name in answered}, {})
        return next(view.new_records for view in views if view.name == topic)

    assert general.inserted == 7
    assert new_records("general", "general") == 0
    assert new_records("general", "general", "sql") == 0
    assert new_records("sql", "general") == 4
    every["sql"] = ReplayShard("sql", clock=lambda: 0.0).stats()  # this one has
    assert new_records("sql", "sql") == 0


def test_a_version_that_was_just_published_is_current_until_the_registry_says_otherwise() -> None:
    live = LiveStats()
    assert live.is_current("sql", 7)  # nothing is known
    live.update({"sql": TopicStatus()})
    live.published("sql", 1)
    assert not live.rolled_back("sql", 1)
    assert live.is_current("sql", 1)
    assert live.is_current("sql", 0)
    assert not live.undecided("sql")
    live.update({"sql": TopicStatus()})
    assert not live.is_current("sql", 1)
    assert live.rolled_back("sql", 1)
    live.update({"sql": TopicStatus(stable=2)})  # the weights of version 0 again
    assert not live.is_current("sql", 1)
    assert not live.is_current("sql", 0)
    assert not live.rolled_back("sql", 1)
