"""The replay table and the shard around it."""

from __future__ import annotations

import dataclasses
import gc
import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from replay_samples import make_record

from paceline.actors.replay.buffer import ReplayBuffer, ReplaySettings
from paceline.actors.replay.record import decode, encode, is_held_out, prompt_digest
from paceline.actors.replay.shard import Journal, ReplayShard
from paceline.actors.replay.table import EncodedRecord, reservoir_key


class Clock:
    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def fill(shard: ReplayShard, count: int, *, start: int = 0, created: float = 1_000.0) -> None:
    for n in range(start, start + count):
        record = make_record(request_id=f"r{n}", prompt=(n, n + 1), created=created)
        shard.insert(encode(record))


def ids(records: list[bytes]) -> set[str]:
    return {decode(data).request_id for data in records}


def test_splits_by_prompt_and_counts() -> None:
    shard = ReplayShard("sql", ReplaySettings(held_out_fraction=0.25), clock=Clock())
    fill(shard, 200)
    stats = shard.stats()
    expected = sum(is_held_out(prompt_digest((n, n + 1)), 0.25) for n in range(200))
    assert stats.records("held_out") == expected
    assert stats.records("train") == 200 - expected
    assert stats.inserted_total == 200
    held = shard.sample(1_000, "held_out")
    assert all(is_held_out(decode(data).conversation, 0.25) for data in held)
    assert not ids(held) & ids(shard.sample(1_000, "train"))


def test_samples_are_distinct_and_bounded() -> None:
    shard = ReplayShard("sql", ReplaySettings(held_out_fraction=0.0), seed=1, clock=Clock())
    fill(shard, 50)
    assert len(shard.sample(8, "train")) == len(ids(shard.sample(8, "train"))) == 8
    assert len(ids(shard.sample(500, "train"))) == 50
    assert shard.sample(8, "held_out") == []


def test_recent_records_are_favoured_and_old_ones_still_come() -> None:
    settings = ReplaySettings(held_out_fraction=0.0, recent_half_life=10.0)
    shard = ReplayShard("sql", settings, seed=1, clock=Clock())
    fill(shard, 200)
    drawn = [int(decode(shard.sample(1, "train")[0]).request_id[1:]) for _ in range(400)]
    assert np.mean([n >= 180 for n in drawn]) > 0.35
    assert np.mean([n < 100 for n in drawn]) > 0.15


@pytest.mark.parametrize("remover", ["fifo", "reservoir", "priority"])
def test_capacity_in_bytes_holds(remover: str) -> None:
    size = len(encode(make_record(request_id="r00", prompt=(1, 2))))
    settings = ReplaySettings(
        capacity_bytes=20 * size,
        held_out_fraction=0.0,
        remover=remover,  # type: ignore[arg-type]
    )
    shard = ReplayShard("sql", settings, seed=3, clock=Clock())
    fill(shard, 300)
    kept = {int(name[1:]) for name in ids(shard.sample(1_000, "train"))}
    assert 15 <= len(kept) <= 20
    assert shard.stats().bytes <= 20 * size
    if remover != "reservoir":  # by priority too: of records without losses
        assert min(kept) >= 280
    else:
        assert min(kept) < 150


def reservoir(tmp_path: Path | None, size: int, clock: Clock) -> ReplayShard:
    settings = ReplaySettings(
        capacity_bytes=size, retention_s=1_000.0, held_out_fraction=0.0, remover="reservoir"
    )
    folder = None if tmp_path is None else str(tmp_path)
    return ReplayShard("sql", settings, clock=clock, persist_dir=folder)


def test_a_reservoir_stays_uniform_through_expiry_and_a_restart(tmp_path: Path) -> None:
    """Of 400 records the first 200 expire: half of what is kept is of either hundred then."""
    size, clock = len(encode(make_record(request_id="r00", prompt=(1, 2)))), Clock()
    ages = []
    for run in range(10):
        clock.now = 0.0
        folder = tmp_path / str(run)
        shard = reservoir(folder, 40 * size, clock)
        for number in range(400):
            clock.now = 5.0 * number
            if number == 350:
                shard = reservoir(folder, 40 * size, clock)
            name = f"run{run}-{number}"
            record = make_record(request_id=name, prompt=(1, 2), created=clock.now)
            shard.insert(encode(record))
        kept = ids(shard.sample(1_000, "train"))
        assert 20 <= len(kept) <= 40
        ages += [int(name.partition("-")[2]) for name in kept]
    assert min(ages) >= 199
    assert abs(np.mean(ages) - 300) < 10  # a deviation of the mean is 3
    quarters = np.histogram(ages, bins=[199, 250, 300, 350, 400])[0] / len(ages)
    assert np.all(np.abs(quarters - 0.25) < 0.08)


