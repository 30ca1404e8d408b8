"""Trainers gone bad: what they do to live acceptance is bounded by the canary, and undone."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from canaries import Serving, mean_rate
from local_client import LocalClient, fill, filled, make_loop, trainer_settings
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record

from paceline.actors.replay.record import encode
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.cooldown import CandidateRefusedError
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten, load_model
from paceline.actors.weights.registry import WeightRegistry

SHARE = 0.25
NEW = itertools.count()
CANARY = CanarySettings(cooldown_s=0.0, min_trial_s=0.0)  # the registry gives no respite


def bring(client: LocalClient, count: int) -> None:
    """New records of the topic."""
    for _ in range(count):
        client.shards["sql"].insert(encode(training_record(900 + next(NEW))))


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
        if serving.registry.topic_status()["sql"].candidate is None:
            serving.registry.publish("sql", noise(start, 0.5), {"forged": True})
            published += 1
        serving.serve(prompts(16, start))
        clean.serve(prompts(16, start))
        assert serving.registry.stable_versions() == {"sql": 0}
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
    assert max(d["canary_requests"] for d in gone) <= 8 + 8  # a batch at a time


@pytest.mark.full
def test_a_little_worse_again_and_again_is_not_let_through(tmp_path: Path) -> None:
    """Harm by small steps: every candidate is a bit worse than what is served."""
    serving = Serving(model(), lambda: model(), 0.5, canaried(tmp_path))
    for start in range(0, 480, 16):
        if serving.registry.topic_status()["sql"].candidate is None:
            serving.registry.publish("sql", noise(start, 0.06), {"forged": True})
        serving.serve(prompts(16, start))
    assert mean_rate([r for r in serving.rates if r[0] == 0]) > 0.99
    assert serving.registry.stable_versions() == {"sql": 0}


@pytest.mark.usefixtures("deepspeed")
def test_a_trainer_of_garbage_labels_is_undone_and_starts_from_what_is_served(
    draft: Path, tmp_path: Path
) -> None:
    """All records say what the target never says: training and gate are both deceived."""
    client = filled(tmp_path, canary=CANARY)
    assert client.registry is not None
    serving = Serving(model(), model, 0.5, client.registry)
    loop = make_loop(trainer_settings(draft), client)
    assert loop.run_round()
    deceived = client.registry.history("sql")[-1]
    assert deceived["gain_lower_bound"] > 0.3
    assert deceived["gain_lower_bound"] < deceived["gain_upper_bound"]
    assert loop.candidate("sql").version == 1
    serving.serve(prompts(48))
    assert client.registry.stable_versions()["sql"] == 0
    last = client.registry.history("sql")[-1]
    assert last["outcome"] == "rolled_back"
    assert last["difference_upper_bound"] < 0.0
    assert mean_rate(serving.rates[-16:]) > 0.99  # the harm is over
    assert {version for version, _ in serving.rates[-16:]} == {0}
    bring(client, 4)
    assert loop.run_round()
    assert client.registry.stable_versions()["sql"] == 0
    again = client.registry.history("sql")[-1]  # compared with the served draft, not with itself
    before = deceived["served_expected_acceptance"]
    assert again["served_expected_acceptance"] == pytest.approx(before, abs=0.05)
    assert loop.candidate("sql").version in (0, 2)
    versions = [d["version"] for d in client.registry.history("sql") if d.get("canary")]
    assert versions == sorted(set(versions))


@pytest.mark.full
@pytest.mark.usefixtures("deepspeed")
def test_a_topic_rests_after_rollbacks_in_a_row(draft: Path, tmp_path: Path) -> None:
    client = LocalClient(tmp_path, ("sql",), canary=CANARY)
    fill(client, ("sql",), 80)
    registry = client.registry
    assert registry is not None
    settings = trainer_settings(draft, ("sql",), round_seconds=0.3)
    loop = make_loop(settings, client)
    for number in range(1, settings.schedule.max_rejections + 1):
        bring(client, settings.schedule.min_new)
        assert loop.run_round()
        assert registry.topic_status()["sql"].candidate == number
        for _ in range(4):
            registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 16), (number, 2))])
        assert registry.topic_status()["sql"].candidate is None
    bring(client, settings.schedule.min_new)
    assert not loop.run_round()  # enough for a rejected candidate, not for a plateau
    bring(client, 40)
    assert loop.run_round()


class Poisoned(LocalClient):
    """Weights spoil on their way to the registry."""

    def publish(
        self, topic: str, flat: FlatWeights, decision: dict[str, Any], base: int | None = None
    ) -> int:
        array = next(iter(flat.arrays.values()))
        array[len(array) // 2] = 0x7FC0 if array.dtype.kind == "u" else math.nan
        return super().publish(topic, flat, decision, base)


@pytest.mark.usefixtures("deepspeed")
def test_weights_with_a_nan_are_refused_and_the_trainer_starts_again(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    client.__class__ = Poisoned
    loop = make_loop(trainer_settings(draft), client)
    assert loop.run_round()
    assert client.registry is not None
    assert [d["outcome"] for d in client.registry.history("sql")] == ["refused"]
    assert client.registry.stable_versions()["sql"] == 0
    assert loop.candidate("sql").steps == 0
    assert loop.progress.rejected == 1


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("rate", [30.0, 1e3])
def test_an_exploding_rate_publishes_nothing(draft: Path, tmp_path: Path, rate: float) -> None:
    wild = DistillerSettings(learning_rate=rate, warmup_steps=1, dtype="float32")
    client = filled(tmp_path, canary=CANARY)
    loop = make_loop(trainer_settings(draft, distiller=wild, round_seconds=0.2), client)
    for _ in range(4):
        loop.run_round()
    assert client.registry is not None
    assert {d["outcome"] for d in client.registry.history()} == {"rejected"}


@pytest.mark.usefixtures("deepspeed")
def test_training_goes_on_while_a_canary_is_undecided_and_publishes_after_it(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path, canary=CANARY)
    registry = client.registry
    assert registry is not None
    loop = make_loop(trainer_settings(draft, round_seconds=0.3), client)
    assert loop.run_round()
    steps = loop.candidate("sql").steps
    registry.report([DraftOutcome("sql", 1, 20, 12)])
    bring(client, 5)  # new records: a topic on trial is trained on with nothing else
    assert loop.run_round()
    assert loop.progress.state == "waiting for the canary"
    assert loop.candidate("sql").steps > steps
    assert registry.topic_status()["sql"].candidate == 1
    for _ in range(8):
        registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 2), (1, 16))])
    assert registry.stable_versions()["sql"] == 1
    steps = loop.candidate("sql").steps
    loop.run_round()
    assert loop.candidate("sql").version >= 1
    assert loop.candidate("sql").steps >= steps  # from where it was


@pytest.mark.usefixtures("deepspeed")
def test_a_rollback_in_the_midst_of_a_round_is_followed_and_counts(
    draft: Path, tmp_path: Path
) -> None:
    """The next candidate neither starts from withdrawn weights nor is compared with them."""
    client = filled(tmp_path, canary=CANARY)
    registry = client.registry
    assert registry is not None
    loop = make_loop(trainer_settings(draft, round_seconds=0.3), client)
    assert loop.run_round()
    assert registry.topic_status()["sql"].candidate == 1
    registry.report([DraftOutcome("sql", 1, 20, 2)])  # it has a request: it is not replaced
    bring(client, 5)

    def permit() -> bool:  # asked for before every micro-step
        if registry.topic_status()["sql"].candidate is not None:
            registry.report([DraftOutcome("sql", v, 20, a) for v, a in ((0, 16), (1, 2))])
        return True

    client.permitted = permit
    assert loop.run_round()
    assert loop.progress.state == "rolled back"
    assert [d["version"] for d in registry.history("sql") if d.get("canary")] == [1]
    bring(client, 5)
    assert loop.run_round()
    again = registry.history("sql")[-1]
    assert again["served_expected_acceptance"] < 0.5  # the stable draft's, not the withdrawn one's
    first = next(d for d in registry.history("sql") if d["version"] == 1)
    assert again["served_expected_acceptance"] == pytest.approx(
        first["served_expected_acceptance"], abs=0.1
    )


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("learns", [True, False])
def test_what_an_operator_has_rolled_back_is_neither_a_measure_nor_followed(
    draft: Path, tmp_path: Path, learns: bool
) -> None:
    """A candidate that was compared with withdrawn weights is not published nor rejected."""
    client = filled(tmp_path)
    registry = client.registry
    assert registry is not None
    for _ in range(2):
        registry.publish("sql", load_model(draft), {})
    loop = make_loop(trainer_settings(draft, round_seconds=0.3), client)
    if not learns:
        loop.candidate("sql").scale_rate(1e-6)

    def permit() -> bool:
        if loop.progress.state == "evaluating" and registry.stable_versions()["sql"] == 2:
            assert registry.roll_back("sql", 1, 2) == 3
        return True

    client.permitted = permit
    known = len(registry.history("sql"))
    assert loop.run_round()
    assert [d["outcome"] for d in registry.history("sql")[known:]] == ["rolled_back"]
    assert loop.progress.state == "rolled back"
    assert loop._topics.state("sql").counts.rejections == 0
    bring(client, 5)
    assert loop.run_round()
    assert loop.candidate("sql").version >= 3


@pytest.mark.usefixtures("deepspeed")
def test_drift_of_live_requests_is_noted_and_ends_a_plateau(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    registry = client.registry
    assert registry is not None
    no_learning = DistillerSettings(
        learning_rate=0.0, warmup_steps=1, rate_hold_steps=1, dtype="float32"
    )
    schedule = ScheduleSettings(
        min_train=4, min_held_out=3, min_new=2, max_rejections=1, least_hope=0.015
    )
    loop = make_loop(
        trainer_settings(draft, distiller=no_learning, schedule=schedule, round_seconds=0.05),
        client,
    )
    while loop.run_round():
        pass
    for _ in range(200):
        registry.report([DraftOutcome("sql", 0, 20, 16)])
    bring(client, 2)
    assert not loop.run_round()  # two new records are too few for a plateau
    distiller = loop.candidate("sql")._distiller
    assert distiller._rate(distiller.steps) < 0.5
    for _ in range(60):
        registry.report([DraftOutcome("sql", 0, 20, 4)])
    steps = distiller.steps
    assert loop.run_round()
    assert distiller._rate(steps) == 1.0  # the round began at the full rate again
    [drift] = [d for d in registry.history("sql") if d["outcome"] == "drift"]
    assert drift["acceptance_fast"] < drift["acceptance_slow"] - 0.08


@pytest.mark.usefixtures("deepspeed")
def test_a_round_keeps_what_it_has_learnt_where_the_registry_takes_nothing_now(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path, canary=CanarySettings(min_trial_s=1e6))
    registry = client.registry
    assert registry is not None
    loop = make_loop(trainer_settings(draft, round_seconds=0.3), client)
    publish = client.publish

    def closed(*_: Any) -> int:
        raise CandidateRefusedError("sql: the one before has only just gone on trial")

    client.publish = closed  # type: ignore[method-assign]  # after the trainer has looked
    assert loop.run_round()
    assert loop.progress.state == "not publishing"
    own = loop.candidate("sql")
    steps = own.steps
    assert (steps > 0, own.version) == (True, 0)
    assert loop._topics.state("sql").counts.rejections == 0
    client.publish = publish  # type: ignore[method-assign]
    bring(client, 5)
    assert loop.run_round()
    assert own.steps > steps
    assert registry.topic_status()["sql"].candidate == own.version == 1
    steps = own.steps
    bring(client, 5)
    assert loop.run_round()  # now it sees beforehand that nothing is taken
    assert loop.progress.state == "not publishing"
    assert own.steps > steps
