"""The demo's prompts: a seeded generator per topic, thousands of combinations each.

They are written for this repository in the style of the four topics that the embedded target
knows; none is a data set's row. The same seed gives the same prompts everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

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
    """One topic's prompts: no prompt is in two parts, none twice in a part."""

    first: tuple[str, ...]
    stream: tuple[str, ...]
    last: tuple[str, ...]


def generate(topic: str, count: int, seed: int) -> tuple[str, ...]:
    """The first ``count`` distinct prompts of a topic; a longer list starts with a shorter one.

    Raises:
        KeyError: the topic is not among ``TOPICS``.
        ValueError: the generator has too few combinations.
    """
    make, rng = MAKERS[topic], random.Random(f"{seed}:{topic}")
    found: dict[str, None] = {}
    repeats = 0
    while len(found) < count:
        size = len(found)
        found.setdefault(make(rng))
        repeats = repeats + 1 if len(found) == size else 0
        if repeats > _MAX_REPEATS:
            raise ValueError(f"{topic}: only {size} distinct prompts, asked for {count}")
    return tuple(found)


def split(topic: str, seed: int, measured: int = 40, stream: int = 600) -> PromptSplit:
    """Prompts for the first and the last measurement and for the stream between them.

    The measured parts do not depend on how long the stream is.
    """
    texts = generate(topic, 2 * measured + stream, seed)
    return PromptSplit(
        first=texts[:measured],
        last=texts[measured : 2 * measured],
        stream=texts[2 * measured :],
    )
