"""Drift of live acceptance: when it begins and ends, and what the registry makes of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from paceline.actors.training.topic_stats import LiveStats
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.drift import Drift, DriftSettings, DriftStatus
from paceline.actors.weights.registry import WeightRegistry


class Traffic:
    """Requests whose acceptance scatters from one to the next."""

    def __init__(self, seed: int = 0, rounds: int = 20) -> None:
        self._rng, self._rounds = np.random.default_rng(seed), rounds

    def serve(self, rate: float) -> DraftOutcome:
        own = float(np.clip(self._rng.normal(rate, 0.15), 0, 1))
        return DraftOutcome("sql", 0, self._rounds, int(self._rng.binomial(self._rounds, own)))


def fed(drift: Drift, traffic: Traffic, rate: float, requests: int) -> list[int]:
    """At which of the requests drift began."""
    return [i for i in range(requests) if drift.add(traffic.serve(rate))]


@pytest.mark.parametrize("seed", range(5))
def test_a_fall_is_seen_once_and_soon_and_chance_is_none(seed: int) -> None:
    drift, traffic = Drift(), Traffic(seed)
    assert fed(drift, traffic, 0.6, 1_000) == []
    began = fed(drift, traffic, 0.3, 100)
    assert len(began) == 1
    assert began[0] < 40
    assert drift.drifting
    fed(drift, traffic, 0.3, 2_000)
    assert not drift.drifting  # it is the new level
    assert len(fed(drift, traffic, 0.05, 100)) == 1


@pytest.mark.parametrize("rounds", [2, 4, 10])
def test_short_answers_are_no_drift_by_chance_and_show_a_fall_in_as_many_rounds(
    rounds: int,
) -> None:
    for seed in range(5):
        drift, traffic = Drift(), Traffic(seed, rounds)
        assert fed(drift, traffic, 0.6, 8_000) == []
        assert fed(drift, traffic, 0.3, 40 * 20 // rounds)


def test_learning_is_no_drift() -> None:
    drift, traffic = Drift(), Traffic()
    assert fed(drift, traffic, 0.2, 300) == []
    assert fed(drift, traffic, 0.7, 1_000) == []


def test_a_few_requests_are_no_drift() -> None:
    drift, traffic = Drift(), Traffic()
    fed(drift, traffic, 0.9, 4)
    assert fed(drift, traffic, 0.1, 40) == []


def test_at_the_edge_the_state_does_not_flicker() -> None:
    settings = DriftSettings(fall=0.2, recovered=0.1, fast=20.0, slow=1e9, min_rounds=1)
    drift, states = Drift(settings), []
    for rate in [1.0] * 50 + [0.7, 0.85, 0.7, 0.85, 0.7, 1.0, 1.0, 1.0]:
        drift.add(DraftOutcome("sql", 0, 100, round(100 * rate)))
        states.append(drift.drifting)
    changes = sum(a != b for a, b in itertools.pairwise(states))
    assert changes == 2


@pytest.mark.parametrize(
    "outcome",
    [
        DraftOutcome("sql", 0, 0, 0),
        DraftOutcome("sql", 0, 20, 0, failed=True),
        DraftOutcome("sql", 0, 20, 21),
    ],
)
def test_requests_that_say_nothing_of_the_acceptance_are_left_out(outcome: DraftOutcome) -> None:
    drift = Drift()
    assert not drift.add(outcome)
    assert drift.status() == DriftStatus()


def test_a_drift_is_one_entry_of_the_history_however_many_trainers_see_it(tmp_path: Path) -> None:
    registry = WeightRegistry(str(tmp_path), ("sql", "general"), "m", put=lambda x: x)
    trainers, traffic = [LiveStats() for _ in range(3)], Traffic()

    def began(rate: float, requests: int) -> list[list[str]]:
        registry.report([traffic.serve(rate) for _ in range(requests)])
        return [live.update(registry.topic_status()) for live in trainers]

    assert began(0.6, 200) == [[]] * 3
    assert began(0.2, 60) == [["sql"]] * 3
    assert began(0.2, 10) == [[]] * 3
    assert all(live.drifting("sql") and not live.drifting("general") for live in trainers)
    [entry] = registry.history()
    assert (entry["topic"], entry["outcome"], entry["version"]) == ("sql", "drift", 0)
    assert entry["acceptance_fast"] < entry["acceptance_slow"] - 0.08
