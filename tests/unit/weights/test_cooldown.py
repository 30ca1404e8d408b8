"""What the registry takes from a trainer that means no good, or knows no better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny

from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.cooldown import MANUAL, CandidateRefusedError, Cooldown
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten
from paceline.actors.weights.registry import WeightRegistry

GOOD, EVEN, BAD = 16, 10, 2
REST = CanarySettings().cooldown_s


class Clock:
    """Unix seconds that stand still until they are moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def weights(value: float) -> FlatWeights:
    return flatten({"w": torch.full((4,), value, dtype=torch.float32)})


def registry(directory: Path, clock: Clock, **changes: Any) -> WeightRegistry:
    initial = directory / "initial"
    save_tiny(initial, 1, layers=1, tokenizer=False)
    return WeightRegistry(
        str(directory / "state"),
        ("sql",),
        "aa",
        keep_versions=1,
        canary=CanarySettings(**changes),
        initial={"sql": str(initial)},
        put=lambda x: x,
        clock=clock,
    )


def report(reg: WeightRegistry, accepted: dict[int, int], requests: int) -> None:
    """So many requests of every version, each with as many of 20 rounds accepted."""
    for _ in range(requests):
        reg.report([DraftOutcome("sql", v, 20, a) for v, a in accepted.items()])


def rolled_back(reg: WeightRegistry, value: float) -> None:
    version = reg.publish("sql", weights(value), {})
    report(reg, {reg.stable_versions()["sql"]: GOOD, version: BAD}, 4)
    assert reg.topic_status()["sql"].candidate is None
    assert reg.stable_versions()["sql"] != version


def promoted(reg: WeightRegistry, value: float, accepted: int) -> int:
    version = reg.publish("sql", weights(value), {})
    report(reg, {reg.stable_versions()["sql"]: EVEN, version: accepted}, 32)
    assert reg.stable_versions()["sql"] == version
    return version


def test_a_candidate_with_live_requests_is_not_replaced(tmp_path: Path) -> None:
    clock = Clock()
    reg = registry(tmp_path, clock)
    reg.publish("sql", weights(1.0), {})
    report(reg, {0: EVEN, 1: EVEN}, 1)
    clock.now += 1e6
    assert "compared" in reg.topic_status()["sql"].closed
    with pytest.raises(CandidateRefusedError, match="compared"):
        reg.publish("sql", weights(2.0), {})
    assert reg.topic_status()["sql"].candidate == 1
    report(reg, {0: GOOD, 1: BAD}, 8)  # its trial has gone on
    assert reg.history("sql")[-1]["outcome"] == "rolled_back"


def test_a_candidate_without_requests_is_kept_for_a_while(tmp_path: Path) -> None:
    """Else a trainer that publishes faster than answers end would never have a decision."""
    clock = Clock()
    reg = registry(tmp_path, clock)
    reg.publish("sql", weights(1.0), {})
    clock.now += CanarySettings().min_trial_s - 0.1
    with pytest.raises(CandidateRefusedError, match="just"):
        reg.publish("sql", weights(2.0), {})
    clock.now += 0.2
    assert reg.topic_status()["sql"].closed is None
    assert reg.publish("sql", weights(2.0), {}) == 2
    assert reg.topic_status()["sql"].candidate == 2


def test_rests_after_rollbacks_in_a_row_grow_and_outlive_the_registry(tmp_path: Path) -> None:
    clock = Clock()
    reg = registry(tmp_path, clock, max_cooldown_s=3 * REST)
    rolled_back(reg, 1.0)
    rolled_back(reg, 2.0)  # the first costs no rest
    for rest in (REST, 2 * REST, 3 * REST, 3 * REST):
        clock.now += rest - 0.1
        assert "in a row" in reg.topic_status()["sql"].closed
        with pytest.raises(CandidateRefusedError, match="in a row"):
            reg.publish("sql", weights(3.0), {})
        reg = reopened(reg, tmp_path, clock, max_cooldown_s=3 * REST)
        with pytest.raises(CandidateRefusedError, match="in a row"):
            reg.publish("sql", weights(3.0), {})
        clock.now += 0.2
        rolled_back(reg, 3.0)
    clock.now += 3 * REST
    promoted(reg, 4.0, GOOD)
    rolled_back(reg, 5.0)
    assert reg.topic_status()["sql"].closed is None  # the first again


