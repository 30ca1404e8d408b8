"""Replay by priority: what is drawn and dropped follows the loss that a trainer saw."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_samples import make_record

from paceline.actors.replay.buffer import ReplayBuffer, ReplaySettings
from paceline.actors.replay.record import decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.replay.table import EncodedRecord, Table, priority_weights

amounts = st.floats(0.0, 1e6) | st.just(math.inf)


def table(**changes: object) -> ReplayBuffer:
    return ReplayBuffer(ReplaySettings(held_out_fraction=0.5, sampler="priority", **changes))  # type: ignore[arg-type]


def fill(target: ReplayBuffer, count: int, *, split: str = "train", size: int = 1) -> None:
    for n in range(count):
        target.insert(EncodedRecord(f"r{n}", 0.0, f"r{n}".encode().ljust(size)), split, 0.0)  # type: ignore[arg-type]


def drawn(target: ReplayBuffer, draws: int, split: str = "train") -> dict[str, float]:
    rng = np.random.default_rng(1)
    names = [target.sample(1, split, 0.0, rng)[0].data.decode().strip() for _ in range(draws)]  # type: ignore[arg-type]
    return {name: names.count(name) / draws for name in set(names)}


def kept(target: ReplayBuffer) -> list[str]:
    return [record.request_id for record in target.records()]


@settings(max_examples=60, deadline=None)
@given(st.lists(amounts, min_size=1, max_size=30), st.floats(0.0, 0.9), st.floats(0.0, 2.0))
def test_weights_follow_the_loss_and_nothing_starves(
    losses: list[float], share: float, exponent: float
) -> None:
    values = np.array(losses)
    weights = priority_weights(values, share, exponent)
    assert weights.sum() == pytest.approx(1.0)
    assert (weights >= (1.0 - share) / len(values) * (1.0 - 1e-9)).all()
    order = np.argsort(values)
    assert (np.diff(weights[order]) >= -1e-12).all()


def test_weights_are_the_loss_to_the_power_where_nothing_is_uniform() -> None:
    weights = priority_weights(np.array([1.0, 4.0, math.inf]), 1.0, 0.5)
    assert weights.tolist() == pytest.approx([0.2, 0.4, 0.4])
    # without a spread, or a loss at all, there is no order
    assert priority_weights(np.zeros(4), 0.9, 0.6).tolist() == pytest.approx([0.25] * 4)
    assert priority_weights(np.full(2, math.inf), 1.0, 0.6).tolist() == pytest.approx([0.5, 0.5])
    assert len(priority_weights(np.zeros(0), 0.5, 0.6)) == 0


def test_even_without_a_uniform_part_all_records_can_be_drawn_at_once() -> None:
    every = table(recent_share=1.0)
    fill(every, 5)
    every.update_losses({f"r{n}": 0.0 for n in range(4)})
    assert len(every.sample(5, "train", 0.0, np.random.default_rng(0))) == 5


def test_a_sample_favours_high_losses_and_records_without_a_loss() -> None:
    every = table(recent_share=0.8, priority_exponent=1.0)
    fill(every, 10)
    every.update_losses({f"r{n}": 0.1 for n in range(8)} | {"r8": 2.0})
    shares = drawn(every, 2_000)
    assert shares["r8"] == pytest.approx(0.02 + 0.8 * 2.0 / 4.8, abs=0.04)
    assert shares["r9"] == pytest.approx(shares["r8"], abs=0.05)  # unknown
    assert min(shares[f"r{n}"] for n in range(8)) > 0.01


def test_held_out_records_are_not_sampled_by_loss() -> None:
    every = table(recent_share=1.0, recent_half_life=1.0)
    fill(every, 4, split="held_out")
    every.update_losses({"r0": 100.0, "r1": 0.0, "r2": 0.0, "r3": 0.0})
    shares = drawn(every, 800, "held_out")
    assert shares["r0"] == pytest.approx(1 / 15, abs=0.04)
    assert shares["r3"] == pytest.approx(8 / 15, abs=0.07)


def test_when_full_what_is_learnt_best_goes_first_and_the_oldest_of_equals() -> None:
    every = table(remover="priority", capacity_bytes=80)
    fill(every, 4, size=10)
    every.update_losses({"r0": 1.0, "r1": 0.1, "r2": 0.1, "r3": 3.0})
    for name in ("s0", "s1", "s2", "s3"):
        every.insert(EncodedRecord(name, 0.0, b"x" * 10), "train", 0.0)
    # r1, r2, r0, r3: the new ones are unknown, and they have no losses yet
    assert kept(every) == ["s0", "s1", "s2", "s3"]
    every.insert(EncodedRecord("s4", 0.0, b"x" * 10), "train", 0.0)
    assert kept(every) == ["s1", "s2", "s3", "s4"]
    every.update_losses({"s1": 5.0, "s2": 1.0, "s3": 2.0, "s4": 4.0})
    every.insert(EncodedRecord("big", 0.0, b"x" * 20), "train", 0.0)
    assert kept(every) == ["s1", "s4", "big"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 60), amounts), max_size=40), st.integers(0, 3))
def test_bytes_never_exceed_the_capacity_and_losses_belong_to_what_is_kept(
    inserts: list[tuple[int, float]], deletes: int
) -> None:
    table = Table(100, "priority")
    for n, (size, loss) in enumerate(inserts):
        table.insert(EncodedRecord(f"r{n}", float(n), b"x" * size))
        table.update_losses({f"r{n}": loss, "gone": 1.0})
        records = table.records()
        assert table.bytes == sum(len(record.data) for record in records) <= 100
        assert f"r{n}" in {record.request_id for record in records}
        if n % 7 < deletes:
            assert table.delete(f"r{n}") == 1
        assert set(table._losses) <= {record.request_id for record in table.records()}
        assert len(table.losses()) == len(table)
    table.expire(len(inserts) / 2)
    assert set(table._losses) <= {record.request_id for record in table.records()}


def test_a_shard_takes_losses_and_outlives_nonsense() -> None:
    settings = ReplaySettings(
        held_out_fraction=0.0, sampler="priority", recent_share=0.9, priority_exponent=1.0
    )
    shard = ReplayShard("sql", settings, seed=0, clock=lambda: 1_000.0)
    for n in range(10):
        shard.insert(encode(make_record(request_id=f"r{n}", prompt=(n, n + 1))))
    shard.update_losses({f"r{n}": 0.01 for n in range(9)} | {"r9": 1.0, "unknown": 9.0})
    shard.update_losses({"r0": math.nan, "r1": math.inf, "r2": -1.0})
    names = [decode(shard.sample(1, "train")[0]).request_id for _ in range(300)]
    assert names.count("r9") > 200
    assert set(names) > {"r9"}
