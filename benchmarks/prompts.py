"""Prompts of the studies: those that are measured, and those that drafts learn from, disjoint.

They come from a folder of rows (``--data FOLDER``: ``FILE_{test,train}.jsonl.gz`` with id, topic
and prompt), from the Hugging Face hub (``--data hf``), or, by default, from the project's
generators. Their order depends on their keys alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from harness import json_lines

from paceline.deploy.demo.prompts import INSTRUCTION, TOPICS, endless
from paceline.deploy.recipes.data import DataError

Item = TypeVar("Item")

HUB = "hf"
MAX_PROMPT_TOKENS = 384
RESERVED = 240  # per topic: prompts of the test side, which no draft learns from
_GENERATED = 8_000  # of a topic at most
_SEEDS = {"test": 1009, "train": 2003}
# Topic to the start of its file's name, and to the topic of its rows.
_FILES = {topic: (topic, topic) for topic in (*TOPICS, "chat", "finance")}
_FILES["shell"] = ("lang_en", "lang-en: tldr")
# Topic to dataset, configuration, column of the prompts, and test split.
_HUB_SETS = {
    "math": ("openai/gsm8k", "main", "question", "test"),
    "sql": ("xlangai/spider", None, "question", "validation"),
    "code": ("google-research-datasets/mbpp", "full", "text", "test"),
    "shell": ("neulab/tldr", "data", "nl", "test"),
}
_FORMS = {
    "sql": INSTRUCTION + " Please only generate SQL, don't include explanation in the answer."
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, and its tokens by the chat template; ``key`` is unique in a source."""

    key: str
    topic: str
    token_ids: tuple[int, ...]
    text: str = ""


def measured_prompts(
    data: str | Path | None, topic: str, tokenizer: Any, count: int = RESERVED
) -> list[Prompt]:
    """At most ``count`` prompts of a topic's test side.

    Raises:
        DataError: the source lacks the topic, or is not there.
    """
    return _some(_distinct(_texts(data, topic, "test"), topic, tokenizer), count, data, topic)


def training_prompts(
    data: str | Path | None, topic: str, tokenizer: Any, count: int | None = None
) -> list[Prompt]:
    """At most ``count`` prompts of a topic's training side, none of the ``RESERVED`` ones.

    Raises:
        DataError: the source lacks the topic, or is not there.
    """
    taken = {prompt.token_ids for prompt in measured_prompts(data, topic, tokenizer)}
    prompts = _distinct(_texts(data, topic, "train"), topic, tokenizer)
    return _some((p for p in prompts if p.token_ids not in taken), count, data, topic)


def source_of(data: str | Path | None) -> str:
    """Name of a source in settings and files: no path of this machine."""
    return "generated" if data is None else "hub" if data == HUB else "rows"


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a user's message by the chat template."""
    message = [{"role": "user", "content": text}]
    return tuple(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


def mark_of(prompts: Iterable[Prompt]) -> str:
    """Hash of the prompts' keys and tokens, for settings."""
    found = hashlib.sha256()
    for prompt in prompts:
        found.update(f"{prompt.key}:{prompt.token_ids}\n".encode())
    return found.hexdigest()[:10]


def interleaved(parts: Sequence[Sequence[Item]]) -> list[Item]:
    """The parts' items in turn, as far as the shortest goes."""
    return [item for group in zip(*parts, strict=False) for item in group]


def hashed(key: str, seed: int) -> float:
    """Number in [0, 1) that depends on key and seed alone."""
    drawn = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(drawn[:8], "big") / 2.0**64


def _some(
    prompts: Iterable[Prompt], count: int | None, data: str | Path | None, topic: str
) -> list[Prompt]:
    found = list(islice(prompts, count))
    if not found:
        raise DataError(f"{source_of(data)}: no prompts of {topic}")
    return found


def _distinct(texts: Iterable[tuple[str, str]], topic: str, tokenizer: Any) -> Iterator[Prompt]:
    """Distinct prompts that are short enough."""
    seen: set[tuple[int, ...]] = set()
    for key, text in texts:
        ids = chat_ids(tokenizer, text)
        if len(ids) <= MAX_PROMPT_TOKENS and ids not in seen:
            seen.add(ids)
            yield Prompt(key, topic, ids, text)


def _texts(data: str | Path | None, topic: str, split: str) -> Iterable[tuple[str, str]]:
    """(key, text) of a side, in its order."""
    if data is None:
        return _generated(topic, split)
    pairs = list(_hub(topic, split) if data == HUB else _folder(Path(data), topic, split))
    return sorted(pairs, key=lambda pair: hashed(pair[0], _SEEDS[split]))


def _generated(topic: str, split: str) -> Iterator[tuple[str, str]]:
    if topic not in TOPICS:
        raise DataError(f"{topic} cannot be generated: give --data")
    texts = islice(endless(topic, _SEEDS[split]), _GENERATED)
    try:
        for number, text in enumerate(texts):
            yield f"generated-{topic}-{split}-{number:05d}", text
    except ValueError:  # every combination has been given
        return


def _folder(folder: Path, topic: str, split: str) -> Iterator[tuple[str, str]]:
    name, own = _FILES[topic]
    path = folder / f"{name}_{split}.jsonl.gz"
    if not path.is_file():
        raise DataError(f"--data: no {path.name} in that folder")
    for row in json_lines(path):
        if row["topic"] == own:
            yield str(row["id"]), str(row["prompt"])


def _hub(topic: str, split: str) -> Iterator[tuple[str, str]]:
    name, config, column, test = _HUB_SETS[topic]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("--data hf needs the package 'datasets' (pip install datasets)") from error
    try:
        rows = load_dataset(name, config, split=test if split == "test" else "train")
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(f"{name} cannot be loaded from the hub: {error}") from error
    for number, row in enumerate(rows):
        text = f"{_FORMS[topic]} {row[column]}" if topic in _FORMS else row[column]
        yield f"{name}-{split}-{number:06d}", text
