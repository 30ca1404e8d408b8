"""The demo's prompts: a seeded generator per topic, thousands of combinations each.

They are written for this repository in the style of the four topics that the embedded target
knows; none is a data set's row. The same seed gives the same prompts everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from paceline.deploy.demo import prompts_code, prompts_math, prompts_shell, prompts_sql

Maker = Callable[[random.Random], str]

MAKERS: dict[str, Maker] = {
    "math": prompts_math.make,
    "code": prompts_code.make,
    "sql": prompts_sql.make,
    "shell": prompts_shell.make,
}
TOPICS: tuple[str, ...] = tuple(MAKERS)
_MAX_REPEATS = 2_000  # draws in a row that may repeat an earlier prompt before giving up


@dataclass(frozen=True, slots=True)
class PromptSplit:
    """One topic's prompts: no prompt is in both parts, none twice in a part."""

    last: tuple[str, ...]
    stream: Iterator[str]


def endless(topic: str, seed: int) -> Iterator[str]:
    """Distinct prompts of a topic, always in the same order for a seed.

    Raises:
        KeyError: the topic is not among ``TOPICS``.
        ValueError: every combination has been given out.
    """
    make, rng = MAKERS[topic], random.Random(f"{seed}:{topic}")
    found: set[str] = set()
    repeats = 0
    while repeats <= _MAX_REPEATS:
        text = make(rng)
        if text in found:
            repeats += 1
            continue
        repeats = 0
        found.add(text)
        yield text
    raise ValueError(f"{topic}: only {len(found)} distinct prompts")


def generate(topic: str, count: int, seed: int) -> tuple[str, ...]:
    """The first ``count`` prompts of :func:`endless`, which says what it raises."""
    return tuple(islice(endless(topic, seed), count))


def split(topic: str, seed: int, measured: int = 40) -> PromptSplit:
    """Prompts that are kept for the last measurement, and those for the stream."""
    texts = endless(topic, seed)
    return PromptSplit(tuple(islice(texts, measured)), texts)
