"""Request traces: arrivals and lengths of real traffic, scaled to one server and one model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from harness import json_lines

GENERATED = "generated"
OUTPUT_TOKENS = 256  # of an answer at most, of the small target's context of 1024
FILES = {"azure code": "azure2023_code.jsonl.gz", "azure conv": "azure2023_conv.jsonl.gz"}
_MINUTE_S = 60.0
_LEAD = 0.25  # of a window's requests come before the busiest minute


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds since the first, and tokens of prompt and answer."""

    at_s: float
    input_tokens: int
    output_tokens: int


def read_trace(path: Path) -> list[Arrival]:
    """All rows of a gzip'd trace (``arrival_s``, ``input_tokens``, ``output_tokens``), in order.

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no row.
    """
    rows = json_lines(path)
    found = [Arrival(r["arrival_s"], r["input_tokens"], r["output_tokens"]) for r in rows]
    if not found:
        raise ValueError(f"{path}: an empty trace")
    return sorted(found, key=lambda arrival: arrival.at_s)


def generated(count: int, seed: int, rate: float = 2.0) -> list[Arrival]:
    """A generated trace: Poisson arrivals; lengths are log-normal, with medians of chat traffic."""
    rng = random.Random(f"trace:{seed}")
    found, now = [], 0.0
    for _ in range(count):
        lengths = (max(1, round(rng.lognormvariate(mean, 0.8))) for mean in (6.9, 4.9))
        found.append(Arrival(now, *lengths))
        now += rng.expovariate(rate)
    return found


def busiest_minute(arrivals: Sequence[Arrival]) -> int:
    """Index of the request that begins the minute with most arrivals; the first of several."""
    times = np.array([arrival.at_s for arrival in arrivals])
    counts = np.searchsorted(times, times + _MINUTE_S) - np.arange(len(times))
    return int(counts.argmax())


def window(arrivals: Sequence[Arrival], count: int, number: int = 0) -> list[Arrival]:
    """``count`` requests in a row around the trace's busiest minute, from time 0.

    Window 0 begins a quarter of its requests before that minute. Windows 1, 2, ... follow without
    a gap or an overlap, and wrap around at the trace's end.

    Raises:
        ValueError: the trace is shorter than one window.
    """
    if count > len(arrivals):
        raise ValueError(f"a window of {count} requests from a trace of {len(arrivals)}")
    places = len(arrivals) - count
    start = min(max(busiest_minute(arrivals) - int(_LEAD * count), 0), places)
    start = (start + number * count) % (places + 1)
    picked = arrivals[start : start + count]
    return [replace(arrival, at_s=arrival.at_s - picked[0].at_s) for arrival in picked]


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals on a stretched time axis: ``rate`` requests per second on average.

    Raises:
        ValueError: all arrive at once, or the rate is not positive.
    """
    first = arrivals[0].at_s
    lasts = arrivals[-1].at_s - first
    if not rate > 0.0 or not lasts > 0.0:
        raise ValueError(f"{len(arrivals)} arrivals in {lasts} s cannot be brought to rate {rate}")
    factor = (len(arrivals) - 1) / rate / lasts
    return [replace(a, at_s=(a.at_s - first) * factor) for a in arrivals]


def answer_tokens(arrivals: Sequence[Arrival], trace: Sequence[Arrival], room: int) -> list[int]:
    """Tokens of every answer at most, 1 to ``room``: scaled so that the trace's 99th percentile
    fits, but never up."""
    longest = float(np.percentile([arrival.output_tokens for arrival in trace], 99))
    scale = min(1.0, room / max(longest, 1.0))
    return [min(room, max(1, round(arrival.output_tokens * scale))) for arrival in arrivals]


def pair_by_rank(wanted: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Give the longest request the longest prompt, the second the second, and so on.

    The trace's prompts are longer than any that the model takes: their order is kept.

    Returns:
        For every request the index of its prompt; each is used once.

    Raises:
        ValueError: there are not as many prompts as requests.
    """
    if len(wanted) != len(lengths):
        raise ValueError(f"{len(wanted)} requests and {len(lengths)} prompts")
    paired = np.empty(len(wanted), dtype=int)
    paired[np.argsort(wanted, kind="stable")] = np.argsort(lengths, kind="stable")
    return [int(index) for index in paired]
