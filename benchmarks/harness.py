"""What all studies share: statistics, facts of the machine, results that are kept, output.

A study is a module with a ``main``: it parses options (:func:`arguments`), measures its variants in
turns on the same blocks (:class:`Timing`), pairs them by block (:func:`paired_ratio`) or by prompt
(:func:`bootstrap`), writes a JSON file with the machine's facts (:func:`write`) and prints a table
(:func:`show`). What takes hours is a unit of a :class:`Store`: a run that was stopped continues.
README.md lists the studies; models.py, prompts.py, decoding.py, clients.py and serving.py have what
they measure with.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import psutil
import torch
import transformers
from numpy.typing import NDArray
from scipy import stats

from paceline import actors, cluster, deploy
from paceline.actors.atomic_file import replace_text

FILLS = 4  # prompts of a block under load for each request in flight
_SOURCES = (".py", ".cpp", ".h", ".yaml")

Item = TypeVar("Item")
Sample = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timing:
    """One variant's run of one block: tokens generated, and seconds that it took.

    A block is a few prompts of one topic; every variant runs it once, so that what disturbs the
    machine for a while disturbs all variants alike and drops out of their ratios.
    """

    variant: str
    block: int
    topic: str
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean over topics with its interval, from ``blocks`` pairs; None: too few blocks."""

    ratio: float
    low: float | None
    high: float | None
    blocks: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Figure with the ends of its 95 % interval, None if not defined."""

    value: float | None
    low: float | None
    high: float | None

    def __str__(self) -> str:
        value, low, high = ("" if x is None else f"{x:.3g}" for x in asdict(self).values())
        return f"{value} ({low} to {high})" if low and high else value


def rotation(items: Sequence[Item], turn: int) -> list[Item]:
    """Items in an order that starts one further on every turn."""
    at = turn % len(items)
    return [*items[at:], *items[:at]]


def answer_lengths(tokens: int, in_flight: int, count: int) -> list[int]:
    """Tokens to ask for of each of ``count`` answers, in the order in which they are asked for.

    The first ones are shorter, so that answers end one after another from then on, as those of
    real clients do. In step, all prompts would be computed at once, then no others for long.
    """
    first = [max(1, tokens * (i + 1) // in_flight) for i in range(in_flight)]
    return [*first, *[tokens] * (count - in_flight)][:count]


def while_all_run(
    replies: Sequence[tuple[Sequence[float], int]], in_flight: int
) -> tuple[int, float]:
    """Tokens, and seconds, from when as many requests have ended until fewer are left.

    As many prompts are computed meanwhile as answers end, if these are of :func:`answer_lengths`.
    From the first request on, prompts of answers that do not count would cost those servers more
    whose answers end at different times.

    Args:
        replies: times of the events of each, in order, over which its tokens are taken to be spread
            evenly, and the number of its tokens; at least twice as many replies as ``in_flight``.
        in_flight: requests at once; the next one follows when one ends.

    Raises:
        ValueError: too few replies.
    """
    if len(replies) < 2 * in_flight:
        raise ValueError(f"{len(replies)} replies are too few with {in_flight} in flight")
    ends = sorted(times[-1] for times, _ in replies)
    since, until = ends[in_flight - 1], ends[-in_flight]
    shares = [
        tokens * (bisect_right(times, until) - bisect_right(times, since)) / len(times)
        for times, tokens in replies
    ]
    return round(sum(shares)), until - since


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers, at least one."""
    return float(stats.gmean(values))


def topic_rates(timings: Sequence[Timing], variant: str) -> dict[str, float]:
    """Tokens per second of a variant by topic, all blocks of a topic together."""
    frame = pd.DataFrame(timings)
    sums = frame[frame.variant == variant].groupby("topic", sort=False)[["tokens", "seconds"]].sum()
    return {str(topic): float(rate) for topic, rate in (sums.tokens / sums.seconds).items()}


def paired_ratio(timings: Sequence[Timing], upper: str, lower: str) -> Ratio:
    """Speed of ``upper`` over ``lower``: mean of log-ratios of blocks, with a 95 % t interval.

    Topics are fixed strata of equal weight: the error is that of blocks within a topic, or of
    topics among each other if every topic has a single block.

    Raises:
        ValueError: a block was run by one of the two alone, or twice, or nothing ran.
    """
    frame = pd.DataFrame(timings, columns=list(Timing.__slots__))
    rates = np.log(frame.tokens / frame.seconds)
    index = pd.MultiIndex.from_frame(frame[["topic", "block"]])
    own = [rates[frame.variant == v].set_axis(index[frame.variant == v]) for v in (upper, lower)]
    if any(log_rates.index.has_duplicates for log_rates in own):
        raise ValueError(f"{upper} or {lower} ran a block twice")
    if own[0].empty or set(own[0].index) != set(own[1].index):
        raise ValueError(f"{upper} and {lower} did not run the same blocks")
    gains = (own[0] - own[1]).groupby(level="topic").agg(["mean", "count", "var"])
    blocks, topics = int(gains["count"].sum()), len(gains)
    centre, freedom = float(gains["mean"].mean()), blocks - topics
    if freedom > 0:
        within = (gains["var"].fillna(0.0) * (gains["count"] - 1)).sum() / freedom
        variance = within * (1.0 / gains["count"]).sum() / topics**2
    elif topics > 1:
        freedom, variance = topics - 1, gains["mean"].var() / topics
    else:
        return Ratio(math.exp(centre), None, None, blocks)
    reach = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Ratio(math.exp(centre), math.exp(centre - reach), math.exp(centre + reach), blocks)


