"""Purges, and what arrives after them."""

from __future__ import annotations

import pytest
from replay_samples import make_record

from paceline.actors.replay import purges as module
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.purges import Purges
from paceline.actors.replay.record import belongs, encode, synthetic_id
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.read_records import ReadRecords

HOUR_S = 3600.0


class Clock:
    now = 10_000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("answer", "topic", "record", "created", "covered"),
    [
        ("a", None, "a", 9_999.0, True),
        ("a", None, "a", 10_001.0, True),  # it was running
        ("a", None, "a-1", 9_999.0, True),
        ("a", None, synthetic_id("a-1", "m"), 9_999.0, True),
        ("a-1", None, "a-1", 9_999.0, True),
        (synthetic_id("a-1", "m"), None, synthetic_id("a-1", "m"), 9_999.0, True),
        ("a", None, "a-b", 9_999.0, False),
        ("a", None, "b", 9_999.0, False),
        ("a", "code", "a", 9_999.0, False),
        (None, None, "a", 10_000.0, True),
        (None, "sql", "a", 9_999.0, True),
        (None, "code", "a", 9_999.0, False),
        (None, None, "a", 10_002.0, True),  # by a clock that is ahead
        (None, "sql", "a", 10_002.0, True),
        (None, None, "a", 10_005.1, False),
    ],
)
def test_what_a_purge_covers(
    answer: str | None, topic: str | None, record: str, created: float, covered: bool
) -> None:
    clock = Clock()
    purges = Purges(clock)
    assert not purges.cover(record, "sql", created)
    purges.add(answer, topic)
    assert purges.cover(record, "sql", created) == covered
    clock.now += HOUR_S + 1.0
    purges.add("other")
    assert not purges.cover(record, "sql", created)


def test_a_record_is_compared_with_few_of_many_purges(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[str | None]()

    def compare(record: str, answer: str | None) -> bool:
        compared.append(answer)
        return belongs(record, answer)

    monkeypatch.setattr(module, "belongs", compare)
    purges = Purges(Clock())
    for number in range(100):
        purges.add(f"a{number}", "sql")
    assert purges.cover("a7-0", "sql", 9_999.0)
    assert not purges.cover("b-0", "sql", 9_999.0)
    assert compared == ["a7"]


def test_a_record_that_comes_after_its_purge_is_not_kept() -> None:
    clock = Clock()
    settings = ReplaySettings(held_out_fraction=0.0, retention_s=HOUR_S)
    shard = ReplayShard("sql", settings, clock=clock)

    def insert(name: str, created: float) -> None:
        shard.insert(encode(make_record(request_id=name, created=created)))

    insert("a", clock.now - 2.0)
    assert shard.delete(None) == 1
    insert("b", clock.now - 1.0)  # of a replica that was stopping
    assert shard.stats().records("train") == 0
    insert("c", clock.now + 2.0)  # of a host whose clock is ahead
    assert shard.stats().records("train") == 0
    insert("d", clock.now + 6.0)
    assert shard.stats().records("train") == 1


@pytest.mark.parametrize(
    ("purged", "ends"), [("a", True), ("c", True), ("b", False), ("other", False)]
)
def test_a_round_ends_if_a_record_was_purged_that_it_may_have_read(purged: str, ends: bool) -> None:
    size = len(encode(make_record(request_id="a-0")))
    settings = ReplaySettings(held_out_fraction=0.0, capacity_bytes=size)
    shard = ReplayShard("sql", settings, clock=Clock())
    read = ReadRecords({"sql": shard.stats()})
    for name in ("a", "b", "c"):  # each evicts the one before
        shard.insert(encode(make_record(request_id=f"{name}-0", created=9_999.0)))
        if name == "a":
            assert len(shard.sample(1, "train")) == 1
    shard.delete(purged)
    assert read.update({"sql": shard.stats()}) == ends


def test_copies_of_records_are_usable_until_retention_and_the_next_purge() -> None:
    clock = Clock()
    shard = ReplayShard("sql", ReplaySettings(retention_s=HOUR_S), clock=clock)
    read = ReadRecords({"sql": shard.stats()})
    clock.now += 60.0
    assert not read.update({"sql": shard.stats(), "code": shard.stats()})
    assert read.usable_from == clock.now - HOUR_S
    assert not read.update({})  # no shard answers
    assert shard.delete("elsewhere") == 0
    assert not read.update({"sql": shard.stats()})
    assert shard.delete(None) == 0
    assert read.update({"sql": shard.stats()})
    assert not ReadRecords({"sql": shard.stats()}).update({"sql": shard.stats()})
    assert not ReadRecords({}).update({"sql": shard.stats()})
