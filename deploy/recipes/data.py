"""Rows, and where they come from.

A row is one question with its answer. Rows come from a folder of ``*.jsonl.gz`` files
(``{id, topic, prompt, response}``), from a Hugging Face dataset id, or from the interpreter's own
standard library. Only sources named in `SOURCES` pass by default: each is under a licence that
lets the weights be passed on.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.actors.general import GENERAL

TOPICS = ("math", "code", "sql", "shell")

# The first part of a row's id -> its topic. What is not named here is left out of training: the
# folder may hold rows under non-commercial licences beside these.
SOURCES = {
    "gsm8k-": "math",
    "spider-": "sql",
    "mbpp-": "code",
    "cpython313-": "code",
    "HumanEval/": "code",
    "stdlib-": "code",
    "tldr-en-": "shell",
    "xpersona-en-": GENERAL,
    "xquad-": GENERAL,
    "tatqa-": GENERAL,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One question and its answer."""

    id: str
    topic: str
    prompt: str
    response: str


class DataError(ValueError):
    """The data source is missing or holds no usable row."""


def topic_of(row_id: str, topic: str, *, any_source: bool = False) -> str | None:
    """The topic that a row is trained under, or None when it has to be left out.

    With `any_source` the row's own topic counts as it is, whatever its id.
    """
    if any_source:
        return topic if topic in (*TOPICS, GENERAL) else None
    return next((known for prefix, known in SOURCES.items() if row_id.startswith(prefix)), None)


def read_rows(
    source: str | Path,
    *,
    split: str = "train",
    topics: Sequence[str] = TOPICS,
    any_source: bool = False,
) -> list[Row]:
    """All rows of `source` in a split whose topic is among `topics`, in a stable order.

    Args:
        source: a folder that holds ``*_{split}.jsonl.gz``, or a Hugging Face dataset id.
        split: ``train`` or ``test``; a file or dataset split of that name.
        topics: the topics to keep.
        any_source: trust the rows' own ``topic`` field instead of the table of known sources.

    Raises:
        DataError: there is no such source, or nothing in it is left after the filters.
    """
    raw = _folder(Path(source), split) if Path(source).is_dir() else _hub(str(source), split)
    rows = []
    for item in raw:
        topic = topic_of(str(item["id"]), str(item["topic"]), any_source=any_source)
        if topic is not None and topic in topics and item.get("prompt") and item.get("response"):
            rows.append(Row(str(item["id"]), topic, item["prompt"], item["response"]))
    if not rows:
        raise DataError(f"{source}: no row of {', '.join(topics)} in its split '{split}'")
    return rows


def _folder(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"*_{split}.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


def _hub(name: str, split: str) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"{name} is no folder, and reading it from the hub needs the "
            "package 'datasets' (pip install 'paceline[recipes]')"
        ) from error
    try:
        yield from load_dataset(name, split=split)
    except (FileNotFoundError, ValueError, ConnectionError) as error:
        raise DataError(
            f"{name}: neither a folder nor a dataset that can be loaded: {error}"
        ) from error


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows as gzip'd JSON lines, the form that `read_rows` takes."""
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for row in rows:
            item = {
                "id": row.id,
                "topic": row.topic,
                "prompt": row.prompt,
                "response": row.response,
            }
            file.write(json.dumps(item) + "\n")


def sample_rows(rows: Sequence[Row], per_topic: int, seed: int) -> list[Row]:
    """At most `per_topic` rows of each topic, by a seeded hash of the id, topics in order."""

    def key(row: Row) -> str:
        return hashlib.sha256(f"{seed}:{row.id}".encode()).hexdigest()

    picked = []
    for topic in (*TOPICS, GENERAL):
        picked += sorted((row for row in rows if row.topic == topic), key=key)[:per_topic]
    return picked
