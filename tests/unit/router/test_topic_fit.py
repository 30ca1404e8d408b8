"""A further topic for the router: on made-up features, and on the small router."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fixture_models import ROUTER, SMALL_MODELS
from topic_examples import trips
from unit.router.test_classifier import PROMPTS

from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.policy import choose_topic
from paceline.actors.router.regression import ClassifiedTexts
from paceline.actors.router.router import RouterFit, TopicRouter
from paceline.actors.router.topic_fit import TopicFitSettings, fit_topic
from paceline.actors.weights.notifications import RegistryChanges
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import RouterHead, TopicsView
from paceline.deploy.api.topic_admin import bundled_prompts
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.demo.prompts import generate

EXPERTS = ("general", "math", "code", "sql", "shell")
SETTINGS = TopicFitSettings()
NEEDED = router_confidence(load_config(None, SMALL_MODELS))  # as it is served


def texts(rng: np.random.Generator, count: int, shift: float, label: int) -> ClassifiedTexts:
    """Features about ``shift`` in the first dimension, and logits that are sure of a label."""
    features = rng.normal(size=(count, 6))
    features[:, 0] += shift
    logits = np.zeros((count, 2))
    logits[:, label] = 4.0
    return ClassifiedTexts(features, logits)


def test_separable_examples_are_recognized_and_no_other_prompt_moves() -> None:
    rng = np.random.default_rng(1)
    fit = fit_topic(
        "new", texts(rng, 30, 6.0, 0), texts(rng, 90, 0.0, 0), ("a", "general"), ("a",), SETTINGS
    )
    assert fit.recall >= 0.9
    assert fit.moved <= 0.05
    assert fit.prompts_by_topic == {"a": 90}
    assert fit.before == {"a": 30}
    assert fit.rejection(SETTINGS) is None


def test_what_lies_together_is_refused_with_its_figures() -> None:
    rng = np.random.default_rng(2)
    fit = fit_topic(
        "new", texts(rng, 30, 0.0, 0), texts(rng, 90, 0.0, 0), ("a", "general"), ("a",), SETTINGS
    )
    rejection = fit.rejection(SETTINGS)
    assert rejection is not None
    assert "%" in rejection


def test_the_row_minimises_what_it_says() -> None:
    """The gradient of the weighted logistic loss with ridge and offset, by autograd, is zero."""
    rng = np.random.default_rng(3)
    mine, rest = texts(rng, 20, 1.0, 0), texts(rng, 50, 0.0, 1)
    ridge = 0.1
    rules = TopicFitSettings(ridges=(ridge,))
    row = fit_topic("new", mine, rest, ("a", "general"), ("a",), rules).row
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
    """It gets an expert; the row that is learnt is not used, however separable it is."""
    rng = np.random.default_rng(6)
    mine, rest = texts(rng, 30, 6.0, 0), texts(rng, 90, 0.0, 0)  # all sure of the label "a"
    fit = fit_topic("a", mine, rest, ("a", "general"), (), SETTINGS)
    assert (fit.recall, fit.moved) == (1.0, 1.0)
    assert fit.rejection(SETTINGS) is not None
    away = texts(rng, 90, 0.0, 1)
    found = fit_topic("a", mine, away, ("a", "general"), (), SETTINGS)
    assert (found.recall, found.moved, found.rejection(SETTINGS)) == (1.0, 0.0, None)


@pytest.mark.parametrize("counts", [(3, 50), (50, 3)])
def test_too_few_prompts_are_refused(counts: tuple[int, int]) -> None:
    rng = np.random.default_rng(4)
    mine, rest = (texts(rng, count, 0.0, 0) for count in counts)
    with pytest.raises(ValueError, match="too few"):
        fit_topic("new", mine, rest, ("a", "general"), ("a",), SETTINGS)


@pytest.fixture(scope="module")
def classifier() -> TopicClassifier:
    return TopicClassifier(str(ROUTER))


def grown(topic: str, examples: list[str], head: Any = None) -> RouterFit:
    router = TopicRouter(str(ROUTER))
    settings = TopicFitSettings(min_confidence=NEEDED)
    return asyncio.run(
        router.fit_topic(topic, examples, bundled_prompts(), EXPERTS, head, settings)
    )


@pytest.fixture(scope="module")
def travel() -> RouterFit:
    return grown("travel", trips(40))


def test_the_small_router_learns_a_topic_and_keeps_the_others(
    travel: RouterFit, classifier: TopicClassifier
) -> None:
    assert travel.rejection is None
    other = TopicClassifier(str(ROUTER))
    other.set_head(AddedTopicHead.restore(travel.head.facts, travel.head.arrays))
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
    return choose_topic(classifier.classify(text), {*EXPERTS, "travel"}, NEEDED)


def test_a_second_topic_leaves_the_first_its_examples(travel: RouterFit) -> None:
    again = grown("voyages", trips(40, seed=5), travel.head)
    assert again.rejection is not None
    assert again.fit.before["travel"] >= 30
    assert "travel" in again.fit.prompts_by_topic


def test_a_topic_removed_by_hand_can_be_fitted_again(travel: RouterFit) -> None:
    two = grown("queries", trips(40, seed=5), travel.head)
    again = grown("travel", trips(40, seed=9), two.head)
    head = AddedTopicHead.restore(again.head.facts, again.head.arrays)
    assert head.topics == ("queries", "travel")
    assert np.bincount(head.rows).tolist() == [40, 40]
    assert not np.array_equal(head.features[head.rows == 1], travel.head.arrays["features"])
    assert np.array_equal(head.features[head.rows == 0], two.head.arrays["features"][40:])


def test_examples_of_a_topic_that_there_is_are_refused() -> None:
    assert grown("queries", list(generate("sql", 40, 77))).rejection is not None


def test_a_router_takes_up_what_the_registry_announces(
    travel: RouterFit, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = travel.head
    foreign = RouterHead(travel.head.facts | {"base": "other"}, travel.head.arrays)
    views = [TopicsView("0", head=foreign), TopicsView("1", head=head)]
    asked: list[str] = []

    def wait_for_changes(
        _versions: None, etag: str, _timeout_s: float, _name: None, _expert: None
    ) -> RegistryChanges:
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
def test_what_is_no_head_is_refused(travel: RouterFit, change: dict[str, Any]) -> None:
    arrays = dict(travel.head.arrays)
    if not change:
        arrays["weight"] = arrays["weight"] * np.nan
    with pytest.raises(ValueError, match="head"):
        AddedTopicHead.restore(travel.head.facts | change, arrays)
