"""The actor that holds shards, and the handles of its shards."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from replay_samples import make_record

from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.host import ShardHost, host_of, shard_of
from paceline.actors.replay.record import decode, encode

TOPICS = ("general", "code", "math", "shell", "sql")
SETTINGS = ReplaySettings(held_out_fraction=0.0)


@dataclass
class Local:
    """Handle of a host in this process: results instead of references."""

    host: ShardHost

    @property
    def call(self) -> Any:
        return self

    def remote(self, *arguments: Any, **named: Any) -> Any:
        return self.host.call(*arguments, **named)


def hosts(count: int, folder: Path | None = None) -> list[Any]:
    given = count, TOPICS, SETTINGS, str(folder)
    persist = folder is not None
    return [Local(ShardHost(index, *given, persist=persist)) for index in range(count)]


def held(found: Sequence[Any]) -> list[list[str]]:
    return [[stats.topic for stats in local.host.stats()] for local in found]


def record(name: str, **more: Any) -> bytes:
    return encode(make_record(request_id=name, created=time.time(), **more))


def test_a_topic_is_in_one_host() -> None:
    assert held(hosts(1)) == [list(TOPICS)]
    several = held(hosts(3))
    assert sorted(topic for own in several for topic in own) == sorted(TOPICS)
    assert all(host_of(topic, 3) == at for at, own in enumerate(several) for topic in own)


def test_shards_of_a_host_keep_apart_what_they_hold() -> None:
    found = hosts(2)
    for topic in TOPICS:
        shard_of(topic, found).insert.remote(record(topic, topic=topic), 3)
    assert copy.copy(shard_of("sql", found)).stats.remote().topic == "sql"
    for topic in TOPICS:
        shard = shard_of(topic, found)
        assert [decode(data).topic for data in shard.sample.remote(9, split="train")] == [topic]
        stats: Any = shard.stats.remote()
        assert (stats.topic, stats.inserted_total, stats.left_out_total) == (topic, 1, 3)
    assert shard_of("sql", found).delete.remote(None) == 1
    left = {stats.topic: stats.records("train") for local in found for stats in local.host.stats()}
    assert left == dict.fromkeys(TOPICS, 1) | {"sql": 0}


def test_a_new_topic_s_shard_is_there_when_it_is_called_and_after_a_death(tmp_path: Path) -> None:
    found = hosts(2, tmp_path)
    shard_of("acme.travel", found).insert.remote(record("a"))
    assert held(found)[host_of("acme.travel", 2)][-1] == "acme.travel"
    again = hosts(2, tmp_path)  # it has to expire there if nothing calls it any more
    assert [own.count("acme.travel") for own in held(again)] == [
        int(host_of("acme.travel", 2) == at) for at in range(2)
    ]
    assert [local.host.topics() for local in again] == held(again)
    (data,) = shard_of("acme.travel", again).sample.remote(1, "train")
    assert decode(data).request_id == "a"


def test_an_unreadable_file_stops_its_own_topic_alone(tmp_path: Path) -> None:
    (tmp_path / "travel.records").mkdir()  # of a topic that is configured no more
    assert held(hosts(1, tmp_path)) == [list(TOPICS)]
    (tmp_path / "sql.records").unlink()
    (tmp_path / "sql.records").mkdir()
    with pytest.raises(IsADirectoryError):
        hosts(1, tmp_path)


def test_without_persist_what_was_kept_on_disk_is_removed(tmp_path: Path) -> None:
    shard_of("sql", hosts(1, tmp_path)).insert.remote(record("a"))
    (tmp_path / ".travel.records.partial").write_bytes(record("b"))  # of a host that was killed
    (tmp_path / "notes.txt").write_text("somebody's")
    host = ShardHost(0, 1, TOPICS, SETTINGS, str(tmp_path), persist=False)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    assert host.topics() == list(TOPICS)
    assert not sum(stats.records("train") for stats in host.stats())


def test_records_on_disk_are_their_owner_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "replay"
    shard = shard_of("sql", hosts(1, folder))
    for name in ("a", "b"):
        shard.insert.remote(record(name))
    private = [path.stat().st_mode & 0o077 == 0 for path in (folder, *folder.iterdir())]
    shard.delete.remote("a")  # writes the file anew
    private += [path.stat().st_mode & 0o077 == 0 for path in folder.iterdir()]
    assert private == [True] * len(private)
    assert len(private) > 2
