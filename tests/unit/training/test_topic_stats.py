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
    settings = trainer_settings(tmp_path, ("math", "sql", "general"))
    topics, later = TopicStats(settings, Ticks()), TopicStats(settings, Ticks())
    math = ReplayShard("math", clock=lambda: 0.0)
    first = ReplayShard("sql", persist_dir=str(tmp_path), clock=lambda: 0.0)
    insert(math, range(9))
    insert(first, range(5))
    first.delete("0")  # fewer come back than were counted
    stats = {"math": math.stats(), "sql": first.stats()}
    topics.views(stats, {})
    for topic in settings.draft_paths:
        topics.state(topic).inserted = topics.inserted(topic, stats)
    # another trainer, which never saw the first shard
    later.update_progress({topic: topics.progress(topic, None) for topic in settings.draft_paths})

    again = ReplayShard("sql", persist_dir=str(tmp_path), clock=lambda: 1.0)
    assert again.stats().records("train", "held_out") == 4
    for new in (0, 6):  # fewer, and more, than the first shard had counted
        insert(again, range(100, 100 + new))
        stats["sql"] = again.stats()
        for trainer in (topics, later):
            views = {view.name: view for view in trainer.views(stats, {})}
            found = {name: view.new_records for name, view in views.items()}
            assert found == {"math": 0, "sql": new, "general": new}
            assert views["sql"].traffic == new


def insert(shard: ReplayShard, numbers: range) -> None:
    for number in numbers:
        shard.insert(encode(make_record(request_id=str(number), created=0.0)))


def test_a_silent_shard_has_not_started_again() -> None:
    topics = TopicStats(trainer_settings(Path()), Ticks())
    shards = {name: ReplayShard(name, clock=lambda: 0.0) for name in ("general", "sql")}
    insert(shards["sql"], range(4))
    insert(shards["general"], range(3))
    every = {name: shard.stats() for name, shard in shards.items()}
    general = topics.state("general")
    general.inserted = topics.inserted("general", every)

    def new_records(topic: str, *answered: str) -> int:
        views = topics.views({name: every[name] for name in answered}, {})
        return next(view.new_records for view in views if view.name == topic)

    assert sum(general.inserted.values()) == 7
    assert new_records("general", "general") == 0
    assert new_records("general", "general", "sql") == 0
    assert new_records("sql", "general") == 4
    every["sql"] = ReplayShard("sql", clock=lambda: 1.0).stats()  # this one has
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