def t_interval(values: Sample) -> Interval:
    """Mean with Student's 95 % interval; without bounds if there are fewer than two values."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, None, None)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * stats.sem(values))
    return Interval(mean, mean - reach, mean + reach)


def bootstrap(
    statistic: Callable[..., float | None],
    *samples: Sample,
    paired: bool = True,
    seed: int = 0,
    resamples: int = 2_000,
) -> Interval:
    """Statistic of samples with its 95 % percentile interval over resampled prompts.

    It has no bounds if there is a single prompt, or if it is rarely defined.

    Args:
        statistic: of as many arrays as there are samples; None if it is not defined.
        samples: entry i of each belongs to prompt i, unless they are not ``paired``.
        paired: whether samples are resampled together.
        seed: of the resampling.
        resamples: number of resamples.

    Raises:
        ValueError: the samples are empty, or do not pair up.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    if not all(map(len, arrays)) or (paired and len({len(array) for array in arrays}) > 1):
        raise ValueError("bootstrap: samples must be of one length, at least 1")
    value = statistic(*arrays)
    if value is None or min(map(len, arrays)) == 1:
        return Interval(value, None, None)

    def defined(*drawn: NDArray[np.float64]) -> float:
        found = statistic(*drawn)
        return math.nan if found is None else found

    settings = {"vectorized": False, "n_resamples": resamples, "method": "percentile"}
    with np.errstate(invalid="ignore"):
        found = stats.bootstrap(arrays, defined, paired=paired, rng=seed, **settings)
    drawn = found.bootstrap_distribution
    if np.isnan(drawn).mean() > 0.5:
        return Interval(value, None, None)
    return Interval(value, *map(float, np.nanquantile(drawn, [0.025, 0.975])))


def differing(
    found: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]
) -> list[str]:
    """Keys of prompts whose tokens are not those expected, in order.

    Raises:
        ValueError: the prompts are not the same ones.
    """
    if found.keys() != expected.keys():
        raise ValueError("answers to different prompts cannot be compared")
    return [key for key in sorted(found) if list(found[key]) != list(expected[key])]


@cache
def build() -> dict[str, str]:
    """The processor, and a hash of Paceline's sources: they decide what a kept speed is worth."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    folders = [Path(package.__path__[0]) for package in (actors, cluster, deploy)]
    found = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*")):
        if path.suffix in _SOURCES:
            found.update(path.read_bytes())
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "sources": found.hexdigest()[:10],
    }


def machine() -> dict[str, Any]:
    """The build, and cores, memory, accelerator, versions and load average of this machine."""
    return {
        **build(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


class Store:
    """Folder of units of work, one JSON each, keyed by name and by all settings that decide it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, settings: Mapping[str, Any], suffix: str = ".json") -> Path:
        """File of a unit, or of what belongs to it under another suffix."""
        return self.folder / f"{name.replace(' ', '-')}-{digest(settings)}{suffix}"

    def unit(
        self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Result on disk, else that of ``make()``, which is then kept."""
        found = self.find(name, settings)
        if found is None:
            say(f"{name} ...")
            found = self.put(name, settings, make())
        return found

    def find(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Result on disk; None if there is no whole one."""
        try:
            kept = json.loads(self.path(name, settings).read_text(encoding="utf-8"))
            same = kept["settings"] == json.loads(json.dumps(settings))
            return dict(kept["result"]) if same else None
        except (OSError, ValueError, KeyError):
            return None

    def put(self, name: str, settings: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Write a result atomically; return it as it will be read again."""
        kept = {"name": name, "settings": settings, "result": result}
        path = self.path(name, settings)
        replace_text(path, json.dumps(kept, indent=1, allow_nan=False) + "\n")
        return dict(json.loads(path.read_text(encoding="utf-8"))["result"])


def digest(settings: Mapping[str, Any]) -> str:
    """Short digest, equal wherever the settings are equal."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a gzip'd file of JSON lines.

    Raises:
        OSError: it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def say(text: object) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def write(path: Path, figures: object) -> None:
    """Write figures as JSON and say where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    say(f"figures: {path}")


def show(title: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as a table."""
    table = pd.DataFrame(list(rows)).to_string(
        index=False, na_rep="", float_format=lambda value: f"{value:.4g}"
    )
    print(f"\n{title}\n{table}", flush=True)  # noqa: T201


def interval(found: Mapping[str, Any]) -> str:
    """A ratio or figure of a JSON file with its interval."""
    value = found.get("value", found.get("ratio"))
    return str(Interval(value, found.get("low"), found.get("high")))


_OPTIONS: dict[str, dict[str, Any]] = {
    "quick": {"action": "store_true", "help": "much less of everything"},
    "target": {"default": "small", "help": "as target.path; small: of tests/fixtures"},
    "data": {"help": "folder of rows, or hf; default: generated prompts"},
    "threads": {"type": int, "default": 1},
    "dtype": {"default": "auto"},
    "out": {"type": Path, "default": Path("out/bench"), "help": "folder of results"},
}


def arguments(doc: str | None, *names: str, **defaults: Any) -> argparse.ArgumentParser:
    """Parser of a module's docstring with these common options and other defaults."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    parser.set_defaults(**defaults)
    return parser


def written(options: argparse.Namespace) -> dict[str, Any]:
    """Options of a run for its JSON file, without folders of this machine."""
    own = {name: value for name, value in vars(options).items() if name not in ("data", "out")}
    return dict(json.loads(json.dumps(own, default=str)))


def parsed(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **quick: Any
) -> argparse.Namespace:
    """Options of a command line; with ``--quick`` these are the defaults."""
    if parser.parse_args(argv).quick:
        parser.set_defaults(**quick)
    return parser.parse_args(argv)
