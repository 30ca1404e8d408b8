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
from paceline.actors.routing.classifier import TopicClassifier
from paceline.deploy.config import MODELS_DIR
from paceline.deploy.demo.prompts import TOPICS

UNPICKED = ("userprompts", "arena", "mtbench", "specbench")
LANGUAGES = ("de", "en", "es", "fr", "ja", "ko", "pt", "ru", "zh")
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
        for language in LANGUAGES:
            for part in PARALLEL:
                found[f"lang {language} {part}"] = self._language(language, part)
        return found

    def _topic(self, topic: str) -> Callable[[], Asked]:
        def make() -> Asked:
            served = self.bench.test(topic)[: self.counts.test]
            questions = self.bench.questions(topic).test[: self.counts.test]
            return self._asked(questions, served, topical=True)

        return make

    def _file(self, name: str) -> Callable[[], Asked]:
        return lambda: self._answered(name, self._rows(name), self.counts.unpicked)

    def _language(self, language: str, part: str) -> Callable[[], Asked]:
        def make() -> Asked:
            wanted = f"lang-{language}: {part}"
            rows = (r for r in self._rows(f"lang_{language}") if r["topic"] == wanted)
            return self._answered(f"{language}-{part}", rows, self.counts.language)

        return make

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = Path(str(self.bench.data)) / f"{name}_test.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def _answered(self, name: str, rows: Iterator[dict[str, Any]], count: int) -> Asked:
        """The first of them by a hash of the item, which translations share."""
        ordered = sorted(rows, key=lambda row: hashlib.sha256(item_of(row).encode()).digest())
        questions: list[Question] = []
        for row in ordered:
            ids = self.bench.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}],
                add_generation_prompt=True,
                return_dict=False,
            )
            if len(questions) < count and len(ids) <= MAX_PROMPT_TOKENS:
                questions.append(Question(row["id"], name, tuple(ids)))
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
        return asdict(self.counts)


def without_language(key: str, language: str) -> str:
    """What the keys of one item's translations have in common."""
    return key.replace(f"-{language}-", "-", 1)


def item_of(row: Mapping[str, Any]) -> str:
    """A row's id without its language: translations of one item have it in common."""
    return f"{_SEED}:{without_language(row['id'], row['lang'])}"
