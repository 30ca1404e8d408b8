"""Trainers gone bad: what they do to live acceptance is bounded by the canary, and undone."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from canaries import Serving, mean_rate
from lessons import TINY_VOCAB, lesson
from local_world import LocalWorld, fill, filled, make_rounds, trainer_settings
from tiny_models import tiny_llama

from paceline.actors.replay.record import encode
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.cooldown import NotNow
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten
from paceline.actors.weights.registry import WeightRegistry

SHARE = 0.25
NEW = itertools.count()
CANARY = CanarySettings(rest_s=0.0, least_trial_s=0.0)  # the registry gives no respite


def bring(world: LocalWorld, count: int) -> None:
    """New records of the topic."""
    for _ in range(count):
        world.shards["sql"].insert(encode(lesson(900 + next(NEW))))


def model(noise: float = 0.0, seed: int = 0) -> Any:
    """The target, or a draft that is off by so much noise."""
    found = tiny_llama(0, vocab=TINY_VOCAB, layers=1)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in found.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator))
    return found


def prompts(count: int, first: int = 0) -> list[list[int]]:
    return [[3 + n % 61, 3 + (7 * n) % 61, 3 + n // 61] for n in range(first, first + count)]


def canaried(directory: Path) -> WeightRegistry:
    return WeightRegistry(str(directory), ("sql",), "mark", canary=CANARY, put=lambda x: x)


def noise(seed: int, size: float) -> FlatWeights:
    return flatten(dict(model(size, seed).state_dict()))


def test_noise_without_end_costs_the_canarys_share_and_no_token(tmp_path: Path) -> None:
    """A trainer with a fooled gate publishes garbage as soon as the last garbage is gone."""
    serving = Serving(model(), lambda: model(0.02), SHARE, canaried(tmp_path / "poisoned"))
    clean = Serving(model(), lambda: model(0.02), SHARE, canaried(tmp_path / "clean"))
    published = 0
    for start in range(0, 320, 16):
        if serving.registry.live()["sql"]["candidate"] is None:
            serving.registry.publish("sql", noise(start, 0.5), {"forged": True})
            published += 1
        serving.serve(prompts(16, start))
        clean.serve(prompts(16, start))
        assert serving.registry.current() == {"sql": 0}
    assert published >= 5
    assert serving.texts == clean.texts
    on_trial = [rate for rate in serving.rates if rate[0] != 0]
    assert 0 < len(on_trial) <= 1.4 * SHARE * len(serving.rates)
    assert mean_rate(on_trial) < 0.2  # it is garbage
    stable = [rate for rate in serving.rates if rate[0] == 0]
    assert mean_rate(stable) == pytest.approx(mean_rate(clean.rates), abs=0.03)
    lost = mean_rate(clean.rates) - mean_rate(serving.rates)
    assert mean_rate(clean.rates) > 0.5
    assert lost <= len(on_trial) / len(serving.rates) * mean_rate(clean.rates) + 0.03
    gone = [d for d in serving.registry.history("sql") if d["outcome"] == "rolled_back"]
    assert len(gone) >= published - 1
    assert max(d["canary_requests"] for d in gone) <= CANARY.looks[1] + 8  # a batch at a time


@pytest.mark.full
def test_a_little_worse_again_and_again_is_not_let_through(tmp_path: Path) -> None:
    """Harm by small steps: every candidate is a bit worse than what is served."""
    serving = Serving(model(), lambda: model(), 0.5, canaried(tmp_path))
    for start in range(0, 480, 16):
        if serving.registry.live()["sql"]["candidate"] is None:
            serving.registry.publish("sql", noise(start, 0.06), {"forged": True})
        serving.serve(prompts(16, start))
    assert mean_rate([r for r in serving.rates if r[0] == 0]) > 0.99
    assert serving.registry.current() == {"sql": 0}


@pytest.mark.usefixtures("deepspeed")
def test_a_trainer_of_garbage_labels_is_undone_and_starts_from_what_is_served(
    draft: Path, tmp_path: Path
) -> None:
    """All records say what the target never says: training and gate are both deceived."""
    world = filled(tmp_path, canary=CANARY)
    assert world.registry is not None
    serving = Serving(model(), model, 0.5, world.registry)
    rounds = make_rounds(trainer_settings(draft), world)
    assert rounds.tick()
    deceived = world.registry.history("sql")[-1]
    assert deceived["gain_lower_bound"] > 0.3
    assert deceived["gain_lower_bound"] < deceived["gain_upper_bound"]
    assert rounds.candidate("sql").version == 1
    serving.serve(prompts(48))
    assert world.registry.current()["sql"] == 0
    last = world.registry.history("sql")[-1]
    assert last["outcome"] == "rolled_back"
    assert last["difference_upper_bound"] < 0.0
    assert mean_rate(serving.rates[-16:]) > 0.99  # the harm is over
    assert {version for version, _ in serving.rates[-16:]} == {0}
    bring(world, 4)
    assert rounds.tick()
    assert world.registry.current()["sql"] == 0
    again = world.registry.history("sql")[-1]  # judged against what is served, not against itself
    before = deceived["served_expected_acceptance"]
    assert again["served_expected_acceptance"] == pytest.approx(before, abs=0.05)
    assert rounds.candidate("sql").version in (0, 2)
    versions = [d["version"] for d in world.registry.history("sql") if d.get("canary")]
    assert versions == sorted(set(versions))


@pytest.mark.full
@pytest.mark.usefixtures("deepspeed")
def test_a_topic_whose_candidates_go_one_after_the_other_rests(draft: Path, tmp_path: Path) -> None:
    world = LocalWorld(tmp_path, ("sql",), canary=CANARY)
    fill(world, ("sql",), 80)
    registry = world.registry
    assert registry is not None
    settings = trainer_settings(draft, ("sql",), round_seconds=0.3)
    rounds = make_rounds(settings, world)
    for number in range(1, settings.schedule.max_rejections + 1):
        bring(world, settings.schedule.min_new)
        assert rounds.tick()
        assert registry.live()["sql"]["candidate"] == number
        for _ in range(4):
            registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 16), (number, 2))])
        assert registry.live()["sql"]["candidate"] is None
    bring(world, settings.schedule.min_new)
    assert not rounds.tick()  # enough for a rejected candidate, not for a plateau
    bring(world, 40)
    assert rounds.tick()


class Poisoned(LocalWorld):
    """Weights spoil on their way to the registry."""

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        array = next(iter(flat.arrays.values()))
        array[len(array) // 2] = 0x7FC0 if array.dtype.kind == "u" else math.nan
        return super().publish(topic, flat, decision)


@pytest.mark.usefixtures("deepspeed")
def test_weights_with_a_nan_are_refused_and_the_trainer_starts_again(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path)
    world.__class__ = Poisoned
    rounds = make_rounds(trainer_settings(draft), world)
    assert rounds.tick()
    assert world.registry is not None
    assert [d["outcome"] for d in world.registry.history("sql")] == ["refused"]
    assert world.registry.current()["sql"] == 0
    assert rounds.candidate("sql").steps == 0
    assert rounds.progress.rejected == 1


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("rate", [30.0, 1e3])
def test_an_exploding_rate_publishes_nothing(draft: Path, tmp_path: Path, rate: float) -> None:
    wild = DistillerSettings(learning_rate=rate, warmup_steps=1, dtype="float32")
    world = filled(tmp_path, canary=CANARY)
    rounds = make_rounds(trainer_settings(draft, distiller=wild, round_seconds=0.2), world)
    for _ in range(4):
        rounds.tick()
    assert world.registry is not None
    assert {d["outcome"] for d in world.registry.history()} == {"rejected"}


@pytest.mark.usefixtures("deepspeed")
def test_training_goes_on_while_a_canary_is_undecided_and_publishes_after_it(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path, canary=CANARY)
    registry = world.registry
    assert registry is not None
    rounds = make_rounds(trainer_settings(draft, round_seconds=0.3), world)
    assert rounds.tick()
    steps = rounds.candidate("sql").steps
    registry.report([DraftOutcome("sql", 1, 20, 12)])
    bring(world, 5)  # new records: a topic on trial is trained on with nothing else
    assert rounds.tick()
    assert rounds.progress.state == "waiting for the canary"
    assert rounds.candidate("sql").steps > steps
    assert registry.live()["sql"]["candidate"] == 1
    for _ in range(8):
        registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 2), (1, 16))])
    assert registry.current()["sql"] == 1
    steps = rounds.candidate("sql").steps
    rounds.tick()
    assert rounds.candidate("sql").version >= 1
    assert rounds.candidate("sql").steps >= steps  # from where it was


@pytest.mark.usefixtures("deepspeed")
def test_a_rollback_in_the_midst_of_a_round_is_followed_and_counts(
    draft: Path, tmp_path: Path
) -> None:
    """What was withdrawn is neither what the next candidate is judged by nor where it begins."""
    world = filled(tmp_path, canary=CANARY)
    registry = world.registry
    assert registry is not None
    rounds = make_rounds(trainer_settings(draft, round_seconds=0.3), world)
    assert rounds.tick()
    assert registry.live()["sql"]["candidate"] == 1
    registry.report([DraftOutcome("sql", 1, 20, 2)])  # somebody judges it: it is not replaced
    bring(world, 5)

    def leave() -> bool:  # asked for before every micro-step
        if registry.live()["sql"]["candidate"] is not None:
            registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 16), (1, 2))])
        return True

    world.leave = leave
    assert rounds.tick()
    assert rounds.progress.state == "rolled back"
    assert [d["version"] for d in registry.history("sql") if d.get("canary")] == [1]
    bring(world, 5)
    assert rounds.tick()
    again = registry.history("sql")[-1]
    assert again["served_expected_acceptance"] < 0.5  # the stable draft's, not the withdrawn one's
    first = next(d for d in registry.history("sql") if d["version"] == 1)
    assert again["served_expected_acceptance"] == pytest.approx(
        first["served_expected_acceptance"], abs=0.1
    )


@pytest.mark.usefixtures("deepspeed")
def test_drift_of_live_requests_is_noted_and_ends_a_plateau(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    registry = world.registry
    assert registry is not None
    no_learning = DistillerSettings(
        learning_rate=0.0, warmup_steps=1, rate_hold_steps=1, dtype="float32"
    )
    schedule = ScheduleSettings(
        min_train=4, min_held_out=3, min_new=2, max_rejections=1, least_hope=0.015
    )
    rounds = make_rounds(
        trainer_settings(draft, distiller=no_learning, schedule=schedule, round_seconds=0.05), world
    )
    while rounds.tick():
        pass
    for _ in range(200):
        registry.report([DraftOutcome("sql", 0, 20, 16)])
    bring(world, 2)
    assert not rounds.tick()  # two new records are too few for a plateau
    distiller = rounds.candidate("sql")._distiller
    assert distiller._rate(distiller.steps) < 0.5
    for _ in range(60):
        registry.report([DraftOutcome("sql", 0, 20, 4)])
    steps = distiller.steps
    assert rounds.tick()
    assert distiller._rate(steps) == 1.0  # the round began at the full rate again
    [drift] = [d for d in registry.history("sql") if d["outcome"] == "drift"]
    assert drift["acceptance_fast"] < drift["acceptance_slow"] - 0.08


@pytest.mark.usefixtures("deepspeed")
def test_a_round_keeps_what_it_has_learnt_where_the_registry_takes_nothing_now(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path, canary=CanarySettings(least_trial_s=1e6))
    registry = world.registry
    assert registry is not None
    rounds = make_rounds(trainer_settings(draft, round_seconds=0.3), world)
    publish = world.publish

    def closed(*_: Any) -> int:
        raise NotNow("sql: the one before has only just gone on trial")

    world.publish = closed  # type: ignore[method-assign]  # after the trainer has looked
    assert rounds.tick()
    assert rounds.progress.state == "not publishing"
    own = rounds.candidate("sql")
    steps = own.steps
    assert (steps > 0, own.rejections, own.version) == (True, 0, 0)
    world.publish = publish  # type: ignore[method-assign]
    bring(world, 5)
    assert rounds.tick()
    assert own.steps > steps
    assert registry.live()["sql"]["candidate"] == own.version == 1
    steps = own.steps
    bring(world, 5)
    assert rounds.tick()  # now it sees beforehand that nothing is taken
    assert rounds.progress.state == "not publishing"
    assert own.steps > steps
