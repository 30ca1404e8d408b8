"""The registry's subscriber against a real registry, called in this process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicsView


class Handle:
    """An actor handle whose calls run at once; a dead one raises."""

    def __init__(self, registry: WeightRegistry) -> None:
        self.registry = registry
        self.dead = False
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: Any) -> Any:
            self.calls += 1
            if self.dead:
                raise ConnectionError("the registry is dead")
            found = getattr(self.registry, name)(*arguments)
            return asyncio.run(found) if asyncio.iscoroutine(found) else found

        return SimpleNamespace(remote=remote)


@pytest.fixture(autouse=True)
def _local_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegistrySubscriber, "get", lambda _self, found, _timeout_s: found)


@pytest.fixture
def handle(tmp_path: Path) -> Handle:
    canary = CanarySettings(min_trial_s=0.0)
    return Handle(
        WeightRegistry(str(tmp_path), ("sql", "general"), "aa", canary=canary, put=lambda x: x)
    )


def weights(value: float) -> FlatWeights:
    return flatten({"w": torch.full((2,), value)})


class Replica:
    """What a subscriber has loaded; a slot named in ``broken`` raises."""

    def __init__(self) -> None:
        self.slots: dict[str, tuple[int, float | None]] = {}
        self.topics: list[str] = []
        self.broken: set[str] = set()
        self.loads = 0

    def load(self, slot: str, version: int, state: Any) -> None:
        self.loads += 1
        if slot in self.broken:
            raise RuntimeError("no memory")
        self.slots[slot] = version, None if state is None else float(state["w"][0])

    def take_topics(self, view: TopicsView) -> None:
        self.topics = [topic.name for topic in view.topics]
        if "topics" in self.broken:
            raise RuntimeError("no shard")


def test_weights_and_topics_arrive_once(handle: Handle) -> None:
    replica = Replica()
    own = RegistrySubscriber(handle, on_topics=replica.take_topics, on_weights=replica.load)
    handle.registry.publish("sql", weights(1.0), {})
    assert own.poll(0.0)
    assert replica.slots == {"sql@candidate": (1, 1.0)}
    handle.registry.roll_back("sql")
    assert own.poll(0.0)
    assert replica.slots == {"sql@candidate": (0, None)}
    loads = replica.loads
    assert own.poll(0.0)
    assert replica.loads == loads


def test_a_topic_arrives_before_its_weights(tmp_path: Path) -> None:
    handle = Handle(WeightRegistry(str(tmp_path), ("general",), "aa", put=lambda x: x))
    handle.registry.publish("general", weights(1.0), {})
    handle.registry.add_topic("geo", "general")
    replica = Replica()
    topics_at_load: dict[str, list[str]] = {}

    def load(slot: str, version: int, _state: Any) -> None:
        topics_at_load[slot] = replica.topics
        assert version == 1

    assert RegistrySubscriber(handle, on_topics=replica.take_topics, on_weights=load).poll(0.0)
    assert topics_at_load == {"general": ["geo"], "geo": ["geo"]}


def test_what_fails_is_repeated_and_holds_up_nothing_else(handle: Handle) -> None:
    replica = Replica()
    replica.broken = {"topics", "sql@candidate"}
    own = RegistrySubscriber(handle, on_topics=replica.take_topics, on_weights=replica.load)
    handle.registry.publish("sql", weights(1.0), {})
    assert not own.poll(0.0)
    replica.broken = {"topics"}
    assert not own.poll(0.0)
    assert replica.slots == {"sql@candidate": (1, 1.0)}
    replica.broken = set()
    assert own.poll(0.0)
    assert own.poll(0.0)
    assert replica.loads == 2


def test_one_experts_weights_alone_are_loaded(handle: Handle) -> None:
    replica = Replica()
    own = RegistrySubscriber(handle, on_weights=replica.load, expert="general")
    handle.registry.publish("sql", weights(1.0), {})
    handle.registry.publish("general", weights(2.0), {})
    assert own.poll(0.0)
    assert own.poll(0.0)
    assert replica.slots == {"general@candidate": (1, 2.0)}


def test_a_failed_candidate_is_reported_until_it_is_withdrawn(handle: Handle) -> None:
    failed = DraftOutcome("sql", 1, 0, 0, failed=True)
    replica = Replica()
    own = RegistrySubscriber(handle, on_weights=replica.load, failed=lambda: [failed])
    assert own.poll(0.0)
    handle.registry.publish("sql", weights(1.0), {})
    assert own.poll(0.0)
    assert handle.registry.topic_status()["sql"].candidate is None
    assert own.poll(0.0)
    calls = handle.calls
    assert own.poll(0.0)
    assert handle.calls == calls + 1  # no further report


def test_a_dead_registry_is_polled_with_backoff_until_it_is_back(handle: Handle) -> None:
    replica = Replica()
    pauses: list[float] = []

    def load(slot: str, version: int, state: Any) -> None:
        replica.load(slot, version, state)
        own._stopped.set()

    own = RegistrySubscriber(handle, on_weights=load)

    class Stopped(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            pauses.append(timeout)
            if len(pauses) == 6:
                handle.dead = False
            return self.is_set()

    own._stopped = Stopped()
    handle.dead = True
    handle.registry.publish("sql", weights(1.0), {})
    own.start()
    own._thread.join(10.0)
    assert replica.slots == {"sql@candidate": (1, 1.0)}
    assert pauses == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
