"""The registry with a canary: candidates, promotion, rollback, and death at any moment."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from paceline.actors.training.topic_stats import LiveStats
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten, load_model, unflatten
from paceline.actors.weights.notifications import SlotWeights
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.topic_store import WeightFiles

GOOD, BAD = 16, 2


def weights(value: float, dtype: torch.dtype = torch.bfloat16) -> FlatWeights:
    return flatten({"w": torch.full((4,), value, dtype=dtype)})


def registry(directory: Path, *, canary: bool = True, **more: Any) -> WeightRegistry:
    return WeightRegistry(
        str(directory),
        ("sql", "general"),
        "aa",
        canary=CanarySettings(watch=(8,), min_trial_s=0.0) if canary else None,
        put=lambda x: x,
        clock=lambda: 7.0,
        **more,
    )


def served(reg: WeightRegistry, known: dict[str, int] | None = None) -> dict[str, Any]:
    """Slot to (version, value of its weights)."""
    changes = asyncio.run(reg.wait_for_changes(known or {}, None, 0.01))
    return {
        slot: (new.weight_version, new.reference and float(unflatten(new.reference)["w"][0]))
        for slot, new in changes.weights.items()
    }


def report(reg: WeightRegistry, accepted: dict[int, int], requests: int = 8) -> None:
    """So many requests of every version, each with as many of 20 rounds accepted."""
    for _ in range(requests):
        reg.report([DraftOutcome("sql", v, 20, a) for v, a in accepted.items()])


def outcomes(reg: WeightRegistry) -> list[str]:
    return [d["outcome"] for d in reg.history("sql")]


def files(directory: Path) -> set[str]:
    return {path.stem for path in (directory / "aa" / "sql").glob("*.safetensors")}


def test_new_weights_are_on_trial_and_promoted_by_live_requests(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    assert reg.publish("sql", weights(1.0), {"records": 9}) == 1
    assert reg.stable_versions()["sql"] == 0
    assert reg.stable_weights("sql") == SlotWeights(0)
    assert served(reg) == {"sql@candidate": (1, 1.0)}
    assert served(reg, {"sql@candidate": 1}) == {}
    report(reg, {0: BAD, 1: GOOD})
    assert reg.stable_versions()["sql"] == 1
    assert served(reg, {"sql@candidate": 1}) == {"sql": (1, 1.0), "sql@candidate": (0, None)}
    assert outcomes(reg) == ["published", "promoted"]
    assert [d.get("canary") for d in reg.history("sql")] == [True, None]
    evidence = reg.history("sql")[-1]
    assert evidence["canary_acceptance"] == 0.8
    assert evidence["stable_acceptance"] == 0.1
    assert evidence["canary_requests"] == evidence["stable_requests"] == 2
    assert 0.0 < evidence["difference_lower_bound"] < 0.7 < evidence["difference_upper_bound"]


def test_what_is_worse_is_rolled_back_and_its_number_not_used_again(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(1.0), {})
    report(reg, {0: GOOD, 1: BAD})
    assert outcomes(reg) == ["published", "rolled_back"]
    assert served(reg) == {}
    assert served(reg, {"sql@candidate": 1}) == {"sql@candidate": (0, None)}
    assert files(tmp_path) == set()
    assert reg.publish("sql", weights(2.0), {}) == 2
    again = registry(tmp_path)
    assert again.topic_status()["sql"].candidate == 2
    assert again.stable_versions()["sql"] == 0
    assert again.publish("sql", weights(3.0), {}) == 3


def test_a_newer_candidate_replaces_one_without_requests(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(1.0), {})
    report(reg, {0: BAD}, requests=3)
    assert reg.publish("sql", weights(2.0), {}) == 2
    assert reg.topic_status()["sql"].canary_requests == 0
    report(reg, {0: BAD, 1: GOOD}, requests=20)  # of the one before
    assert reg.stable_versions()["sql"] == 0
    assert served(reg) == {"sql@candidate": (2, 2.0)}
    assert files(tmp_path) == {"2"}


def test_a_candidate_without_traffic_waits_across_restarts(tmp_path: Path) -> None:
    registry(tmp_path).publish("sql", weights(1.0), {})
    for _ in range(3):
        reg = registry(tmp_path)
        report(reg, {0: BAD}, requests=50)
        assert served(reg) == {"sql@candidate": (1, 1.0)}
    report(reg, {0: BAD, 1: GOOD})
    assert registry(tmp_path).stable_versions()["sql"] == 1


def test_a_switched_off_canary_withdraws_what_was_undecided(tmp_path: Path) -> None:
    registry(tmp_path).publish("sql", weights(1.0), {})
    off = registry(tmp_path, canary=False)
    assert off.stable_versions()["sql"] == 0
    assert served(off, {"sql@candidate": 1}) == {"sql@candidate": (0, None)}
    assert off.publish("sql", weights(2.0), {}) == 2
    assert served(off) == {"sql": (2, 2.0)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    reg = registry(tmp_path)
    with pytest.raises(ValueError, match="not finite"):
        reg.publish("sql", weights(value, dtype), {"steps": 3})
    assert reg.topic_status()["sql"].candidate is None
    assert outcomes(reg) == ["refused"]
    assert reg.history("sql")[0]["steps"] == 3
    assert files(tmp_path) == set()
    assert reg.publish("sql", weights(torch.finfo(dtype).max, dtype), {}) == 1


def promote(reg: WeightRegistry, value: float) -> int:
    version = reg.publish("sql", weights(value), {})
    report(reg, {reg.stable_versions()["sql"]: 10, version: GOOD}, requests=4)
    assert reg.stable_versions()["sql"] == version
    return version


def test_a_version_that_disappoints_later_is_tried_against_its_predecessor(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    promote(reg, 1.0)
    second = promote(reg, 2.0)
    report(reg, {second: BAD})  # 0.5 before, 0.1 now: a suspicion, of the past
    assert reg.stable_versions()["sql"] == second
    suspected = reg.history("sql")[-1]
    assert (suspected["outcome"], suspected["restored_from"]) == ("published", 1)
    assert served(reg)["sql@candidate"] == (3, 1.0)
    report(reg, {second: BAD, 3: 10})  # a conviction, at the same time
    assert served(reg) == {"sql": (3, 1.0)}
    assert outcomes(reg)[-1] == "promoted"


def undecided(reg: WeightRegistry) -> bool:
    """What the trainer makes of the registry's live figures."""
    live_stats = LiveStats()
    live_stats.update(reg.topic_status())
    return live_stats.undecided("sql")


