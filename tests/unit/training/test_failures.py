"""Rounds where something is missing, broken or dead: others go on, and nothing turns in a loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import TINY_VOCAB, lesson
from local_world import TOPICS, LocalWorld, fill, filled, make_rounds, trainer_settings

from paceline.actors.replay.record import ReplayRecord, encode, is_held_out
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.training_loop import Rounds
from paceline.actors.weights.flat_weights import FlatWeights, flatten
from paceline.actors.weights.notifications import SlotWeights
from paceline.actors.weights.registry import WeightRegistry

pytestmark = pytest.mark.usefixtures("deepspeed")


def out_of_vocabulary(number: int) -> ReplayRecord:
    record = lesson(number)
    return dataclasses.replace(record, output_token_ids=record.output_token_ids + TINY_VOCAB)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_topic_without_usable_records_rests_and_does_not_train(
    draft: Path, tmp_path: Path, split: str
) -> None:
    """All records of one split are unusable; the other split's are good."""
    world = LocalWorld(tmp_path)
    for number in range(60):
        record = lesson(number)
        spoilt = is_held_out(record.prompt_token_ids, 0.3) == (split == "held_out")
        world.shards["sql"].insert(encode(out_of_vocabulary(number) if spoilt else record))
    drawn: list[str] = []
    sample = world.sample

    def counted(topic: str, count: int, split: Any) -> list[ReplayRecord]:
        drawn.append(split)
        return sample(topic, count, split)

    world.sample = counted  # type: ignore[method-assign]
    rounds = make_rounds(trainer_settings(draft), world)
    assert not any(rounds.tick() for _ in range(50))
    assert rounds.progress.micro_steps == 0
    # sql and general once or twice each in the first second, then they rest
    assert len(drawn) <= 10


class StuckWorld(LocalWorld):
    """Nobody hands out what was published for sql."""

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        return None if topic == "sql" else super().weights(topic)


def test_a_stuck_topic_does_not_stop_the_others(draft: Path, tmp_path: Path) -> None:
    topics = ("sql", "shell")
    world = StuckWorld(tmp_path, topics)
    fill(world, topics, 60)
    assert world.registry is not None
    stuck = make_rounds(trainer_settings(draft, topics=topics), LocalWorld(tmp_path / "x", topics))
    world.registry.publish("sql", stuck.candidate("sql").flat(initial(stuck)), {})
    rounds = make_rounds(trainer_settings(draft, topics=topics), world)
    for _ in range(6):
        rounds.tick()
    assert world.registry.current()["shell"] >= 1
    assert world.registry.current()["sql"] == 1


def initial(rounds: Rounds) -> dict[str, torch.Tensor]:
    return rounds.candidate("sql").compare([lesson(0)], lambda: None)[2]


@pytest.mark.parametrize("broken", ["folder", "weights"])
def test_a_topic_whose_round_raises_does_not_stop_the_others(
    draft: Path, tmp_path: Path, broken: str
) -> None:
    topics = ("sql", "shell")
    world = LocalWorld(tmp_path, topics)
    fill(world, topics, 60)
    assert world.registry is not None
    settings = trainer_settings(draft, topics=topics)
    if broken == "folder":
        paths = {"sql": str(tmp_path / "nowhere"), "shell": str(draft)}
        settings = dataclasses.replace(settings, draft_paths=paths)
    else:
        world.registry.publish("sql", flatten({"other": torch.zeros(3)}), {})
    rounds = make_rounds(settings, world)
    failed = 0
    for _ in range(6):
        try:
            rounds.tick()
        except (OSError, ValueError):
            failed += 1
    assert 1 <= failed <= 3
    assert world.registry.current()["shell"] >= 1


def test_lost_weights_are_replaced_from_the_initial_ones_and_versions_go_on(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path)
    assert make_rounds(trainer_settings(draft), world).tick()
    for file in (tmp_path / "mark" / "sql").glob("*.safetensors"):
        file.unlink()
    world.registry = WeightRegistry(str(tmp_path), TOPICS, "mark", put=lambda x: x)
    assert world.registry.stable_weights("sql") == SlotWeights(1)
    rounds = make_rounds(trainer_settings(draft), world)
    assert rounds.tick()
    assert world.registry.current()["sql"] == 2
    assert world.registry.history("sql")[-1]["served_expected_acceptance"] < 0.3


def test_a_loss_that_is_no_number_ends_the_round_and_drops_the_candidate(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path)
    wild = DistillerSettings(learning_rate=1e36, warmup_steps=1, dtype="float32")
    rounds = make_rounds(trainer_settings(draft, distiller=wild), world)
    before = initial(rounds)
    assert rounds.tick()
    assert world.registry is not None
    [decision] = world.registry.history("sql")
    assert decision["outcome"] == "rejected"
    assert decision["reason"] == "the training loss is not finite"
    assert world.registry.current()["sql"] == 0
    assert rounds.progress.loss is None
    assert rounds.progress.micro_steps < 5  # a round has 60
    assert rounds.candidate("sql").steps == 0
    after = initial(rounds)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    json.dumps(dataclasses.asdict(rounds.progress), allow_nan=False)
    assert not rounds.tick() or rounds.progress.topic == "general"  # sql wants new records first


def test_a_dead_registry_costs_a_round_and_no_more(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    rounds = make_rounds(trainer_settings(draft), world)
    registry, world.registry = world.registry, None
    assert not rounds.tick()
    world.registry = registry
    assert rounds.tick()
    assert registry is not None
    assert registry.current()["sql"] == 1


def test_a_publication_that_was_not_confirmed_is_found_again(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    # by the next tick the rest after the failure is over
    schedule = ScheduleSettings(min_train=4, min_held_out=3, rest_s=0.001)
    rounds = make_rounds(trainer_settings(draft, schedule=schedule), world)
    publish = world.publish

    def unconfirmed(topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        publish(topic, flat, decision)
        raise ConnectionError("the answer was lost")

    world.publish = unconfirmed  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        rounds.tick()
    assert rounds.candidate("sql").version == 0
    world.publish = publish  # type: ignore[method-assign]
    rounds.tick()
    assert world.registry is not None
    assert rounds.candidate("sql").version == world.registry.current()["sql"] >= 1
