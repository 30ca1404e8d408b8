"""The prompts that routing is judged on: those of the topics, and those that nobody picked."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prompts import MAX_PROMPT_TOKENS

from online.answers import answers_of
from online.bench import Bench
from online.rows import Question, interleaved, label
from online.serving import Served
from paceline.actors.router.classifier import TopicClassifier
from paceline.deploy.config.config import MODELS_DIR
from paceline.deploy.demo.prompts import TOPICS

UNPICKED = ("userprompts", "arena", "mtbench", "specbench")
ENGLISH = "en"
LANGUAGES = ("de", ENGLISH, "es", "fr", "ja", "ko", "pt", "ru", "zh")
PARALLEL = ("tldr", "xquad-qa")  # the same items in several languages
_SEED = 4003


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompts per topic of the stream, and per topic, file and (language, part) of the tests."""

    stream: int
    test: int
    unpicked: int
    language: int


@dataclass(frozen=True, slots=True)
class Asked:
    """Answered prompts of one group with what the classifier thinks of each."""

    served: Sequence[Served]
    labels: Sequence[str | None]
    probabilities: Sequence[Mapping[str, float]]


class RoutePrompts:
    """Prompts, the target's answers to them, and the classifier's thoughts, made when asked for."""

    def __init__(self, bench: Bench, counts: Counts) -> None:
        """Load the classifier."""
        self.bench, self.counts = bench, counts
        self._classifier = TopicClassifier(str(MODELS_DIR / "router"))

    def stream(self, seed: int) -> Asked:
        """All four topics mixed, in an order that depends on the seed."""
        parts = [self.bench.stream(topic, self.counts.stream) for topic in TOPICS]
        order = sorted(
            interleaved(parts),
            key=lambda q: hashlib.sha256(f"{seed}:{q.key}".encode()).digest(),
        )
        by_topic = {topic: self.bench.frozen(topic, self.counts.stream) for topic in TOPICS}
        answered = {(t, s.key): s for t, every in by_topic.items() for s in every}
        return self._asked(order, [answered[q.topic, q.key] for q in order], topical=True)

    def groups(self) -> dict[str, Callable[[], Asked]]:
        """Name of every group of test prompts, and what makes it."""
        found = {f"topic {topic}": self._topic(topic) for topic in TOPICS}
        if self.bench.data is None or not Path(self.bench.data).is_dir():
            self.bench.say("unpicked prompts and languages need --data FOLDER: left out")
            return found
        found |= {f"file {name}": self._file(name) for name in UNPICKED}
        for part in PARALLEL:
            fitting = {language: self._fitting(language, part) for language in LANGUAGES}
            for language, questions in parallel(fitting, self.counts.language).items():
                found[f"lang {language} {part}"] = self._language(language, part, questions)
        return found

    def _topic(self, topic: str) -> Callable[[], Asked]:
        def make() -> Asked:
            served = self.bench.test(topic)[: self.counts.test]
            questions = self.bench.questions(topic).test[: self.counts.test]
            return self._asked(questions, served, topical=True)

        return make

    def _file(self, name: str) -> Callable[[], Asked]:
        def make() -> Asked:
            earlier = UNPICKED[: UNPICKED.index(name)]  # Spec-Bench holds the prompts of MT-bench
            known = {row["prompt"] for other in earlier for row in self._rows(other)}
            rows = (row for row in self._rows(name) if row["prompt"] not in known)
            questions = list(self._questions(name, rows).values())
            return self._answered(name, questions[: self.counts.unpicked])

        return make

    def _language(
        self, language: str, part: str, questions: Sequence[Question]
    ) -> Callable[[], Asked]:
        return lambda: self._answered(f"{language}-{part}", questions)

    def _fitting(self, language: str, part: str) -> dict[str, Question]:
        wanted = f"lang-{language}: {part}"
        rows = (r for r in self._rows(f"lang_{language}") if r["topic"] == wanted)
        return self._questions(f"{language}-{part}", rows)

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = Path(str(self.bench.data)) / f"{name}_test.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def _questions(self, name: str, rows: Iterator[dict[str, Any]]) -> dict[str, Question]:
        """By item those that are short enough, in the order of a hash that translations share."""
        ordered = sorted(rows, key=lambda row: hashlib.sha256(item_of(row).encode()).digest())
        found: dict[str, Question] = {}
        for row in ordered:
            ids = self.bench.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                add_generation_prompt=True,
                return_dict=False,
            )
            if len(ids) <= MAX_PROMPT_TOKENS:
                found.setdefault(item_of(row), Question(row["id"], name, tuple(ids)))
        return found

    def _answered(self, name: str, questions: Sequence[Question]) -> Asked:
        served = answers_of(
            self.bench.store.folder / "answers",
            f"{label(self.bench.data)}-{name}-test",
            questions,
            self.bench.serving,
            lambda: self.bench.frozen_engine,
        )
        return self._asked(questions, served, topical=False)

    def _asked(
        self, questions: Sequence[Question], served: Sequence[Served], *, topical: bool
    ) -> Asked:
        decode = self.bench.tokenizer.decode
        texts = [decode(q.token_ids, skip_special_tokens=True) for q in questions]
        return Asked(
            served=served,
            labels=[q.topic if topical else None for q in questions],
            probabilities=[self._classifier.classify(text) for text in texts],
        )

    def facts(self) -> dict[str, Any]:
        """What decides the prompts, for settings."""
        return asdict(self.counts) | {"languages": "items that English has too", "repeats": "none"}


def parallel(
    fitting: Mapping[str, Mapping[str, Question]], count: int
) -> dict[str, list[Question]]:
    """Prompts of each language that are there in English too, and these in English.

    Args:
        fitting: language to item to prompt, in an order that all languages share.
        count: of a language's prompts at most; English has all that any other has.
    """
    english = fitting[ENGLISH]
    others = {
        language: [item for item in own if item in english][:count]
        for language, own in fitting.items()
        if language != ENGLISH
    }
    asked = {item for items in others.values() for item in items}
    found = {ENGLISH: [question for item, question in english.items() if item in asked]}
    found |= {language: [fitting[language][i] for i in items] for language, items in others.items()}
    return {language: questions for language, questions in found.items() if questions}


def without_language(key: str, language: str) -> str:
    """What the keys of one item's translations have in common."""
    return key.replace(f"-{language}-", "-", 1)


def item_of(row: Mapping[str, Any]) -> str:
    """A row's id without its language: translations of one item have it in common."""
    return f"{_SEED}:{without_language(row['id'], row['lang'])}"
