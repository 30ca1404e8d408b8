"""The router in the ingress' process has the interface of a handle."""

import asyncio
import math
from typing import Any

import pytest

from paceline.deploy.api.routing import InProcessRouter, RouteSelector
from paceline.deploy.config.config import load_config
from paceline.deploy.config.replica_settings import ingress_settings


class Classifier:
    """In a TopicRouter's place: what it is asked, and an answer or a fault."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[Any] = []

    async def classify(self, text: str) -> dict[str, float]:
        self.asked.append(text)
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Event().wait()
        return dict(self.answer)

    async def labels(self) -> tuple[str, ...]:
        return ("sql", "general")

    async def fit_topic(self, *arguments: Any) -> tuple[Any, ...]:
        return arguments


def selector_of(classifier: Classifier) -> RouteSelector:
    return RouteSelector(InProcessRouter(classifier), ("general", "sql"), 0.05, 0.5, lambda: 0.0)


def test_it_is_asked_as_a_handle_is() -> None:
    classifier = Classifier({"sql": 0.9, "general": 0.1})
    assert asyncio.run(selector_of(classifier).select("SELECT")).topic == "sql"
    assert classifier.asked == ["SELECT"]

    async def asked() -> tuple[Any, Any]:
        here = InProcessRouter(classifier)
        return await here.labels.remote(), await here.fit_topic.remote("trivia", ["a"])

    assert asyncio.run(asked()) == (("sql", "general"), ("trivia", ["a"]))


@pytest.mark.parametrize(
    "fault",
    [None, RuntimeError("broken"), {"sql": math.nan, "general": math.nan}],
    ids=["hung", "failing", "not a number"],
)
def test_one_that_hangs_or_fails_costs_the_topic_and_no_answer(fault: Any) -> None:
    selector = selector_of(Classifier(fault))
    assert asyncio.run(selector.select("SELECT")).topic == "general"
    assert selector.calls["answered"] == 0


@pytest.mark.parametrize(
    ("changes", "own"),
    [
        ({}, True),
        ({"router.num_threads": 2}, True),
        ({"router.placement": "deployment"}, False),
        ({"router.enabled": False}, False),
    ],
)
def test_the_ingress_has_a_router_only_without_a_router_deployment(
    changes: dict[str, Any], own: bool
) -> None:
    config = load_config(None, changes)
    threads = config.router.num_threads
    expected = (str(config.router_path), str(config.encoder_path), threads) if own else None
    assert ingress_settings(config).in_process_router == expected


def test_another_placement_is_an_error_that_names_the_key() -> None:
    with pytest.raises(Exception, match=r"router\.placement"):
        load_config(None, {"router.placement": "beside"})
