"""Rows, where they come from, and the packed blocks that the recipes train on.

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

import numpy as np
from numpy.typing import NDArray

from paceline.actors.router.policy import GENERAL

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

BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"


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


def prompt_text(prompt: str) -> str:
    """A question in the form that the target answers."""
    return f"{BOS}{USER}{prompt}{ASSISTANT}"


def row_text(row: Row) -> str:
    """A question with its answer in the form that the target is trained on."""
    return f"{prompt_text(row.prompt)}{row.response}{EOS}"


def encode_rows(
    rows: Sequence[Row], tokenizer: Any, *, max_answer_tokens: int | None = None
) -> list[NDArray[np.int32]]:
    """Token ids of each row; rows whose answer is longer than `max_answer_tokens` are left out."""
    ids = tokenizer([row_text(row) for row in rows], add_special_tokens=False)["input_ids"]
    if max_answer_tokens is not None:
        answers = tokenizer([row.response for row in rows], add_special_tokens=False)["input_ids"]
        ids = [i for i, a in zip(ids, answers, strict=True) if len(a) <= max_answer_tokens]
    return [np.asarray(row, dtype=np.int32) for row in ids]


def pack(
    sequences: Sequence[NDArray[np.int32]], block: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Shuffle the sequences, join them end to end and cut them into blocks.

    Returns:
        int32 [number of blocks, block]; the remainder that fills no block is dropped.

    Raises:
        DataError: the sequences together do not fill one block.
    """
    joined = np.concatenate([sequences[i] for i in rng.permutation(len(sequences))])
    count = len(joined) // block
    if count == 0:
        raise DataError(f"{len(joined)} tokens do not fill one block of {block}")
    return joined[: count * block].reshape(count, block)


class BlockStream:
    """Batches of packed blocks, a function of seed and step alone, so that a run can resume."""

    def __init__(
        self, sequences: Sequence[NDArray[np.int32]], block: int, batch: int, seed: int
    ) -> None:
        self._sequences, self._block, self._batch, self._seed = sequences, block, batch, seed
        self.per_epoch = max(1, sum(map(len, sequences)) // block // batch)
        self._packed: tuple[int, NDArray[np.int32]] | None = None

    def at(self, step: int) -> NDArray[np.int32]:
        """The batch of a step: int32 [batch, block]."""
        epoch, index = divmod(step, self.per_epoch)
        if self._packed is None or self._packed[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._packed = (epoch, pack(self._sequences, self._block, rng))
        blocks = self._packed[1]
        return blocks[np.arange(index * self._batch, (index + 1) * self._batch) % len(blocks)]
