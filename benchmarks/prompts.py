"""Prompts of the benchmarks, and of experts' training: disjoint.

Both come from the project's generator, or from the test and train sides of a folder of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from paceline.deploy.demo.prompts import TOPICS, endless, generate
from paceline.deploy.recipes.data import read_rows, sample_rows

MAX_PROMPT_TOKENS = 384
RESERVED = 192  # per topic: prompts of the bench, which no expert learns from
_BENCH_SEED, _TRAINING_SEED = 1009, 2003


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt by the target's chat template; ``number`` is unique."""

    number: int
    topic: str
    token_ids: tuple[int, ...]
    max_tokens: int | None = None  # of the answer, in place of the run's


def bench_texts(data: Path | None = None) -> dict[str, list[str]]:
    """Topic to at most ``RESERVED`` prompts of the bench, in a fixed order.

    Raises:
        paceline.deploy.recipes.data.DataError: the folder holds no usable row.
    """
    if data is None:
        return {topic: list(generate(topic, RESERVED, _BENCH_SEED)) for topic in TOPICS}
    return _row_texts(data, "test", RESERVED, _BENCH_SEED)


def training_texts(count: int, data: Path | None = None) -> dict[str, list[str]]:
    """Topic to at most ``count`` training prompts, none of the bench's.

    Raises:
        paceline.deploy.recipes.data.DataError: the folder holds no usable row.
    """
    taken = {topic: set(texts) for topic, texts in bench_texts(data).items()}
    if data is None:
        return {
            topic: list(
                islice((t for t in endless(topic, _TRAINING_SEED) if t not in taken[topic]), count)
            )
            for topic in TOPICS
        }
    rows = _row_texts(data, "train", count + RESERVED, _TRAINING_SEED)
    return {
        topic: [text for text in texts if text not in taken.get(topic, ())][:count]
        for topic, texts in rows.items()
    }


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a user's message by the chat template."""
    message = [{"role": "user", "content": text}]
    return tuple(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


def encode(tokenizer: Any, texts: dict[str, list[str]]) -> dict[str, list[Prompt]]:
    """Prompts as token ids; those of more than ``MAX_PROMPT_TOKENS`` are left out."""
    prompts: dict[str, list[Prompt]] = {}
    number = 0
    for topic, own in texts.items():
        prompts[topic] = []
        for text in own:
            ids = chat_ids(tokenizer, text)
            if len(ids) <= MAX_PROMPT_TOKENS:
                prompts[topic].append(Prompt(number, topic, ids))
            number += 1
    return prompts


def _row_texts(data: Path, split: str, count: int, seed: int) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {topic: [] for topic in TOPICS}
    for row in sample_rows(read_rows(data, split=split, topics=TOPICS), count, seed):
        if row.prompt not in texts[row.topic]:
            texts[row.topic].append(row.prompt)
    return texts