def test_what_a_reservoir_does_not_keep_is_not_written(tmp_path: Path) -> None:
    size, clock = len(encode(make_record(request_id="r00", prompt=(1, 2)))), Clock()
    shard = reservoir(tmp_path, 20 * size, clock)
    fill(shard, 300)
    kept = ids(shard.sample(1_000, "train"))
    written = Journal(tmp_path / "sql.records")
    names = {decode(data).request_id for data in written.read()}
    assert kept <= names
    keys = sorted(reservoir_key(f"r{n}") for n in range(300))
    best = {n for n in names if reservoir_key(n) >= keys[-20]}
    assert len(best) >= 18
    assert len(names) < 150  # of 300: what was the best so far when it came


def test_records_past_retention_are_dropped() -> None:
    clock = Clock()
    shard = ReplayShard("sql", ReplaySettings(retention_s=60.0, held_out_fraction=0.0), clock=clock)
    fill(shard, 5)
    fill(shard, 5, start=5, created=1_050.0)
    clock.now = 1_070.0
    assert ids(shard.sample(100, "train")) == {f"r{n}" for n in range(5, 10)}
    clock.now = 2_000.0
    assert shard.stats().records("train") == 0


def test_retention_acts_on_insert_alone() -> None:
    settings = ReplaySettings(retention_s=60.0, held_out_fraction=0.0)
    table = ReplayBuffer(settings)
    for n, created in enumerate([5.0, 0.0, 50.0]):
        assert table.insert(EncodedRecord(f"r{n}", created, b"x"), "train", 50.0)
    assert table.insert(EncodedRecord("new", 63.0, b"x"), "train", 63.0)
    assert [entry.request_id for entry in table.records()] == ["r0", "r2", "new"]
    assert table.insert(EncodedRecord("newer", 111.0, b"x"), "train", 111.0)
    assert [entry.request_id for entry in table.records()] == ["new", "newer"]
    assert not table.insert(EncodedRecord("late", 50.0, b"x"), "train", 111.0)


@contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """Let writes beyond so many bytes of a file fail."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    try:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_an_append_that_fails_hides_nothing_that_is_appended_later(tmp_path: Path) -> None:
    journal, records = Journal(tmp_path / "sql.records"), [bytes([n]) * 50_000 for n in range(4)]
    journal.append(records[0])
    with full_disk(70_000), pytest.raises(OSError, match="too large"):
        journal.append(records[1])
    for data in records[2:]:
        journal.append(data)
    assert list(journal.read()) == [records[0], *records[2:]]
    assert journal.size == (tmp_path / "sql.records").stat().st_size


def on_disk(folder: Path) -> set[str]:
    return ids(list(Journal(folder / "sql.records").read()))


@pytest.mark.parametrize("trigger", ["insert", "expire"])
def test_the_file_keeps_nothing_beyond_retention_and_slack(tmp_path: Path, trigger: str) -> None:
    clock = Clock()
    settings = ReplaySettings(retention_s=1_000.0, held_out_fraction=0.0)
    assert settings.disk_slack_s == 20.0
    shard = ReplayShard("sql", settings, str(tmp_path), clock=clock)
    fill(shard, 5)
    fill(shard, 5, start=5, created=1_500.0)
    clock.now = 2_005.0  # past retention, within the slack: the file is not rewritten each time
    shard.expire()
    assert shard.stats().records("train") == 5
    assert len(on_disk(tmp_path)) == 10
    clock.now = 2_011.0
    if trigger == "insert":
        fill(shard, 1, start=10, created=2_011.0)
    else:
        shard.expire()
    assert on_disk(tmp_path) == {f"r{n}" for n in range(5, 11 if trigger == "insert" else 10)}


@pytest.mark.parametrize("trigger", ["purge", "expiry", "start"])
def test_a_full_disk_keeps_nothing_that_was_removed(tmp_path: Path, trigger: str) -> None:
    clock = Clock()
    settings = ReplaySettings(retention_s=1_000.0, held_out_fraction=0.0)
    shard = ReplayShard("sql", settings, str(tmp_path), clock=clock)
    fill(shard, 5)
    fill(shard, 5, start=5, created=1_500.0)
    gone = {"r7"} if trigger == "purge" else {f"r{n}" for n in range(5)}
    kept = {f"r{n}" for n in range(10)} - gone
    with full_disk((tmp_path / "sql.records").stat().st_size // 4):
        if trigger == "purge":
            assert shard.delete("r7") == 1
        else:
            clock.now = 2_011.0
        if trigger == "expiry":
            shard.expire()
        elif trigger == "start":
            shard = ReplayShard("sql", settings, str(tmp_path), clock=clock)
    assert [path.name for path in tmp_path.iterdir()] == ["sql.records"]
    assert ids(shard.sample(100, "train")) == kept
    assert on_disk(tmp_path) < kept
    shard.delete("gone")  # writes again what did not fit
    assert on_disk(tmp_path) == kept


def test_a_removal_that_failed_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = ReplayShard("sql", ReplaySettings(), str(tmp_path), clock=Clock())
    fill(shard, 4)

    def fail(*_: object) -> None:
        raise OSError("input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "rewrite", fail)
        with pytest.raises(OSError, match="input/output"):
            shard.delete("r2")
    shard.expire()
    assert on_disk(tmp_path) == {"r0", "r1", "r3"}


def test_a_quiet_shard_drops_what_is_past_retention_by_itself(tmp_path: Path) -> None:
    settings = ReplaySettings(retention_s=1.0, held_out_fraction=0.0)
    shard = ReplayShard("sql", settings, str(tmp_path))
    fill(shard, 3, created=time.time())
    assert len(on_disk(tmp_path)) == 3
    deadline = time.monotonic() + 20.0
    while (tmp_path / "sql.records").stat().st_size > 0:
        assert time.monotonic() < deadline, "expired records were not removed"
        time.sleep(0.01)
    assert shard.stats().records("train") == 0


def test_the_expiry_thread_ends_with_its_shard() -> None:
    before = set(threading.enumerate())
    shard: ReplayShard | None = ReplayShard("sql", ReplaySettings())
    started = set(threading.enumerate()) - before
    (own,) = [thread for thread in started if thread.name == "paceline-expiry"]
    assert shard is not None
    del shard
    gc.collect()
    own.join(10.0)
    assert not own.is_alive(), "the thread outlived its shard"


def test_deleted_records_are_removed_from_the_file_at_once(tmp_path: Path) -> None:
    shard = ReplayShard("sql", ReplaySettings(), str(tmp_path), clock=Clock())
    fill(shard, 4)
    assert shard.delete("r2") == 1
    assert on_disk(tmp_path) == {"r0", "r1", "r3"}
    assert shard.delete(None) == 3
    assert (tmp_path / "sql.records").stat().st_size == 0


def test_a_rewriting_that_was_killed_leaves_no_records_behind(tmp_path: Path) -> None:
    (tmp_path / ".sql.records.partial").write_bytes(b"records of yesterday")
    ReplayShard("sql", ReplaySettings(), str(tmp_path), clock=Clock())
    assert [path.name for path in tmp_path.iterdir()] == ["sql.records"]


def test_delete_one_request_or_everything() -> None:
    shard = ReplayShard("sql", ReplaySettings(held_out_fraction=0.3), clock=Clock())
    fill(shard, 30)
    assert shard.delete("r7") == 1
    assert shard.delete("r7") == 0
    assert "r7" not in ids(shard.sample(100, "train") + shard.sample(100, "held_out"))
    assert shard.delete(None) == 29
    assert shard.stats().bytes == 0


def test_garbage_is_counted_and_dropped() -> None:
    shard = ReplayShard("sql", clock=Clock())
    shard.insert(b"nonsense")
    assert shard.stats().refused_total == 1
    assert shard.stats().inserted_total == 0


def test_records_with_impossible_numbers_are_counted_apart() -> None:
    shard = ReplayShard("sql", clock=Clock())
    record = make_record(temperature=0.7)
    assert record.processed_top_probs is not None
    broken = np.full_like(record.processed_top_probs, np.nan)
    shard.insert(encode(dataclasses.replace(record, processed_top_probs=broken)))
    shard.insert(b"nonsense")
    stats = shard.stats()
    assert (stats.refused_total, stats.refused_values_total) == (2, 1)
    assert stats.inserted_total == 0


def test_a_persistent_shard_comes_back_without_what_was_deleted(tmp_path: Path) -> None:
    settings = ReplaySettings(held_out_fraction=0.2)
    first = ReplayShard("sql", settings, str(tmp_path), clock=Clock())
    fill(first, 20)
    first.delete("r3")
    second = ReplayShard("sql", settings, str(tmp_path), clock=Clock())
    kept = dataclasses.replace(first.stats(), inserted_total=0, purges_total=0)
    assert second.stats() == kept
    with (tmp_path / "sql.records").open("ab") as file:
        file.write(b"\xff\x00\x00\x00torn")
    third = ReplayShard("sql", settings, str(tmp_path), clock=Clock())
    fill(third, 1, start=20)
    fourth = ReplayShard("sql", settings, str(tmp_path), clock=Clock())
    assert (fourth.stats().records("train", "held_out"), fourth.stats().inserted_total) == (20, 0)


def test_the_file_of_a_persistent_shard_stays_bounded(tmp_path: Path) -> None:
    size = len(encode(make_record(request_id="r00", prompt=(1, 2))))
    settings = ReplaySettings(capacity_bytes=10 * size, held_out_fraction=0.0)
    shard = ReplayShard("sql", settings, str(tmp_path), clock=Clock())
    fill(shard, 100)
    assert (tmp_path / "sql.records").stat().st_size <= 21 * (size + 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remover": "lifo"},
        {"sampler": "best"},
        {"priority_exponent": -1.0},
        {"held_out_fraction": 1.5},
        {"capacity_bytes": 0},
        {"retention_s": 0.0},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ReplaySettings(**wrong)  # type: ignore[arg-type]
