"""The arithmetic of the studies of learning."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from harness import Interval, bootstrap
from online import shifts, speeds, streams


def counts(*accepted: int, drafted: int = 10) -> list[list[int]]:
    return [[5, taken, drafted, 20] for taken in accepted]


def test_windows_sum_before_they_divide_and_leave_out_a_rest() -> None:
    uneven = [[1, 2, 2, 3], [9, 0, 98, 9], [1, 4, 4, 5]]
    found = streams.windows(uneven, 2)
    assert dict(found) == {2: 2 / 100}
    assert dict(streams.window_lengths(uneven, 2)) == {2: 1 + 2 / 10}
    assert streams.windows([], 2).empty
    assert math.isnan(streams.windows([[0, 0, 0, 7]], 1)[1])


def test_a_gap_is_closed_by_the_share_that_online_has_made_of_it() -> None:
    assert streams.gap_closed([0.1, 0.3], [0.6, 0.6], [0.7, 0.7]) == pytest.approx(0.8)
    assert streams.gap_closed([0.5], [0.6], [0.5]) is None


def test_the_goal_is_a_share_of_large_gaps_and_a_distance_in_small_ones() -> None:
    assert streams.reached([0.1], [0.91], [1.0])
    assert not streams.reached([0.1], [0.90], [1.0])
    assert streams.reached([0.60], [0.69], [0.70])
    assert streams.reached([0.60], [0.80], [0.70])
    assert not streams.reached([0.60], [0.67], [0.70])


def test_the_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        found = bootstrap(streams.mean, rng.normal(0.3, 0.2, 60), seed=seed, resamples=300)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.3 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_bootstrap_keeps_prompts_together_and_needs_two() -> None:
    frozen = np.linspace(0.1, 0.9, 50)
    found = bootstrap(difference, frozen + 0.1, frozen)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one length"):
        bootstrap(difference, frozen, frozen[1:])
    assert bootstrap(streams.mean, [0.5]) == Interval(0.5, None, None)


def difference(upper: Any, lower: Any) -> float:
    return streams.mean(upper) - streams.mean(lower)


def test_recovery_counts_requests_to_the_end_of_the_first_good_window() -> None:
    served = counts(*[2] * 10, *[6] * 10)
    assert shifts.recovered(served, 10, 0.61) == 20
    assert shifts.recovered(served, 10, 0.65) is None
    assert shifts.recovered(served, 10, 0.20) == 10
    assert shifts.recovered([], 10, 0.20) is None


def test_learning_pays_once_it_has_caught_up_for_good() -> None:
    plain, online = [2.0] * 4, [2.5, 2.0, 1.0, 1.0]
    assert speeds.pays_after(plain, online) == 3
    assert speeds.pays_after(plain, [3.0, 3.0, 1.0, 0.9]) == 4
    assert speeds.pays_after(plain, [2.5] * 4) is None
    assert speeds.pays_after(plain, [1.0, 3.5, 1.0, 1.0]) == 3


def test_speeds_count_training_apart() -> None:
    seconds = {"plain": 2.0, "frozen": 2.5, "suffix": 2.0, "online": 1.0, "online and suffix": 0.5}
    unit = {
        "timings": [
            {"variant": arm, "block": block, "topic": "a", "tokens": 10, "seconds": own}
            for block in range(6)
            for arm, own in seconds.items()
        ],
        "training": [3.0, 0.0, 0.0, 3.0, 0.0, 0.0],
        "differ": {"online": 0},
        "machine": {},
    }
    found = speeds.summary(unit, 16)
    assert found["tokens_per_s"]["frozen"] == pytest.approx(4.0)
    assert found["tokens_per_s"]["online"] == pytest.approx(10.0)
    assert found["tokens_per_s"]["online, training counted in"] == pytest.approx(5.0)
    assert found["over_plain"]["online"]["ratio"] == pytest.approx(2.0)
    assert found["last_third"]["online and suffix"]["ratio"] == pytest.approx(4.0)
    assert found["pays_after"] == {"online": 6 * 16, "online and suffix": 2 * 16}
    speeds.report({"a": found})


def stream(online: float) -> dict[str, Any]:
    return {
        "frozen": counts(1, 1, 1, 1),
        "online": counts(1, 5, 9, 9),
        "suffix": counts(0, 1, 2, 2),
        "frozen_both": counts(1, 2, 3, 3),
        "both": counts(1, 5, 9, 9),
        "checkpoints": {"0": [0.1, 0.2], "4": [online, online]},
        "test_frozen": counts(1, 1),
        "test_online": counts(9, 8),
        "test_suffix": counts(2, 2),
        "test_frozen_both": counts(3, 3),
        "test_both": counts(9, 9),
        "learning": {
            "seconds": 1.0,
            "synthetic": {"made": 3, "seconds": 0.5},
            "micro_steps": 8,
            "published": 2,
            "rejected": 1,
        },
        "machine": {},
    }


CEILING = {"test": [0.95, 0.95], "test_counts": counts(9, 9)}


def test_a_topic_is_summed_up() -> None:
    found = streams.topic_summary(stream(0.9), CEILING, [stream(0.9), stream(0.7)], 2)
    assert found["gap_closed"]["value"] == pytest.approx(0.75 / 0.8, abs=1e-3)
    assert found["reached"]
    assert found["checkpoints"] == {0: pytest.approx(0.15), 4: 0.9}
    assert found["windows"]["online"] == {2: 1.6, 4: 2.8}
    assert found["cost"]["seconds_per_point"] == pytest.approx(1.5 / 75.0)
    assert found["test_served"]["online"]["acceptance_rate"]["value"] == pytest.approx(0.85)
    assert found["test_served"]["online"]["mean_acceptance_length"]["value"] == pytest.approx(2.7)
    assert [own["online"]["value"] for own in found["seeds"]] == pytest.approx([0.9, 0.7])
    closed = [own["gap_closed"]["value"] for own in found["seeds"]]
    assert closed == pytest.approx([0.75 / 0.8, 0.55 / 0.8])
    assert not streams.topic_summary(stream(0.8), CEILING, [], 2)["reached"]


def test_checkpoints_come_in_the_order_of_their_requests() -> None:
    unit = stream(0.9)
    unit["checkpoints"] |= {"1000": unit["checkpoints"]["4"], "200": unit["checkpoints"]["0"]}
    assert list(streams.acceptance_summary(unit, None)["checkpoints"]) == [0, 4, 200, 1000]


def test_without_a_ceiling_there_is_no_verdict() -> None:
    found = streams.topic_summary(stream(0.9), None, [], 2)
    assert "reached" not in found
    assert "ceiling" not in found["test_served"]


def test_a_shift_gives_matrix_transfer_and_recovery() -> None:
    shift = {
        "order": ["a", "b"],
        "scores": [{"a": [0.1], "b": [0.1]}, {"a": [0.9], "b": [0.2]}, {"a": [0.6], "b": [0.8]}],
        "phases": [counts(1, 1, 9, 9), counts(2, 2, 4, 4)],
        "learning": {"seconds": 1.0, "micro_steps": 96, "decisions": []},
    }
    found = shifts.summary(shift, {"a": 0.9, "b": 0.8}, 2, abrupt=True)
    assert found["matrix"]["before"] == {"a": 0.1, "b": 0.1}
    assert found["matrix"]["b"] == {"a": 0.6, "b": 0.8}
    assert found["recovery"] == {"a": 4, "b": None}
    mixed = shifts.summary(shift, {}, 2, abrupt=False)
    assert list(mixed["matrix"]) == ["before", "quarter 1", "quarter 2"]
    assert "most_lost" not in mixed
    assert found["most_lost"] == {"topic": "a", "lost": pytest.approx(0.3)}
    assert found["mean_at_the_end"]["value"] == pytest.approx(0.7)
    kept = {"before": {"a": 0.1}, "a": {"a": 0.5}}
    assert shifts.most_lost(kept) == {"topic": None, "lost": 0.0}


def test_the_level_to_come_back_to_is_that_after_as_many_requests() -> None:
    served = {"online": counts(0, 0, 4, 4, 9, 9)}
    assert shifts.level_of(served, 1, 4) == pytest.approx((0 + 0 + 4 + 4) / 40)
    assert shifts.level_of(served, 1, 6) == pytest.approx((4 + 4 + 9 + 9) / 40)
