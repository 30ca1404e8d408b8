"""A trainer's client in one process: real shards and registry, called directly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training_records import training_record

from paceline.actors.replay.buffer import ReplaySettings, ShardStats
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.permits import Assignment, TopicProgress
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings, TopicPriority, select_topic
from paceline.actors.training.training_loop import TrainingLoop
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.flat_weights import FlatWeights
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.versions import TopicStatus

TOPICS = ("sql", "general")


class LocalClient:
    """The real shards and registry, called directly."""

    def __init__(
        self,
        directory: Path,
        topics: tuple[str, ...] = TOPICS,
        canary: CanarySettings | None = None,
    ) -> None:
        settings = ReplaySettings(held_out_fraction=0.3)
        self.shards = {
            topic: ReplayShard(topic, settings, seed=0, clock=lambda: 0.0) for topic in topics
        }
        self.registry: WeightRegistry | None = WeightRegistry(
            str(directory), topics, "mark", canary=canary, put=lambda x: x
        )
        self.permitted: Callable[[], bool] = lambda: True

    def stats(self) -> dict[str, ShardStats]:
        return {topic: shard.stats() for topic, shard in self.shards.items()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        return [decode(data) for data in self.shards[topic].sample(count, split)]

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        self.shards[topic].update_losses(losses)

    def topic_progress(self) -> dict[str, TopicProgress]:
        return {}

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        return Assignment(select_topic(wanted))

    def release_permit(self) -> None:
        pass

    def release_topic(self, progress: TopicProgress | None) -> None:
        pass

    def acquire_permit(self) -> bool:
        return self.permitted()

    def until_idle(self) -> None:
        pass

    def versions(self) -> dict[str, int] | None:
        return self.registry.stable_versions() if self.registry else None

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        assert self.registry is not None
        stable = self.registry.stable_weights(topic)
        return stable.weight_version, stable.reference

    def publish(
        self, topic: str, flat: FlatWeights, decision: dict[str, Any], base: int | None = None
    ) -> int:
        if self.registry is None:
            raise ConnectionError("the registry is dead")
        return self.registry.publish(topic, flat, decision, base)

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        if self.registry is not None:
            self.registry.reject(topic, decision)

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        if self.registry is not None:
            self.registry.record_decision(topic, decision)

    def added_topics(self) -> dict[str, str]:
        topics = self.registry.topics().topics if self.registry else ()
        return {topic.name: topic.like for topic in topics}

    def topic_status(self) -> dict[str, TopicStatus] | None:
        return self.registry.topic_status() if self.registry else None


def trainer_settings(
    draft: Path, topics: tuple[str, ...] = TOPICS, **changes: Any
) -> TrainerSettings:
    base = TrainerSettings(
        draft_paths=dict.fromkeys(topics, str(draft)),
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


def make_loop(settings: TrainerSettings, client: LocalClient, **more: Any) -> TrainingLoop:
    return TrainingLoop(settings, client, clock=Ticks(), **more)


def filled(directory: Path, records: int = 80, canary: CanarySettings | None = None) -> LocalClient:
    client = LocalClient(directory, canary=canary)
    fill(client, ("sql",), records)
    return client


def fill(client: LocalClient, topics: tuple[str, ...], records: int) -> None:
    """Insert the same records into the topics' shards."""
    for number in range(records):
        for topic in topics:
            client.shards[topic].insert(encode(training_record(number)))
