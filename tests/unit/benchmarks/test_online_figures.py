"""The arithmetic of the benchmarks of learning, and the page that is made of it."""

from __future__ import annotations

import json
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest
from harness import bootstrap
from online import figures, learner
from online.figures import Counts, Window, unpacked
from online.learner import Learning
from online.units import Plateau


def counts(*accepted: int, drafted: int = 10, seconds: float = 1.0) -> list[Counts]:
    return [Counts(5, drafted, taken, 20, seconds) for taken in accepted]


def test_windows_sum_before_they_divide_and_leave_out_a_rest() -> None:
    uneven = [Counts(1, 2, 2, 3, 0.1), Counts(9, 98, 0, 9, 0.1), Counts(1, 4, 4, 5, 0.1)]
    (only,) = figures.windows(uneven, 2)
    assert only == Window(0, 2, 2 / 100, 1 + 2 / 10)
    assert figures.windows([], 2) == []
    assert figures.window([Counts(0, 0, 0, 7, 0.1)]).acceptance_rate is None


def test_a_gap_is_closed_by_the_share_that_online_has_made_of_it() -> None:
    assert figures.gap_closed([0.1, 0.3], [0.6, 0.6], [0.7, 0.7]) == pytest.approx(0.8)
    assert figures.gap_closed([0.5], [0.6], [0.5]) is None


def test_the_goal_is_a_share_of_large_gaps_and_a_distance_in_small_ones() -> None:
    assert figures.reached([0.1], [0.91], [1.0])
    assert not figures.reached([0.1], [0.90], [1.0])
    assert figures.reached([0.60], [0.69], [0.70])
    assert figures.reached([0.60], [0.80], [0.70])
    assert not figures.reached([0.60], [0.67], [0.70])


def test_the_bootstrap_covers_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(200):
        found = bootstrap(figures.mean, rng.normal(0.3, 0.2, 60), seed=seed, resamples=300)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= 0.3 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_bootstrap_keeps_prompts_together() -> None:
    frozen = np.linspace(0.1, 0.9, 50)
    found = bootstrap(figures.difference, frozen + 0.1, frozen)
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
    with pytest.raises(ValueError, match="one length"):
        bootstrap(figures.difference, frozen, frozen[1:])


def test_recovery_counts_requests_to_the_end_of_the_first_good_window() -> None:
    parts = [Window(100 + 10 * i, 110 + 10 * i, rate, None) for i, rate in enumerate((0.2, 0.57))]
    assert figures.recovered(parts, 0.58) == 20
    assert figures.recovered(parts, 0.60) is None
    assert figures.recovered(parts, 0.20) == 10
    assert figures.recovered([], 0.20) is None


def test_learning_pays_once_it_has_caught_up_for_good() -> None:
    frozen = counts(0, 0, 0, 0, seconds=2.0)
    online = [Counts(5, 10, 0, 20, s) for s in (2.0, 1.5, 0.5, 0.5)]
    assert figures.pays_after(frozen, online, training_s=2.0) == 3
    assert figures.pays_after(frozen, online, training_s=4.0) is None
    assert figures.pays_after(frozen, online, training_s=0.0) == 1


def packed(some: list[Counts]) -> list[list[float]]:
    return [[*astuple(one)] for one in some]


def test_counts_survive_json() -> None:
    some = counts(1, 2)
    assert unpacked(json.loads(json.dumps(packed(some)))) == some


def test_a_plateau_is_over_after_looks_in_a_row_that_gain_nothing() -> None:
    plateau = Plateau(2, 0.01, 0.5)
    assert plateau.update(0.52)
    assert not plateau.update(0.525)
    assert not plateau.over
    assert plateau.update(0.54)
    assert not plateau.update(0.5)
    assert not plateau.update(0.549)
    assert plateau.over
    assert plateau.best == 0.54


def stream(online: float) -> dict[str, Any]:
    looks = {
        "0": {"acceptance": [0.1, 0.2], "overlap": [0.1, 0.1]},
        "4": {"acceptance": [online, online], "overlap": [0.5, 0.5]},
    }
    return {
        "frozen": packed(counts(1, 1, 1, 1)),
        "online": packed(counts(1, 5, 9, 9, seconds=0.5)),
        "checkpoints": looks,
        "test_frozen": packed(counts(1, 1)),
        "test_online": packed(counts(9, 8)),
        "learning": {
            "seconds": 1.0,
            "micro_steps": 8,
            "positions": 300,
            "published": 2,
            "rejected": 1,
        },
    }