def test_a_trainer_does_not_replace_an_earlier_version_on_trial(
    tmp_path: Path,
) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(0.0), {})
    assert not undecided(reg)  # a candidate of its own without requests
    promote(reg, 1.0)
    second = promote(reg, 2.0)
    assert not undecided(reg)
    report(reg, {second: BAD})
    assert reg.topic_status()["sql"].canary_requests == 0
    again = registry(tmp_path)
    for each in (reg, again):  # the trial survives the registry
        assert each.topic_status()["sql"].restored_from == second - 1
        assert undecided(each)
    report(again, {second: BAD, second + 1: 10})
    assert again.topic_status()["sql"].restored_from is None
    again.publish("sql", weights(4.0), {})
    assert not undecided(again)


def test_drift_does_not_bring_back_what_is_no_better(tmp_path: Path) -> None:
    reg = registry(tmp_path)
    promote(reg, 1.0)
    second = promote(reg, 2.0)
    report(reg, {second: BAD})
    report(reg, {second: 3, 3: BAD}, requests=64)
    assert reg.stable_versions()["sql"] == second
    assert outcomes(reg)[-1] == "kept"


def test_an_operator_goes_back_to_any_version_that_is_there(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    initial_weights = load_model(save_tiny(folder, 1, layers=1, tokenizer=False))
    reg = registry(tmp_path / "state", initial={"sql": str(folder)})
    with pytest.raises(ValueError, match="no version before 0"):
        reg.roll_back("sql")
    first = promote(reg, 1.0)
    promote(reg, 2.0)
    undecided = reg.publish("sql", weights(3.0), {})
    assert reg.roll_back("sql") == 2  # the candidate goes
    assert served(reg)["sql"] == (2, 2.0)
    assert reg.roll_back("sql") == undecided + 1  # the version before comes back
    assert served(reg) == {"sql": (4, 1.0)}
    assert reg.roll_back("sql", 2) == 5
    assert served(reg) == {"sql": (5, 2.0)}
    assert reg.roll_back("sql", 0) == 6
    restored = reg.stable_weights("sql")
    assert restored.weight_version == 6
    assert restored.reference.digest() == initial_weights.digest()
    with pytest.raises(ValueError, match="version 99"):
        reg.roll_back("sql", 99)
    with pytest.raises(KeyError):
        reg.roll_back("poems")
    last = reg.history("sql")[-1]
    assert (last["outcome"], last["restored_from"], last["parent"]) == ("rolled_back", 0, 5)
    restored = registry(tmp_path / "state").stable_weights("sql")
    assert restored.weight_version == 6
    assert restored.reference.digest() == initial_weights.digest()
    assert first == 1


def test_files_in_use_are_kept_however_many_come_after(tmp_path: Path) -> None:
    reg = registry(tmp_path, keep_versions=1)
    promote(reg, 1.0)
    promote(reg, 2.0)
    for value in range(5):
        reg.publish("sql", weights(float(value)), {})
    assert files(tmp_path) == {"1", "2", "7"}  # before, stable, on trial


def test_a_decision_that_cannot_be_written_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reg = registry(tmp_path)
    reg.publish("sql", weights(1.0), {})

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(WeightFiles, "write_manifest", full)
        report(reg, {0: BAD, 1: GOOD}, requests=4)
    assert reg.stable_versions()["sql"] == 0
    assert served(reg) == {"sql@candidate": (1, 1.0)}
    report(reg, {0: BAD, 1: GOOD}, requests=4)
    assert reg.stable_versions()["sql"] == 1


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


WRITES = ("write", "write_manifest", "remove", "prune", "append_history")


def dying(patch: pytest.MonkeyPatch, at: int, *, after: bool) -> None:
    """Die at the ``at``-th access to the disk, before or after it."""
    count = itertools.count()

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def access(*arguments: Any) -> Any:
            now = next(count)
            if now == at and not after:
                raise Killed
            answer = real(*arguments)
            if now == at:
                raise Killed
            return answer

        return access

    for name in WRITES:
        patch.setattr(WeightFiles, name, wrap(getattr(WeightFiles, name)))


def publishes(reg: WeightRegistry) -> None:
    reg.publish("sql", weights(9.0), {})


def decides(accepted: int) -> Callable[[WeightRegistry], None]:
    def act(reg: WeightRegistry) -> None:
        report(reg, {1: 10, 2: accepted})

    return act


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("act", [publishes, decides(GOOD), decides(BAD), WeightRegistry.roll_back])
def test_a_kill_at_any_moment_leaves_the_state_before_or_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Any, after: bool
) -> None:
    """Stable 1 and candidate 2 are there; then something happens, and is cut off everywhere."""
    for at in itertools.count():
        directory = tmp_path / f"{act}{at}"
        reg = registry(directory)
        promote(reg, 1.0)
        reg.publish("sql", weights(2.0), {})
        try:
            with monkeypatch.context() as patch:
                dying(patch, at, after=after)
                act(reg, "sql") if act is WeightRegistry.roll_back else act(reg)
        except Killed:
            pass
        else:
            assert at > 2
            return
        seen = served(reg)  # what drafts may have seen of the dead one
        again = registry(directory)
        now = served(again)
        assert now["sql"] in ((1, 1.0), (2, 2.0))
        assert now["sql"][0] >= seen["sql"][0]
        assert now.get("sql@candidate") in (None, (2, 2.0), (3, 9.0))
        assert (seen.get("sql@candidate") or (0,))[0] <= 3
        # what is served, and nothing else, is in the history
        stable = {"published": 1, "rolled_back": 1, "promoted": 2}[outcomes(again)[-1]]
        assert (now["sql"][0], "sql@candidate" in now) == (
            stable,
            outcomes(again)[-1] == "published",
        )
        assert outcomes(registry(directory)) == outcomes(again)
        assert again.publish("sql", weights(5.0), {}) >= 3
        assert served(registry(directory))["sql@candidate"][1] == 5.0


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_the_first_publication_makes_nothing_stable_without_a_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """No manifest is there yet; one publication is cut off everywhere."""
    for at in itertools.count():
        directory = tmp_path / str(at)
        try:
            with monkeypatch.context() as patch:
                dying(patch, at, after=after)
                publishes(registry(directory))
        except Killed:
            pass
        else:
            assert at > 3
            return
        again = registry(directory)
        now, announced = served(again), "published" in outcomes(again)
        assert now == ({"sql@candidate": (1, 9.0)} if announced else {})
        assert again._store.state("sql").last_known_good == 0
        report(again, {0: GOOD, 1: BAD})
        assert again.stable_versions()["sql"] == 0
        assert again.publish("sql", weights(5.0), {}) == 1 + announced
