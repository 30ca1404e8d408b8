"""A further topic for the router: on made-up features, and on the router of the package."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from topic_examples import trips
from unit.router.test_classifier import PROMPTS, ROUTER

from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.grown_head import GrownHead
from paceline.actors.router.growth import GrowthSettings, grow
from paceline.actors.router.policy import choose
from paceline.actors.router.regression import Texts
from paceline.actors.router.router import GrownRouter, TopicRouter
from paceline.actors.weights.notifications import RegistryChanges
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import RouterHead, TopicsView
from paceline.deploy.api.topic_admin import bundled_prompts
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.demo.prompts import generate

EXPERTS = ("general", "math", "code", "sql", "shell")
SETTINGS = GrowthSettings()
NEEDED = router_confidence(load_config())  # as it is served


def texts(rng: np.random.Generator, count: int, shift: float, label: int) -> Texts:
    """Features about ``shift`` in the first dimension, and logits that are sure of a label."""
    features = rng.normal(size=(count, 6))
    features[:, 0] += shift
    logits = np.zeros((count, 2))
    logits[:, label] = 4.0
    return Texts(features, logits)


def test_what_lies_apart_is_told_apart_and_nothing_else_moves() -> None:
    rng = np.random.default_rng(1)
    growth = grow(
        "new", texts(rng, 30, 6.0, 0), texts(rng, 90, 0.0, 0), ("a", "general"), ("a",), SETTINGS
    )
    assert growth.recall >= 0.9
    assert growth.moved <= 0.05
    assert growth.prompts_by_topic == {"a": 90}
    assert growth.before == {"a": 30}
    assert growth.fault(SETTINGS) is None


def test_what_lies_together_is_refused_with_its_figures() -> None:
    rng = np.random.default_rng(2)
    growth = grow(
        "new", texts(rng, 30, 0.0, 0), texts(rng, 90, 0.0, 0), ("a", "general"), ("a",), SETTINGS
    )
    fault = growth.fault(SETTINGS)
    assert fault is not None
    assert "%" in fault


def test_the_row_minimises_what_it_says() -> None:
    """The gradient of the weighted logistic loss with ridge and offset, by autograd, is zero."""
    rng = np.random.default_rng(3)
    mine, rest = texts(rng, 20, 1.0, 0), texts(rng, 50, 0.0, 1)
    ridge = 0.1
    rules = GrowthSettings(ridges=(ridge,))
    row = grow("new", mine, rest, ("a", "general"), ("a",), rules).row
    features = np.concatenate([mine.features, rest.features])
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-6
    point = torch.tensor([*(row.weight * scale), row.bias + mean @ row.weight], requires_grad=True)
    design = torch.tensor(np.c_[(features - mean) / scale, np.ones(len(features))])
    logits = torch.tensor(np.concatenate([mine.logits, rest.logits]))
    margins = design @ point - logits.logsumexp(dim=1)
    signs = torch.tensor([1.0] * 20 + [-1.0] * 50)
    shares = torch.tensor([0.25 / 20] * 20 + [0.75 / 50] * 50)
    loss = (shares * torch.nn.functional.softplus(-signs * margins)).sum()
    (loss + ridge / 2 * (point[:-1] ** 2).sum()).backward()
    assert point.grad is not None
    assert float(point.grad.abs().max()) < 1e-5


def test_a_topic_that_the_model_knows_is_measured_by_the_models_own_row() -> None:
    """It gets an expert; the row that is learnt is not used, however well it tells it apart."""
    rng = np.random.default_rng(6)
    mine, rest = texts(rng, 30, 6.0, 0), texts(rng, 90, 0.0, 0)  # all sure of the label "a"
    growth = grow("a", mine, rest, ("a", "general"), (), SETTINGS)
    assert (growth.recall, growth.moved) == (1.0, 1.0)
    assert growth.fault(SETTINGS) is not None
    away = texts(rng, 90, 0.0, 1)
    found = grow("a", mine, away, ("a", "general"), (), SETTINGS)
    assert (found.recall, found.moved, found.fault(SETTINGS)) == (1.0, 0.0, None)


@pytest.mark.parametrize("counts", [(3, 50), (50, 3)])
def test_too_few_prompts_are_refused(counts: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    mine, rest = (texts(rng, count, 0.0, 0) for count in counts)
    with pytest.raises(ValueError, match="too few"):
        grow("new", mine, rest, ("a", "general"), ("a",), SETTINGS)


@pytest.fixture(scope="module")
def classifier() -> TopicClassifier:
    return TopicClassifier(str(ROUTER))


def grown(topic: str, examples: list[str], head: Any = None) -> GrownRouter:
    router = TopicRouter(str(ROUTER))
    settings = GrowthSettings(min_confidence=NEEDED)
    return asyncio.run(router.grow(topic, examples, bundled_prompts(), EXPERTS, head, settings))


@pytest.fixture(scope="module")
def travel() -> GrownRouter:
    return grown("travel", trips(40))


def test_the_embedded_router_learns_a_topic_and_keeps_the_others(
    travel: GrownRouter, classifier: TopicClassifier
) -> None:
    assert travel.fault is None
    other = TopicClassifier(str(ROUTER))
    other.take(GrownHead.of(travel.facts, travel.arrays))
    assert other.labels == (*classifier.labels, "travel")
    found = [chosen(other, text) for text in trips(60, seed=9)[20:]]
    assert found.count("travel") >= 0.8 * len(found)
    assert [chosen(other, text) for text, _ in PROMPTS] == [topic for _, topic in PROMPTS]
    for text, _ in PROMPTS:
        before, after = classifier.classify(text), other.classify(text)
        assert sum(after.values()) == pytest.approx(1)
        rest = 1 - after["travel"]
        for topic, p in before.items():
            assert after[topic] == pytest.approx(p * rest, abs=1e-5)


def chosen(classifier: TopicClassifier, text: str) -> str:
    return choose(classifier.classify(text), {*EXPERTS, "travel"}, NEEDED)


def test_a_second_topic_leaves_the_first_its_examples(travel: GrownRouter) -> None:
    again = grown("voyages", trips(40, seed=5), (travel.facts, travel.arrays))
    assert again.fault is not None
    assert again.growth.before["travel"] >= 30
    assert "travel" in again.growth.prompts_by_topic


def test_a_topic_that_was_taken_away_by_hand_is_learnt_anew(travel: GrownRouter) -> None:
    two = grown("queries", trips(40, seed=5), (travel.facts, travel.arrays))
    again = grown("travel", trips(40, seed=9), (two.facts, two.arrays))
    head = GrownHead.of(again.facts, again.arrays)
    assert head.topics == ("queries", "travel")
    assert np.bincount(head.rows).tolist() == [40, 40]
    assert not np.array_equal(head.features[head.rows == 1], travel.arrays["features"])
    assert np.array_equal(head.features[head.rows == 0], two.arrays["features"][40:])


def test_examples_of_a_topic_that_there_is_are_refused() -> None:
    assert grown("queries", list(generate("sql", 40, 77))).fault is not None


def test_a_router_takes_up_what_the_registry_announces(
    travel: GrownRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = RouterHead(travel.facts, travel.arrays)
    foreign = RouterHead(travel.facts | {"base": "other"}, travel.arrays)
    views = [TopicsView("0", head=foreign), TopicsView("1", head=head)]
    asked: list[str] = []

    def wait_for_changes(_versions: None, etag: str, _timeout_s: float) -> RegistryChanges:
        asked.append(etag)
        if len(asked) == 1:
            raise OSError("not up")
        return RegistryChanges(topics=views.pop(0)) if views else RegistryChanges()

    def get(subscriber: RegistrySubscriber, changes: RegistryChanges, _timeout_s: float) -> Any:
        if not changes:
            subscriber._stopped.set()
        return changes

    monkeypatch.setattr(RegistrySubscriber, "get", get)
    registry = SimpleNamespace(wait_for_changes=SimpleNamespace(remote=wait_for_changes))
    router = TopicRouter(str(ROUTER), registry=registry)

    async def labels() -> tuple[str, ...]:
        async with asyncio.timeout(20):
            while "travel" not in await router.labels():
                await asyncio.sleep(0.01)
        return await router.labels()

    assert asyncio.run(labels())[-1] == "travel"
    assert asked[:3] == ["", "", "0"]


@pytest.mark.parametrize("change", [{"topics": ["a", "b"]}, {"base": None, "topics": None}, {}])
def test_what_is_no_head_is_refused(travel: GrownRouter, change: dict[str, Any]) -> None:
    arrays = dict(travel.arrays)
    if not change:
        arrays["weight"] = arrays["weight"] * np.nan
    with pytest.raises(ValueError, match="head"):
        GrownHead.of(travel.facts | change, arrays)