def reopened(reg: WeightRegistry, path: Path, clock: Clock, **changes: Any) -> WeightRegistry:
    """As after a kill."""
    del reg
    return registry(path, clock, **changes)


def test_what_somebody_asked_for_is_no_rollback_of_the_canary() -> None:
    taken = [
        {"outcome": "rolled_back", "looks": 1, "reason": MANUAL, "time": 1.0},
        {"outcome": "rolled_back", "reason": "its weights cannot be read", "time": 2.0},
        {"outcome": "rejected", "time": 3.0},
    ]
    assert Cooldown(taken).rollbacks == 0
    lost = {"outcome": "rolled_back", "looks": 1, "time": 4.0}
    back = {"outcome": "promoted", "looks": 1, "restored_from": 3, "proven": True, "time": 5.0}
    twice = Cooldown([lost, back])
    assert twice.rollbacks == 2  # what was served has lost against an earlier one
    assert twice.active(5.0 + REST - 0.1, CanarySettings())
    assert not twice.active(5.0 + REST, CanarySettings())
    assert not twice.active(4.0, CanarySettings())  # a clock that was set back: not for long
    assert Cooldown([lost, back, back | {"outcome": "kept"}]).rollbacks == 2
    better = {"outcome": "promoted", "looks": 1, "proven": True}
    assert Cooldown([lost, lost, lost, better | {"proven": False}]).rollbacks == 2
    assert Cooldown([lost, lost, lost, better]).rollbacks == 0


def test_after_some_versions_that_were_only_no_worse_the_last_good_one_is_tried(
    tmp_path: Path,
) -> None:
    clock = Clock()
    reg = registry(tmp_path, clock)
    good = promoted(reg, 1.0, GOOD)
    for value in range(2, 4):
        promoted(reg, value, EVEN)
        assert reg.topic_status()["sql"].candidate is None
    last = promoted(reg, 4.0, EVEN)
    audit = reg.history("sql")[-1]
    assert (audit["outcome"], audit["restored_from"]) == ("published", good)
    assert "not shown to be better" in audit["reason"]
    reg = reopened(reg, tmp_path, clock)  # nor does a kill end it
    again = reg.topic_status()["sql"].candidate
    assert again == last + 1
    with pytest.raises(CandidateRefusedError, match="earlier version"):
        reg.publish("sql", weights(9.0), {})
    report(reg, {last: EVEN, again: EVEN + 3}, 8)
    assert reg.stable_versions()["sql"] == again
    flat = reg.stable_weights("sql").reference
    assert float(flat.arrays["float32"][0]) == 1.0  # its file was kept, whatever came after it
    assert reg.history("sql")[-1]["restored_from"] == good
    for value in range(2):
        promoted(reg, 6.0 + value, EVEN)
    assert reg.topic_status()["sql"].candidate is None  # counted again
    promoted(reg, 9.0, EVEN)
    assert reg.history("sql")[-1]["restored_from"] == again


@pytest.mark.parametrize(("shortfall", "replaced"), [(6, True), (1, False)])
def test_the_last_known_good_version_changes_only_for_one_shown_to_be_better(
    tmp_path: Path, shortfall: int, replaced: bool
) -> None:
    reg = registry(tmp_path, Clock())
    good = promoted(reg, 1.0, GOOD)
    for value in range(2, 5):
        last = promoted(reg, value, EVEN)
    report(reg, {last: EVEN, last + 1: EVEN - shortfall}, 40)
    assert (
        reg.stable_versions()["sql"] == last
    )  # shown to bring no 0.05, it is not waited for longer
    assert [d["outcome"] for d in reg.history("sql") if d["outcome"] != "drift"][-1] == "kept"
    assert reg.topic_status()["sql"].closed is None  # the trainer has done no wrong
    for value in range(6, 9):
        promoted(reg, value, EVEN)
    assert reg.history("sql")[-1]["restored_from"] == (last if replaced else good)


