"""Whole rounds with real shards, registry, DeepSpeed and a tiny draft, in one process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lessons import TINY_VOCAB, lesson
from tiny_models import tiny_llama

from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.replay.table import ReplaySettings
from paceline.actors.training.distiller import DistillerSettings
from paceline.actors.training.ops import forbid_compiling, prepare_environment
from paceline.actors.training.rounds import Rounds, Stopped
from paceline.actors.training.schedule import ScheduleSettings
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.weights.flat import FlatWeights, unflatten
from paceline.actors.weights.registry import WeightRegistry

TOPICS = ("sql", "general")


class LocalWorld:
    """The real shards and registry, called directly."""

    def __init__(self, directory: Path) -> None:
        settings = ReplaySettings(held_out_fraction=0.3)
        self.shards = {
            topic: ReplayShard(topic, settings, seed=0, clock=lambda: 0.0) for topic in TOPICS
        }
        self.registry: WeightRegistry | None = WeightRegistry(
            str(directory), TOPICS, {}, "mark", put=lambda x: x
        )
        self.leave: Callable[[], bool] = lambda: True

    def stats(self) -> dict[str, dict[str, Any]]:
        return {topic: shard.stats() for topic, shard in self.shards.items()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        return [decode(data) for data in self.shards[topic].sample(count, split)]

    def may_train(self) -> bool:
        return self.leave()

    def versions(self) -> dict[str, int] | None:
        return self.registry.current() if self.registry else None

    def weights(self, topic: str) -> tuple[int, FlatWeights] | None:
        assert self.registry is not None
        news = asyncio.run(self.registry.wait_newer({}, 0.01))
        return (news[topic][0], news[topic][1][0]) if topic in news else None

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        if self.registry is None:
            raise ConnectionError("the registry is dead")
        return self.registry.publish(topic, flat, decision)

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        if self.registry is not None:
            self.registry.reject(topic, decision)


@pytest.fixture(scope="module", autouse=True)
def _deepspeed() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        patch.delenv(name, raising=False)
    prepare_environment()
    forbid_compiling()
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    patch.undo()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(path)
    return path


def trainer_settings(draft: Path, **changes: Any) -> TrainerSettings:
    base = TrainerSettings(
        draft_paths=dict.fromkeys(TOPICS, str(draft)),
        distiller=DistillerSettings(learning_rate=5e-3, dtype="float32"),
        schedule=ScheduleSettings(min_train=4, min_held_out=3),
        round_seconds=0.6,
        poll_s=0.001,
        seed=0,
    )
    return dataclasses.replace(base, **changes)


class Ticks:
    """A clock on which every micro-step takes 10 ms, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


def make_rounds(settings: TrainerSettings, world: LocalWorld, **more: Any) -> Rounds:
    return Rounds(settings, world, clock=Ticks(), **more)


def filled(directory: Path, records: int = 80) -> LocalWorld:
    world = LocalWorld(directory)
    for number in range(records):
        world.shards["sql"].insert(encode(lesson(number)))
    return world


def test_learns_and_publishes_what_is_better(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    rounds = make_rounds(trainer_settings(draft), world)
    for _ in range(3):
        assert rounds.tick()
    assert world.registry is not None
    history = world.registry.history("sql")
    assert history[0]["outcome"] == "published"
    assert history[-1]["candidate_expected_acceptance"] > 0.8
    assert history[0]["served_expected_acceptance"] < 0.3
    version, flat = world.weights("sql") or (0, None)
    assert version == world.registry.current()["sql"] >= 1
    assert flat is not None
    assert {t.dtype for t in unflatten(flat).values()} == {torch.bfloat16}
    assert rounds.progress.published + rounds.progress.rejected == rounds.progress.rounds


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_in_either_dtype(draft: Path, tmp_path: Path, dtype: str) -> None:
    distiller = DistillerSettings(learning_rate=5e-3, dtype=dtype)
    rounds = make_rounds(trainer_settings(draft, distiller=distiller), filled(tmp_path))
    candidate = rounds.candidate("sql")
    batch = [lesson(n) for n in range(16)]
    losses = [candidate.learn(batch).loss for _ in range(80)]
    assert losses[-1] < 0.4 * losses[0]
    assert candidate.steps == 80


def test_a_restarted_trainer_goes_on_from_the_published_weights(
    draft: Path, tmp_path: Path
) -> None:
    world = filled(tmp_path)
    make_rounds(trainer_settings(draft), world).tick()
    assert world.registry is not None
    published = world.registry.history("sql")[-1]
    again = make_rounds(trainer_settings(draft, round_seconds=0.05), world)
    again.tick()
    assert again.candidate("sql").version >= published["version"] == 1
    served = world.registry.history("sql")[-1]["served_expected_acceptance"]
    # the held-out sample is the same, so the served draft scores what the gate saw
    assert served == pytest.approx(published["candidate_expected_acceptance"], abs=0.02)


def test_what_is_not_better_is_rejected_then_reset_then_rests(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    no_learning = DistillerSettings(learning_rate=0.0, dtype="float32")
    schedule = ScheduleSettings(min_train=4, min_held_out=3, min_new=1, max_rejections=2)
    rounds = make_rounds(
        trainer_settings(draft, distiller=no_learning, schedule=schedule, round_seconds=0.05), world
    )
    assert rounds.tick()
    assert not rounds.tick() or rounds.progress.rejected == 2  # general may have its turn
    world.shards["sql"].insert(encode(lesson(1_000)))
    while rounds.tick():
        pass
    assert world.registry is not None
    assert set(world.registry.current().values()) == {0}
    assert {d["outcome"] for d in world.registry.history()} == {"rejected"}
    assert rounds.candidate("sql").rejections == 2
    assert rounds.candidate("sql").steps == 0  # the candidate was given up


def test_no_micro_step_without_leave(draft: Path, tmp_path: Path) -> None:
    world = filled(tmp_path)
    asked: list[int] = []
    stop = False

    def leave() -> bool:
        nonlocal stop
        asked.append(1)
        stop = len(asked) >= 5
        return False

    world.leave = leave
    rounds = make_rounds(
        trainer_settings(draft), world, sleep=lambda _seconds: None, stopped=lambda: stop
    )
    with pytest.raises(Stopped):
        rounds.tick()
    assert len(asked) == 5
    assert rounds.progress.micro_steps == 0


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
    rounds = make_rounds(trainer_settings(draft), world)
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
