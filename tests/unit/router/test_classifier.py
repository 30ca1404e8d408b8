"""The classifier and its actor class, on the small router and on heads on a random encoder."""

import asyncio
import itertools
import shutil
import threading
import time
from pathlib import Path

import pytest
from fixture_models import ROUTER, SMALL_MODELS
from safetensors.torch import load_file, save_file

import paceline.actors.router.router as router_module
from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.policy import choose_topic
from paceline.actors.router.router import TopicRouter
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.demo.prompts import TOPICS, generate

LABELS = {"math", "code", "sql", "shell", "general"}
# Written for this test, in other words than the recipe's.
PROMPTS = [
    ("Tom has 12 marbles and buys 3 bags of 5 marbles each. How many marbles has he now?", "math"),
    ("A coat costs $80 and is sold at 25% off. What does Mia pay?", "math"),
    ("Write a function that returns the longest word of a list of strings.", "code"),
    ("Implement binary search over a sorted list in Python.", "code"),
    ("Write an SQL query: list the names of all airports in Peru by altitude.", "sql"),
    ("Translate to SQL: How many students are in each class?", "sql"),
    ("How do I use the command `rsync`? Give short examples.", "shell"),
    ("How do I list hidden files with ls in a terminal?", "shell"),
    ("Tell me something nice about autumn.", "general"),
    ("Hello! How was your day?", "general"),
]


@pytest.fixture(scope="module")
def classifier() -> TopicClassifier:
    return TopicClassifier(str(ROUTER))


def test_probabilities_cover_all_topics_and_sum_to_one(classifier: TopicClassifier) -> None:
    for text in [*(text for text, _ in PROMPTS), "", "?", "\N{SNOWMAN} 日本語", "\x00"]:
        probabilities = classifier.classify(text)
        assert set(probabilities) == LABELS
        assert sum(probabilities.values()) == pytest.approx(1)


def test_plain_prompts_of_each_topic_are_classified(classifier: TopicClassifier) -> None:
    found = [max((p := classifier.classify(text)), key=p.__getitem__) for text, _ in PROMPTS]
    assert found == [topic for _, topic in PROMPTS]


def test_prompts_like_the_topics_own_pass_what_the_model_asks_for(
    classifier: TopicClassifier,
) -> None:
    needed = router_confidence(load_config(None, SMALL_MODELS))
    for topic in TOPICS:
        for text in generate(topic, 40, seed=3):
            assert choose_topic(classifier.classify(text), TOPICS, needed) == topic


def test_only_start_and_end_of_a_long_text_count(classifier: TopicClassifier) -> None:
    def text(start: str, middle: int, end: str) -> str:
        return start + " and more" * middle + end

    start, end = PROMPTS[4][0], PROMPTS[6][0]
    found = classifier.classify(text(start, 4_000, end))
    assert classifier.classify(text(start, 100_000, end)) == found
    assert classifier.classify(text("", 4_000, end)) != found
    assert classifier.classify(text(start, 4_000, "")) != found


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TopicClassifier(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("brief_s", [0.0, 60.0], ids=["on a thread", "at once"])
def test_the_router_answers_many_callers_as_the_classifier_does(
    classifier: TopicClassifier, monkeypatch: pytest.MonkeyPatch, brief_s: float
) -> None:
    monkeypatch.setattr(router_module, "_MAX_FAST_S", brief_s)
    router = TopicRouter(str(ROUTER))
    texts = [text for text, _ in PROMPTS]

    async def ask() -> list[dict[str, float]]:
        return list(await asyncio.gather(*map(router.classify, texts)))

    expected = [classifier.classify(text) for text in texts]
    assert asyncio.run(ask()) == expected
    assert asyncio.run(ask()) == expected, "also in another loop"
    asyncio.run(router.check_health())


def test_between_any_two_texts_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "_MAX_FAST_S", 60.0)
    router = TopicRouter(str(ROUTER))
    seen: list[str] = []

    def classify(text: str) -> dict[str, float]:
        seen.append(text)
        return {"general": 1.0}

    monkeypatch.setattr(router._classifier, "classify", classify)

    async def tick() -> None:
        while len(seen) < 60:
            seen.append("tick")
            await asyncio.sleep(0)

    async def ask() -> None:
        await asyncio.gather(tick(), *(router.classify(str(n)) for n in range(20)))

    asyncio.run(ask())
    asked = [at for at, what in enumerate(seen) if what != "tick"]
    assert [seen[at] for at in asked] == [str(n) for n in range(20)]
    assert all(later - earlier > 1 for earlier, later in itertools.pairwise(asked))


def test_a_text_that_took_long_is_the_last_one_on_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_module, "_MAX_FAST_S", 60.0)
    router = TopicRouter(str(ROUTER))
    threads: list[int] = []

    def classify(_text: str) -> dict[str, float]:
        threads.append(threading.get_ident())
        time.sleep(0.02)
        return {"general": 1.0}

    monkeypatch.setattr(router._classifier, "classify", classify)
    monkeypatch.setattr(router_module, "_TOO_SLOW_S", 0.01)

    async def ask() -> None:
        for _ in range(3):
            await router.classify("How much?")

    asyncio.run(ask())
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [True, False, False]


@pytest.mark.parametrize("brief_s", [0.0, 60.0], ids=["on a thread", "at once"])
def test_only_a_classifier_that_takes_long_leaves_the_loops_thread(
    monkeypatch: pytest.MonkeyPatch, brief_s: float
) -> None:
    monkeypatch.setattr(router_module, "_MAX_FAST_S", brief_s)
    router = TopicRouter(str(ROUTER))
    threads: list[int] = []

    def classify(_text: str) -> dict[str, float]:
        threads.append(threading.get_ident())
        return {"general": 1.0}

    monkeypatch.setattr(router._classifier, "classify", classify)
    asyncio.run(router.classify("How much?"))
    assert (threads == [threading.get_ident()]) == bool(brief_s)


def test_broken_weights_fail_the_health_check(tmp_path: Path) -> None:
    broken = tmp_path / "router"
    shutil.copytree(ROUTER, broken)
    weights = load_file(broken / "model.safetensors")
    weights["classifier.bias"] = weights["classifier.bias"] * float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(TopicRouter(str(broken)).check_health())
