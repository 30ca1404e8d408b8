"""A reservoir whose traffic changes its rate: what is uniform, when, and what has the room."""

from __future__ import annotations

from collections import Counter

from paceline.actors.replay.buffer import ReplayBuffer, ReplaySettings
from paceline.actors.replay.table import EncodedRecord, reservoir_key

HOUR, DAY = 3600.0, 24 * 3600.0
RECORD, ROOM = 10, 400  # bytes of a record, records that fit
QUIET, BURST = 50, 2_000  # records an hour
BURSTS = range(24, 28)  # hours
RUNS = 5


def reservoir(records: int, **changes: float) -> ReplayBuffer:
    capacity = RECORD * records
    settings = ReplaySettings(capacity, DAY, "reservoir", held_out_fraction=0.0, **changes)
    return ReplayBuffer(settings)


def kept_by_hour(run: int, at: set[int]) -> dict[int, Counter[int]]:
    """Quiet days with a burst: by these hours' ends, how many records of which hour are kept."""
    table, found = reservoir(ROOM), {}
    for hour in range(max(at) + 1):
        count = BURST if hour in BURSTS else QUIET
        for number in range(count):
            now = (hour + number / count) * HOUR
            entry = EncodedRecord(f"{run}-{hour}-{number}", now, bytes(RECORD))
            table.insert(entry, "train", now)
        if hour in at:
            hours = Counter(int(entry.created // HOUR) for entry in table.records())
            assert min(hours) >= hour - 24
            found[hour] = hours
    return found


def test_a_burst_has_its_share_and_later_records_fill_its_space_when_it_expires() -> None:
    runs = [kept_by_hour(run, {38, 56, 76}) for run in range(RUNS)]

    def kept(at: int, hours: range) -> float:
        return sum(run[at][hour] for run in runs for hour in hours) / RUNS

    # The burst is there: 8,000 of the 9,000 within retention, and 8 of 9 of what is kept.
    assert kept(38, range(14, 39)) == ROOM
    assert abs(kept(38, BURSTS) / ROOM - 8 / 9) < 0.05
    quiet = kept(38, range(14, 24)), kept(38, range(29, 39))
    assert abs(quiet[0] - quiet[1]) < 12  # the same hours of quiet before and behind it
    # It is gone, and with it nearly all that had been kept; what comes needs no high key.
    assert kept(56, range(52, 57)) > 0.4 * ROOM
    assert kept(56, range(32, 57)) > 0.6 * ROOM
    # A retention later nothing is left of it: each six hours have a quarter again.
    for first in range(53, 77, 6):
        assert abs(kept(76, range(first, first + 6)) / kept(76, range(53, 77)) - 0.25) < 0.06
    assert kept(76, range(53, 77)) > 0.95 * ROOM


def test_synthetic_records_make_way_by_key_and_not_by_age() -> None:
    table = reservoir(40, synthetic_per_record=4.0)
    for number in range(40):
        table.insert(EncodedRecord(f"i{number}", 0.0, bytes(RECORD)), "synthetic", 0.0)
    for number in range(25):  # records of the traffic, which want the room
        table.insert(EncodedRecord(f"r{number}", 0.0, bytes(RECORD)), "train", 0.0)
    kept = {record.request_id for record in table.records() if record.request_id.startswith("i")}
    best = sorted((f"i{number}" for number in range(40)), key=reservoir_key)[-15:]
    assert kept == set(best)
    assert table.stats(0.0).evicted_total == 25


def test_synthetic_records_make_way_by_what_was_learnt_of_them() -> None:
    settings = ReplaySettings(100, DAY, "priority", held_out_fraction=0.0, synthetic_per_record=4.0)
    table = ReplayBuffer(settings)
    for number in range(10):
        table.insert(EncodedRecord(f"i{number}", 0.0, bytes(RECORD)), "synthetic", 0.0)
    table.update_losses({f"i{number}": float(number % 5) for number in range(10)})
    for number in range(4):
        table.insert(EncodedRecord(f"r{number}", 0.0, bytes(RECORD)), "train", 0.0)
    kept = {record.request_id for record in table.records() if record.request_id.startswith("i")}
    assert kept == {"i2", "i3", "i4", "i7", "i8", "i9"}


def test_a_synthetic_record_that_was_not_kept_does_not_count_as_inserted() -> None:
    buffer = ReplayBuffer(
        ReplaySettings(10 * RECORD + 5, DAY, held_out_fraction=0.0, synthetic_per_record=1.0)
    )
    for number in range(12):
        buffer.insert(EncodedRecord(f"r{number}", 0.0, bytes(RECORD)), "train", 0.0)
    assert not buffer.insert(EncodedRecord("i", 0.0, bytes(RECORD)), "synthetic", 0.0)
    stats = buffer.stats(0.0)
    assert (stats.inserted_total, stats.inserted_synthetic_total) == (12, 0)
    buffer.delete("r11")
    assert buffer.insert(EncodedRecord("i", 0.0, bytes(RECORD)), "synthetic", 0.0)
    stats = buffer.stats(0.0)
    assert (stats.inserted_total, stats.inserted_synthetic_total) == (13, 1)