CEILING = {
    "test": {"acceptance": [0.95, 0.95], "overlap": [0.6, 0.6]},
    "test_counts": packed(counts(9, 9)),
}


def test_a_topic_is_summed_up() -> None:
    found = figures.topic_summary(stream(0.9), CEILING, 2)
    seeds = figures.seeds_summary([stream(0.9), stream(0.7)], CEILING)
    assert found["gap_closed"]["value"] == pytest.approx(0.75 / 0.8, abs=1e-3)
    assert found["reached"]
    assert not figures.topic_summary(stream(0.8), CEILING, 2)["reached"]
    assert found["checkpoints"] == {0: pytest.approx(0.15), 4: 0.9}
    assert found["cost"]["points"] == pytest.approx(75.0)
    assert found["cost"]["seconds_per_point"] == pytest.approx(1.0 / 75.0)
    assert found["cost"]["speedup"] == pytest.approx(4.0 / (2.0 + 1.0))
    assert found["test_served"]["online"]["acceptance_rate"]["value"] == pytest.approx(0.85)
    assert [own["acceptance"] for own in seeds] == pytest.approx([0.9, 0.7])
    assert [own["gap_closed"] for own in seeds] == pytest.approx([0.75 / 0.8, 0.55 / 0.8])


def test_checkpoints_come_in_the_order_of_their_requests() -> None:
    unit = stream(0.9)
    unit["checkpoints"] |= {"1000": unit["checkpoints"]["4"], "200": unit["checkpoints"]["0"]}
    assert list(figures.acceptance_summary(unit, None)["checkpoints"]) == [0, 4, 200, 1000]


def test_without_a_ceiling_there_is_no_verdict() -> None:
    found = figures.topic_summary(stream(0.9), None, 2)
    assert "reached" not in found
    assert "ceiling" not in found["test_served"]


def test_a_shift_gives_matrix_transfer_and_recovery() -> None:
    shift = {
        "order": ["a", "b"],
        "scores": [{"a": [0.1], "b": [0.1]}, {"a": [0.9], "b": [0.2]}, {"a": [0.6], "b": [0.8]}],
        "phases": [
            {"topics": ["a"] * 4, "counts": packed(counts(1, 1, 9, 9))},
            {"topics": ["b"] * 4, "counts": packed(counts(2, 2, 4, 4))},
        ],
        "learning": {"seconds": 1.0, "micro_steps": 96, "decisions": []},
    }
    found = figures.shift_summary(shift, {"a": 0.9, "b": 0.8}, 2, abrupt=True)
    assert found["matrix"]["before"] == {"a": 0.1, "b": 0.1}
    assert found["matrix"]["b"] == {"a": 0.6, "b": 0.8}
    assert found["recovery"] == {"a": 4, "b": None}
    mixed = figures.shift_summary(shift, {}, 2, abrupt=False)
    assert list(mixed["matrix"]) == ["before", "quarter 1", "quarter 2"]
    assert "most_lost" not in mixed
    assert found["most_lost"] == {"topic": "a", "lost": pytest.approx(0.3)}
    assert found["mean_at_the_end"]["value"] == pytest.approx(0.7)
    kept = {"before": {"a": 0.1}, "a": {"a": 0.5}}
    assert figures.most_lost(kept) == {"topic": None, "lost": 0.0}


def test_the_level_to_come_back_to_is_that_after_as_many_requests() -> None:
    served = {"online": packed(counts(0, 0, 4, 4, 9, 9))}
    for requests, of in ((4, (0, 0, 4, 4)), (6, (4, 4, 9, 9))):
        expected = figures.window(counts(*of)).acceptance_rate
        assert figures.level_of(served, 1, requests) == pytest.approx(expected)


def test_units_of_shifts_never_rest_and_every_trainer_setting_is_in_a_key() -> None:
    assert Learning(seed=3).tireless() == Learning(seed=3, max_rejections=learner.NEVER)
    facts = learner.trainer_facts()
    assert json.loads(json.dumps(facts, allow_nan=False))["gate"]
    assert not {"draft_paths", "optimizer_dir"} & facts.keys()


def test_results_of_other_rules_are_not_taken_for_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = learner.trainer_facts()
    monkeypatch.setattr(learner, "RULES", learner.RULES + 1)
    assert learner.trainer_facts() != before
