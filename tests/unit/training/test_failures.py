"""Rounds where something is missing, broken or dead: others go on, and nothing turns in a loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from local_client import TOPICS, LocalClient, fill, filled, make_loop, trainer_settings
from training_records import TINY_VOCAB, training_record

from paceline.actors.replay.record import ReplayRecord, encode, is_held_out
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.training_loop import TrainingLoop
from paceline.actors.weights.flat_weights import FlatWeights, flatten
from paceline.actors.weights.notifications import SlotWeights
from paceline.actors.weights.registry import WeightRegistry

pytestmark = pytest.mark.usefixtures("deepspeed")


def out_of_vocabulary(number: int) -> ReplayRecord:
    record = training_record(number)
    return dataclasses.replace(record, output_token_ids=record.output_token_ids + TINY_VOCAB)


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_a_topic_without_usable_records_rests_and_does_not_train(
    draft: Path, tmp_path: Path, split: str
) -> None:
    """All records of one split are unusable; the other split's are good."""
    client = LocalClient(tmp_path)
    for number in range(60):
        record = training_record(number)
        spoilt = is_held_out(record.conversation, 0.3) == (split == "held_out")
        client.shards["sql"].insert(encode(out_of_vocabulary(number) if spoilt else record))
    drawn: list[str] = []
    sample = client.sample

    def counted(topic: str, count: int, split: Any) -> list[ReplayRecord]:
        drawn.append(split)
        return sample(topic, count, split)

    client.sample = counted  # type: ignore[method-assign]
    loop = make_loop(trainer_settings(draft), client)
    assert not any(loop.run_round() for _ in range(50))
    assert loop.progress.micro_steps == 0
    # sql and general once or twice each in the first second, then they rest
    assert len(drawn) <= 10


class StuckWorld(LocalClient):
    """The weights published for sql cannot be fetched."""

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        return None if topic == "sql" else super().weights(topic)


def test_a_stuck_topic_does_not_stop_the_others(draft: Path, tmp_path: Path) -> None:
    topics = ("sql", "shell")
    client = StuckWorld(tmp_path, topics)
    fill(client, topics, 60)
    assert client.registry is not None
    stuck = make_loop(trainer_settings(draft, topics=topics), LocalClient(tmp_path / "x", topics))
    client.registry.publish("sql", flatten(initial(stuck)), {})
    loop = make_loop(trainer_settings(draft, topics=topics), client)
    for _ in range(6):
        loop.run_round()
    assert client.registry.stable_versions()["shell"] >= 1
    assert client.registry.stable_versions()["sql"] == 1


def initial(loop: TrainingLoop) -> dict[str, torch.Tensor]:
    return loop.candidate("sql").compare([training_record(0)], lambda: None).state


@pytest.mark.parametrize("broken", ["folder", "weights"])
def test_a_round_that_raises_does_not_stop_other_topics(
    draft: Path, tmp_path: Path, broken: str
) -> None:
    topics = ("sql", "shell")
    client = LocalClient(tmp_path, topics)
    fill(client, topics, 60)
    assert client.registry is not None
    settings = trainer_settings(draft, topics=topics)
    if broken == "folder":
        paths = {"sql": str(tmp_path / "nowhere"), "shell": str(draft)}
        settings = dataclasses.replace(settings, draft_paths=paths)
    else:
        client.registry.publish("sql", flatten({"other": torch.zeros(3)}), {})
    loop = make_loop(settings, client)
    failed = 0
    for _ in range(6):
        try:
            loop.run_round()
        except (OSError, ValueError):
            failed += 1
    assert 1 <= failed <= 3
    assert client.registry.stable_versions()["shell"] >= 1


def test_lost_weights_are_replaced_from_the_initial_ones_and_versions_go_on(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    assert make_loop(trainer_settings(draft), client).run_round()
    for file in (tmp_path / "mark" / "sql").glob("*.safetensors"):
        file.unlink()
    client.registry = WeightRegistry(str(tmp_path), TOPICS, "mark", put=lambda x: x)
    assert client.registry.stable_weights("sql") == SlotWeights(1)
    loop = make_loop(trainer_settings(draft), client)
    assert loop.run_round()
    assert client.registry.stable_versions()["sql"] == 2
    assert client.registry.history("sql")[-1]["served_expected_acceptance"] < 0.3


def test_a_loss_that_is_no_number_ends_the_round_and_drops_the_candidate(
    draft: Path, tmp_path: Path
) -> None:
    client = filled(tmp_path)
    wild = DistillerSettings(learning_rate=1e36, warmup_steps=1, dtype="float32")
    loop = make_loop(trainer_settings(draft, distiller=wild), client)
    before = initial(loop)
    assert loop.run_round()
    assert client.registry is not None
    [decision] = client.registry.history("sql")
    assert decision["outcome"] == "rejected"
    assert decision["reason"] == "the training loss is not finite"
    assert client.registry.stable_versions()["sql"] == 0
    assert loop.progress.loss is None
    assert loop.progress.micro_steps < 5  # a round has 60
    assert loop.candidate("sql").steps == 0
    after = initial(loop)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    json.dumps(dataclasses.asdict(loop.progress), allow_nan=False)
    assert not loop.run_round() or loop.progress.topic == "general"  # sql wants new records first


def test_a_dead_registry_costs_a_round_and_no_more(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    loop = make_loop(trainer_settings(draft), client)
    registry, client.registry = client.registry, None
    assert not loop.run_round()
    client.registry = registry
    assert loop.run_round()
    assert registry is not None
    assert registry.stable_versions()["sql"] == 1


def test_a_publication_that_was_not_confirmed_is_found_again(draft: Path, tmp_path: Path) -> None:
    client = filled(tmp_path)
    # by the next tick the rest after the failure is over
    schedule = ScheduleSettings(min_train=4, min_held_out=3, rest_s=0.001)
    loop = make_loop(trainer_settings(draft, ("sql",), schedule=schedule), client)
    publish = client.publish

    def unconfirmed(topic: str, flat: FlatWeights, decision: dict[str, Any], base: int) -> int:
        publish(topic, flat, decision, base)
        raise ConnectionError("the answer was lost")

    client.publish = unconfirmed  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        loop.run_round()
    assert loop.candidate("sql").version == 0
    client.publish = publish  # type: ignore[method-assign]
    loop.run_round()
    assert client.registry is not None
    assert loop.candidate("sql").version == client.registry.stable_versions()["sql"] >= 1
