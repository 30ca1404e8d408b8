"""Topics that come while the registry runs: files, refusals, deaths, announcements."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import tiny_llama

from paceline.actors.weights import topics as added
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.flat_weights import FlatWeights, flatten, unflatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.topics import (
    CATALOGUE_NAME,
    RouterHead,
    StaleRevisionError,
    TopicActors,
    TopicExistsError,
    read_catalogue,
)

TOPICS = ("general", "sql")


def weights(value: float) -> FlatWeights:
    return flatten({"w": torch.full((4,), value, dtype=torch.bfloat16)})


def head(value: float) -> RouterHead:
    return RouterHead({"topics": ["geo"], "base": "b"}, {"weight": np.full((1, 3), value)})


def registry(directory: Path, **more: Any) -> WeightRegistry:
    return WeightRegistry(str(directory), TOPICS, "aa", put=lambda x: x, clock=lambda: 7.0, **more)


def taught(directory: Path, **more: Any) -> WeightRegistry:
    """A registry whose general is at version 1."""
    reg = registry(directory)
    reg.publish("general", weights(3.0), {})
    return registry(directory, **more) if more else reg


def news(reg: WeightRegistry, topic: str) -> tuple[int, float]:
    found = asyncio.run(reg.wait_for_changes({}, None, 0.01)).weights[topic]
    return found.weight_version, float(unflatten(found.reference)["w"][0])


def test_a_topic_starts_as_a_copy_of_what_general_is_served_as(tmp_path: Path) -> None:
    reg = taught(tmp_path)
    assert reg.add_topic("geo", "general", head(1.0), 0) == 1
    assert news(reg, "geo") == (1, 3.0)
    assert reg.stable_versions() == {"general": 1, "sql": 0, "geo": 1}
    assert reg.topic_status()["geo"].stable == 1
    assert reg.history("geo")[-1]["outcome"] == "added"
    assert reg.publish("geo", weights(4.0), {}) == 2
    reg.report([DraftOutcome("geo", 2, 3, 1)])
    assert reg.topic_status()["geo"].requests == 1
    assert news(reg, "general") == (1, 3.0)


def test_what_general_was_loaded_from_is_copied_where_nothing_was_learnt(tmp_path: Path) -> None:
    model = tiny_llama(3, layers=1)
    model.save_pretrained(tmp_path / "draft")
    reg = registry(tmp_path / "state", initial=dict.fromkeys(TOPICS, str(tmp_path / "draft")))
    reg.add_topic("geo", "general")
    for name, own in unflatten(reg.stable_weights("geo").reference).items():
        assert torch.equal(own, model.state_dict()[name])
    assert reg.roll_back("geo", 0) == 2


def test_a_restarted_registry_knows_the_topic_and_the_routers_head(tmp_path: Path) -> None:
    first = taught(tmp_path)
    first.add_topic("geo", "general", head(1.0), 0)
    first.add_topic("law", "general", head(2.0), 1)
    first.publish("geo", weights(4.0), {})
    second = registry(tmp_path, canary=CanarySettings())
    assert second.stable_versions() == {"general": 1, "sql": 0, "geo": 2, "law": 1}
    assert news(second, "geo") == (2, 4.0)
    view = second.topics()
    assert [(t.name, t.like, t.added) for t in view.topics] == [
        ("geo", "general", 7.0),
        ("law", "general", 7.0),
    ]
    assert view.head is not None
    assert view.head.facts == head(2.0).facts
    assert view.head.arrays["weight"].tolist() == [[2.0] * 3]
    assert len(list(tmp_path.glob("router-*.safetensors"))) == 1
    assert second.publish("law", weights(5.0), {}) == 2
    assert second.topic_status()["law"].candidate == 2


def test_what_cannot_be_added_changes_nothing(tmp_path: Path) -> None:
    reg = taught(tmp_path)
    reg.add_topic("geo", "general", head(1.0), 0)
    before = reg.topics().etag, (tmp_path / CATALOGUE_NAME).read_text()
    for name, error in [("geo", TopicExistsError), ("sql", TopicExistsError), ("Geo!", ValueError)]:
        with pytest.raises(error):
            reg.add_topic(name, "general", head(2.0), 1)
    with pytest.raises(StaleRevisionError):
        reg.add_topic("law", "general", head(2.0), 0)
    with pytest.raises(KeyError):
        reg.add_topic("law", "unknown", head(2.0), 1)
    assert (reg.topics().etag, (tmp_path / CATALOGUE_NAME).read_text()) == before
    assert set(reg.stable_versions()) == {"general", "sql", "geo"}


@pytest.mark.parametrize("died", [True, False])
def test_an_addition_that_ends_before_the_catalogue_was_never_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: bool
) -> None:
    """Killed between weights and catalogue, or the disk is full: the name is free."""
    reg = taught(tmp_path)

    def full(*_: object) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(added, "write_catalogue", full)
        with pytest.raises(OSError, match="space"):
            reg.add_topic("geo", "general", head(1.0), 0)
    reg = registry(tmp_path) if died else reg
    assert "geo" not in reg.stable_versions()
    assert reg.topics().topics == ()
    assert "geo" not in asyncio.run(reg.wait_for_changes({}, None, 0.01)).weights
    assert reg.add_topic("geo", "general", head(1.0), 0) == 2  # numbers are not given out twice
    assert news(registry(tmp_path), "geo") == (2, 3.0)


def test_a_torn_catalogue_or_head_costs_the_topics_or_the_router_alone(tmp_path: Path) -> None:
    taught(tmp_path).add_topic("geo", "general", head(1.0), 0)
    (tmp_path / "router-1.safetensors").write_bytes(b"torn")
    again = registry(tmp_path)
    assert again.stable_versions()["geo"] == 1
    assert again.topics().head is None
    for content in ("torn", "[]", json.dumps({"topics": [{"name": "../x"}]})):
        (tmp_path / CATALOGUE_NAME).write_text(content)
        assert read_catalogue(tmp_path).topics == ()
        assert registry(tmp_path).stable_versions() == {"general": 1, "sql": 0}


def test_long_polls_return_topics_and_the_handles_of_their_actors(tmp_path: Path) -> None:
    reg = taught(tmp_path)

    async def changed(reg: WeightRegistry, etag: str, timeout_s: float = 5.0) -> Any:
        return (await reg.wait_for_changes(None, etag, timeout_s)).topics

    async def scenario() -> None:
        first = await changed(reg, "")
        assert await changed(reg, first.etag, 0.01) is None
        poll = asyncio.create_task(changed(reg, first.etag))
        await asyncio.sleep(0.01)
        reg.add_topic("geo", "general", head(1.0), 0)
        second = await asyncio.wait_for(poll, 2.0)
        assert [topic.name for topic in second.topics] == ["geo"]
        poll = asyncio.create_task(changed(reg, second.etag))
        await asyncio.sleep(0.01)
        reg.register_actors("geo", TopicActors("shard"))
        third = await asyncio.wait_for(poll, 2.0)
        assert third.actors == {"geo": TopicActors("shard")}
        reborn = await changed(registry(tmp_path), third.etag)
        assert reborn.etag == second.etag

    asyncio.run(scenario())