def harmed(directory: Path, step: float, spread: float, rounds: int, **changes: Any) -> list[float]:
    """True acceptance of what is served, request by request, under a trainer that does harm.

    Each of its candidates is ``step`` worse than what is served then, and its gate says otherwise.
    Requests scatter by ``spread`` about their draft's acceptance, and have so many rounds.
    """
    rng, clock = np.random.default_rng(5), Clock()
    reg = registry(directory, clock, **changes)
    rates, along = {0: 0.6}, []
    for number in range(24_000):
        clock.now += 1.0
        live = reg.topic_status()["sql"]
        if live.closed is None:
            version = reg.publish("sql", weights(float(number)), {})
            rates[version] = rates[live.stable] - step
        live = reg.topic_status()["sql"]
        if live.restored_from is not None:
            rates[live.candidate] = rates[live.restored_from]
        served = live.candidate if rng.random() < 0.5 else None
        served = live.stable if served is None else served
        rate = float(np.clip(rng.normal(rates[served], spread), 0.0, 1.0))
        reg.report([DraftOutcome("sql", served, rounds, int(rng.binomial(rounds, rate)))])
        along.append(rates[reg.stable_versions()["sql"]])
    return along


@pytest.mark.parametrize(
    ("step", "spread", "rounds"),
    [
        (0.03, 0.1, 20),
        pytest.param(0.01, 0.1, 20, marks=pytest.mark.full),
        pytest.param(0.008, 0.03, 200, marks=pytest.mark.full),
    ],
)
def test_harm_in_steps_too_small_to_see_does_not_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: float, spread: float, rounds: int
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # hundreds of versions, none of any worth
    steps = {"min_trial_s": 1e9, "cooldown_s": 10.0, "max_cooldown_s": 100.0}
    harm = step, spread, rounds
    unguarded = harmed(tmp_path / "without", *harm, audit_after=1_000_000, **steps)
    guarded = harmed(tmp_path / "with", *harm, **steps)
    assert unguarded[-1] < 0.4
    assert min(guarded) > 0.6 - 5.5 * 0.03  # once in a while an audit errs, too
    assert np.mean(guarded) > 0.54


def test_a_version_better_than_an_unproven_one_is_not_the_last_known_good(tmp_path: Path) -> None:
    """Else one harmful step and one lucky trial after it would hide what was lost."""
    reg = registry(tmp_path, Clock())
    good = promoted(reg, 1.0, GOOD)
    promoted(reg, 2.0, EVEN)
    promoted(reg, 3.0, GOOD)
    promoted(reg, 4.0, EVEN)
    promoted(reg, 5.0, EVEN)
    assert reg.history("sql")[-1]["restored_from"] == good
    assert reg.history("sql")[-1]["reason"] == "3 versions since 1 were not shown to be better"


def test_an_unreadable_last_known_good_version_is_replaced_by_the_stable_one(
    tmp_path: Path,
) -> None:
    """Else no version could become the last known good one, and no audit would start."""
    reg = registry(tmp_path, Clock())
    good = promoted(reg, 1.0, GOOD)
    promoted(reg, 2.0, EVEN)
    promoted(reg, 3.0, EVEN)
    (tmp_path / "state/aa/sql" / f"{good}.safetensors").write_bytes(b"torn")
    last = promoted(reg, 4.0, EVEN)
    assert reg.topic_status()["sql"].candidate is None
    assert (reg.history("sql")[-1]["outcome"], reg.history("sql")[-1]["version"]) == (
        "restored",
        last,
    )
    for value in range(3):
        promoted(reg, 5.0 + value, EVEN)
    assert reg.history("sql")[-1]["restored_from"] == last


def test_a_last_known_good_version_withdrawn_by_hand_stays_so(tmp_path: Path) -> None:
    reg = registry(tmp_path, Clock())
    good = promoted(reg, 1.0, GOOD)
    for value in range(2, 5):
        promoted(reg, value, EVEN)
    assert reg.topic_status()["sql"].restored_from == good
    reg.roll_back("sql")
    for value in range(5, 8):
        promoted(reg, value, EVEN)
    assert reg.topic_status()["sql"].restored_from == good
