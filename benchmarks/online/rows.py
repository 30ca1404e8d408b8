"""Disjoint prompts of a topic's stream and test.

They come from a folder of rows (``--data FOLDER``), from the Hugging Face hub (``--data hf``),
or, by default, from the project's generator.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from prompts import MAX_PROMPT_TOKENS, chat_ids

from paceline.deploy.demo.prompts import TOPICS, endless
from paceline.deploy.recipes.data import DataError, topic_of

HUB = "hf"
_SEED = 4001
_GENERATED = 8_000  # of a topic's stream at most

_FILES = {"math": "math", "sql": "sql", "code": "code", "shell": "lang_en"}


@dataclass(frozen=True, slots=True)
class HubSet:
    """A topic's prompts on the hub: dataset, configuration, column, splits, form."""

    name: str
    config: str | None
    column: str
    train: str
    test: str
    form: str = "{}"


HUB_SETS = {
    "math": HubSet("openai/gsm8k", "main", "question", "train", "test"),
    "sql": HubSet(
        "xlangai/spider",
        None,
        "question",
        "train",
        "validation",
        "Could you translate the following question into SQL. Please only generate SQL, don't "
        "include explanation in the answer. {}",
    ),
    "code": HubSet("google-research-datasets/mbpp", "full", "text", "train", "test"),
    "shell": HubSet("neulab/tldr", "data", "nl", "train", "test"),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt by the target's chat template; ``key`` is unique in a data set."""

    key: str
    topic: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Questions:
    """A topic's two parts, each in an order that never changes; no prompt is in both."""

    train: tuple[Question, ...]
    test: tuple[Question, ...]


def mark_of(questions: Iterable[Question]) -> str:
    """Hash of the prompts' keys and tokens, for settings."""
    found = hashlib.sha256()
    for question in questions:
        found.update(f"{question.key}:{question.token_ids}\n".encode())
    return found.hexdigest()[:10]


def label(data: str | None) -> str:
    """Name of a source in settings and files: no path of this machine."""
    return "generated" if data is None else "hub" if data == HUB else "rows"


def load(
    data: str | None, topic: str, tokenizer: Any, *, train: int | None, test: int
) -> Questions:
    """A topic's prompts.

    Raises:
        paceline.deploy.recipes.data.DataError: the source lacks the topic, or is not there.
    """
    pairs = {split: _pairs(data, topic, split) for split in ("test", "train")}
    held = list(_fitting(pairs["test"], topic, tokenizer, test))
    taken = {question.token_ids for question in held}
    stream = _fitting(pairs["train"], topic, tokenizer, train, taken)
    questions = Questions(tuple(stream), tuple(held))
    if not questions.train or not questions.test:
        raise DataError(f"{label(data)}: no prompts of {topic}")
    return questions


def _fitting(
    pairs: Iterable[tuple[str, str]],
    topic: str,
    tokenizer: Any,
    count: int | None,
    taken: set[tuple[int, ...]] | None = None,
) -> Iterator[Question]:
    """Distinct prompts that are short enough and not taken, ``count`` at most."""
    seen = set(taken or ())

    def fresh() -> Iterator[Question]:
        for key, text in pairs:
            ids = chat_ids(tokenizer, text)
            if len(ids) <= MAX_PROMPT_TOKENS and ids not in seen:
                seen.add(ids)
                yield Question(key, topic, ids)

    return islice(fresh(), count)


def _pairs(data: str | None, topic: str, split: str) -> Iterable[tuple[str, str]]:
    """(key, prompt), in an order that depends on the keys alone."""
    if data is None:
        return _generated(topic, split)
    pairs = list(_hub(topic, split) if data == HUB else _folder(Path(data), topic, split))
    return sorted(pairs, key=lambda pair: hashlib.sha256(f"{_SEED}:{pair[0]}".encode()).digest())


def _generated(topic: str, split: str) -> Iterator[tuple[str, str]]:
    if topic not in TOPICS:
        raise DataError(f"{topic} cannot be generated: give --data")
    seed = _SEED + (split == "test")
    texts = islice(endless(topic, seed), _GENERATED)
    try:
        for number, text in enumerate(texts):
            yield f"generated-{topic}-{split}-{number:05d}", text
    except ValueError:  # every combination has been given
        return


def _folder(folder: Path, topic: str, split: str) -> Iterator[tuple[str, str]]:
    path = folder / f"{_FILES[topic]}_{split}.jsonl.gz"
    if not path.is_file():
        raise DataError(f"--data: no {path.name} in that folder")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if topic_of(str(row["id"]), str(row["topic"])) == topic:
                yield str(row["id"]), str(row["prompt"])


def _hub(topic: str, split: str) -> Iterator[tuple[str, str]]:
    source = HUB_SETS[topic]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("--data hf needs the package 'datasets' (pip install datasets)") from error
    try:
        rows = load_dataset(source.name, source.config, split=getattr(source, split))
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"{source.name} cannot be loaded from the hub: {error}") from error
    for number, row in enumerate(rows):
        yield f"{source.name}-{split}-{number:06d}", source.form.format(row[source.column])


def interleaved(parts: Sequence[Sequence[Question]]) -> list[Question]:
    """The parts' prompts in turn, as far as the shortest goes."""
    return [question for group in zip(*parts, strict=False) for question in group]
