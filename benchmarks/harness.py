"""What all benchmarks share: statistics, facts of the machine, resumable units, output."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import resource
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import psutil
import torch
import transformers
from numpy.typing import NDArray
from scipy import stats

Item = TypeVar("Item")
Sample = Sequence[float] | NDArray[np.float64]
_MIB = 2.0**20


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
        return Interval(value, value, value)

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
    found: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]
) -> list[int]:
    """Prompts whose tokens are not those expected, in order.

    Raises:
        ValueError: the prompts are not the same ones.
    """
    if found.keys() != expected.keys():
        raise ValueError("answers to different prompts cannot be compared")
    return [number for number in sorted(found) if list(found[number]) != list(expected[number])]


def machine() -> dict[str, Any]:
    """Processor, cores, memory, accelerator, versions, and load average of this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def rss_mib() -> float:
    """Resident memory of this process, MiB."""
    return round(psutil.Process().memory_info().rss / _MIB, 1)


def peak_rss_mib() -> float:
    """Peak resident memory of this process, MiB (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (_MIB if platform.system() == "Darwin" else 1024.0), 1)


class Store:
    """Folder of units of work, one JSON each, keyed by name and by all settings that decide it.

    Args:
        folder: results of this machine.
        published: results of others, compressed, which count as this machine's; new ones are added.
    """

    def __init__(self, folder: Path, published: Path | None = None) -> None:
        self.folder = folder
        self._published = published
        for each in (folder, published):
            if each is not None:
                each.mkdir(parents=True, exist_ok=True)

    def path(self, name: str, settings: Mapping[str, Any], suffix: str = ".json") -> Path:
        """File of a unit, or of what belongs to it under another suffix."""
        return self.folder / f"{name}-{digest(settings)}{suffix}"

    def unit(
        self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]]
    ) -> dict[str, Any]:
        """Result on disk, else that of ``make()``, which is then kept."""
        found = self.find(name, settings)
        return self.put(name, settings, make()) if found is None else found

    def find(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
        """Result on disk; None if there is no whole one."""
        published = self._published_path(name, settings)
        for path in (self.path(name, settings), published):
            kept = None if path is None else _read(path)
            if kept is not None and kept.get("settings") == json.loads(json.dumps(settings)):
                if published is not None and _read(published) is None:
                    _publish(kept, published)
                return dict(kept["result"])
        return None

    def put(self, name: str, settings: Mapping[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Write a result atomically; return it as it will be read again."""
        kept = {"name": name, "settings": settings, "result": result}
        path = self.path(name, settings)
        _write(path, (json.dumps(kept, indent=1, allow_nan=False) + "\n").encode())
        if (published := self._published_path(name, settings)) is not None:
            _publish(kept, published)
        return dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def _published_path(self, name: str, settings: Mapping[str, Any]) -> Path | None:
        file = f"{name}-{digest(settings)}.json.gz"
        return None if self._published is None else self._published / file

    def every(self, prefix: str) -> Iterator[dict[str, Any]]:
        """All units with this prefix: name, settings and result, in the names' order."""
        paths = {path.name: [path] for path in self.folder.glob(f"{prefix}*.json")}
        if self._published is not None:
            for path in self._published.glob(f"{prefix}*.json.gz"):
                paths.setdefault(path.name.removesuffix(".gz"), []).append(path)
        for name in sorted(paths):
            kept = next(filter(None, map(_read, paths[name])), None)
            if kept is not None:
                yield kept


def digest(settings: Mapping[str, Any]) -> str:
    """Short digest, equal wherever the settings are equal."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def _write(path: Path, data: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)


def _publish(kept: Mapping[str, Any], path: Path) -> None:
    text = json.dumps(kept, separators=(",", ":"), allow_nan=False)
    _write(path, gzip.compress(text.encode(), mtime=0))


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
        kept = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error, ValueError):
        return None
    whole = isinstance(kept, dict) and {"name", "settings", "result"} <= kept.keys()
    return kept if whole else None


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
    "data": {"help": "folder of rows, or hf; default: generated prompts"},
    "threads": {"type": int, "default": 1},
    "dtype": {"default": "auto"},
    "out": {"type": Path, "default": Path("out/bench"), "help": "folder of results"},
    "published": {"type": Path, "help": "folder of units to continue from"},
}


def arguments(doc: str | None, *names: str) -> argparse.ArgumentParser:
    """Parser of a module's docstring with these common options."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])
    return parser
