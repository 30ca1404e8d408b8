"""Statistics of the decoding benchmark: pure functions over timed blocks.

A block is a few prompts of one topic; every variant runs it once, so that what disturbs the
machine for a while disturbs all variants alike and drops out of their ratios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy import stats  # type: ignore[import-untyped]

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant's run of one block: tokens generated, and seconds that it took."""

    variant: str
    block: int
    topic: str
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean over topics with its confidence interval, from ``blocks`` pairs.

    ``low`` and ``high`` are None where too few blocks ran to tell.
    """

    ratio: float
    low: float | None
    high: float | None
    blocks: int


def rotation(items: Sequence[Item], turn: int) -> list[Item]:
    """The items in an order that starts one further on every turn."""
    at = turn % len(items)
    return [*items[at:], *items[:at]]


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def topic_rates(timings: Sequence[Timing], variant: str) -> dict[str, float]:
    """Tokens per second of a variant, all blocks of a topic together."""
    tokens: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for timing in timings:
        if timing.variant == variant:
            tokens[timing.topic] = tokens.get(timing.topic, 0) + timing.tokens
            seconds[timing.topic] = seconds.get(timing.topic, 0.0) + timing.seconds
    return {topic: tokens[topic] / seconds[topic] for topic in tokens}


def log_ratios(timings: Sequence[Timing], upper: str, lower: str) -> dict[str, list[float]]:
    """Per topic, log(rate of ``upper`` / rate of ``lower``) of every block.

    Raises:
        ValueError: where a block was run by one of the two alone, or twice, or nothing ran.
    """
    rates: dict[str, dict[int, Timing]] = {upper: {}, lower: {}}
    for timing in timings:
        if timing.variant in rates:
            if timing.block in rates[timing.variant]:
                raise ValueError(f"{timing.variant} ran block {timing.block} twice")
            rates[timing.variant][timing.block] = timing
    if not rates[upper] or rates[upper].keys() != rates[lower].keys():
        raise ValueError(f"{upper} and {lower} did not run the same blocks")
    found: dict[str, list[float]] = {}
    for block, timing in rates[upper].items():
        found.setdefault(timing.topic, []).append(math.log(timing.rate / rates[lower][block].rate))
    return found


def paired_ratio(
    timings: Sequence[Timing], upper: str, lower: str, confidence: float = 0.95
) -> Ratio:
    """How much faster ``upper`` is than ``lower``: geometric mean over topics, t interval.

    Topics are fixed strata of equal weight: the error is that of blocks within a topic. Where
    every topic has a single block, it is that of topics among each other.

    Raises:
        ValueError: as :func:`log_ratios`.
    """
    by_topic = log_ratios(timings, upper, lower)
    blocks = sum(map(len, by_topic.values()))
    means = {topic: math.fsum(values) / len(values) for topic, values in by_topic.items()}
    centre = math.fsum(means.values()) / len(means)
    freedom = blocks - len(means)
    if freedom > 0:
        squares = math.fsum((v - means[t]) ** 2 for t, values in by_topic.items() for v in values)
        weight = math.fsum(1.0 / len(values) for values in by_topic.values()) / len(means) ** 2
    else:
        freedom = len(means) - 1
        squares = math.fsum((mean - centre) ** 2 for mean in means.values())
        weight = 1.0 / len(means)
    if freedom == 0:
        return Ratio(math.exp(centre), None, None, blocks)
    error = math.sqrt(squares / freedom * weight)
    reach = float(stats.t.ppf(0.5 + confidence / 2.0, freedom)) * error
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach), blocks)


def differing(
    found: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]
) -> list[int]:
    """Prompts whose tokens are not those expected, in order.

    Raises:
        ValueError: where the prompts are not the same ones.
    """
    if found.keys() != expected.keys():
        raise ValueError("answers to different prompts cannot be compared")
    return [number for number in sorted(found) if list(found[number]) != list(expected[number])]
