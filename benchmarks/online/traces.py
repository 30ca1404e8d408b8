"""Request traces: arrivals and lengths of real traffic, scaled to one server and one model."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

GENERATED = "generated bursts"
OUTPUT_TOKENS = 256  # of an answer at most, of the small target's context of 1024
FILES = {"azure code": "azure2023_code.jsonl.gz", "azure conv": "azure2023_conv.jsonl.gz"}
_MINUTE_S = 60.0
_LEAD = 0.25  # of a window's requests come before the busiest minute
_CYCLE_S, _BURST_S, _BURST = 60.0, 15.0, 3.0


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
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if not rows:
        raise ValueError(f"{path}: an empty trace")
    found = [Arrival(r["arrival_s"], r["input_tokens"], r["output_tokens"]) for r in rows]
    return sorted(found, key=lambda arrival: arrival.at_s)


def generated(count: int, seed: int, rate: float = 2.0) -> list[Arrival]:
    """A generated trace: Poisson arrivals at ``rate`` per second, three times as many in bursts.

    A burst of 15 s begins every minute. Lengths are log-normal, with the medians of chat traffic.
    """
    rng = random.Random(f"trace:{seed}")
    found, now = [], 0.0
    while len(found) < count:
        # thinning: exact for a rate that changes with time
        now += rng.expovariate(rate * _BURST)
        quiet = now % _CYCLE_S >= _BURST_S
        if quiet and rng.random() >= 1.0 / _BURST:
            continue
        lengths = (max(1, round(rng.lognormvariate(mean, 0.8))) for mean in (6.9, 4.9))
        found.append(Arrival(now, *lengths))
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


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
    lasts = arrivals[-1].at_s - arrivals[0].at_s
    if not rate > 0.0 or not lasts > 0.0:
        raise ValueError(f"{len(arrivals)} arrivals in {lasts} s cannot be brought to rate {rate}")
    factor = (len(arrivals) - 1) / rate / lasts
    first = arrivals[0].at_s
    return [replace(a, at_s=(a.at_s - first) * factor) for a in arrivals]


def gap_cv(arrivals: Sequence[Arrival]) -> float:
    """Standard deviation over mean of the times between arrivals; 1 for a Poisson process."""
    gaps = np.diff([arrival.at_s for arrival in arrivals])
    return float(gaps.std() / gaps.mean())


def output_scale(arrivals: Sequence[Arrival], room: int) -> float:
    """Factor of the trace's answers, 1 at most: their 99th percentile fills ``room`` tokens."""
    longest = float(np.percentile([arrival.output_tokens for arrival in arrivals], 99))
    return min(1.0, room / max(longest, 1.0))


def answer_tokens(arrivals: Sequence[Arrival], scale: float, room: int) -> list[int]:
    """Tokens of every answer at most, from 1 to ``room``."""
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
    by_request = sorted(range(len(wanted)), key=lambda i: (wanted[i], i))
    by_prompt = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    paired = dict(zip(by_request, by_prompt, strict=True))
    return [paired[i] for i in range(len(wanted))]
