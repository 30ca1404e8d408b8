"""The benchmarks' arithmetic: windows, how much of a gap was closed, recovery, transfer. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LEAST_GAP = 0.15  # from frozen to ceiling, below which a share of it says little
SHARE = 0.9  # of such a gap that is to be closed
WITHIN = 0.02  # of the ceiling, where the gap is small

Sample = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Counts:
    """What speculation did for one request; ``seconds`` are of the processor."""

    rounds: int
    drafted: int
    accepted: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """Requests ``first`` to ``end - 1`` together; figures are None where nothing was drafted."""

    first: int
    end: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with the ends of its interval, None where it is not defined."""

    value: float | None
    low: float | None
    high: float | None


def windows(counts: Sequence[Counts], size: int) -> list[Window]:
    """Disjoint windows of ``size`` requests in order; a rest that fills none is left out."""
    return [window(counts[at : at + size], at) for at in range(0, len(counts) - size + 1, size)]


def window(counts: Sequence[Counts], first: int = 0) -> Window:
    """Requests as one window: sums over requests, then ratios."""
    rounds = sum(c.rounds for c in counts)
    drafted = sum(c.drafted for c in counts)
    accepted = sum(c.accepted for c in counts)
    return Window(
        first=first,
        end=first + len(counts),
        acceptance_rate=accepted / drafted if drafted else None,
        mean_acceptance_length=1.0 + accepted / rounds if rounds else None,
    )


def gap_closed(frozen: Sample, online: Sample, ceiling: Sample) -> float | None:
    """(online - frozen) / (ceiling - frozen) of means; None where there is no gap to close."""
    gap = float(np.mean(ceiling)) - float(np.mean(frozen))
    return (float(np.mean(online)) - float(np.mean(frozen))) / gap if gap > 0 else None


def bootstrap(
    statistic: Callable[..., float | None],
    *samples: Sample,
    seed: int = 0,
    resamples: int = 2_000,
    confidence: float = 0.95,
) -> Interval:
    """A statistic of paired samples with its percentile interval over resampled prompts.

    Args:
        statistic: of as many arrays as there are samples; None where it is not defined.
        samples: of equal lengths, entry i of each being prompt i's.
        seed: of the resampling.
        resamples: how many.
        confidence: of the interval.

    Raises:
        ValueError: where the samples do not pair up.
    """
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    count = len(arrays[0])
    if count == 0 or any(array.shape != (count,) for array in arrays):
        raise ValueError("bootstrap: samples must be of one length, at least 1")
    rng = np.random.default_rng(seed)
    drawn = [
        value
        for picks in rng.integers(count, size=(resamples, count))
        if (value := statistic(*(array[picks] for array in arrays))) is not None
    ]
    value = statistic(*arrays)
    if value is None or len(drawn) < resamples // 2:
        return Interval(value, None, None)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high))


def bootstrap_mean_of_means(
    samples: Sequence[Sample], *, seed: int = 0, resamples: int = 2_000, confidence: float = 0.95
) -> Interval:
    """The mean of the samples' means with its percentile interval, each resampled by itself.

    Args:
        samples: of any lengths, at least 1 each; every sample counts alike.
        seed: of the resampling.
        resamples: how many.
        confidence: of the interval.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    drawn = [a[rng.integers(len(a), size=(resamples, len(a)))].mean(1) for a in arrays]
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(np.mean(drawn, axis=0), [tail, 1.0 - tail])
    return Interval(float(np.mean([a.mean() for a in arrays])), float(low), float(high))


def difference(upper: Sample, lower: Sample) -> float:
    """Of means."""
    return float(np.mean(upper)) - float(np.mean(lower))


def mean(sample: Sample) -> float:
    """Of a sample."""
    return float(np.mean(sample))


def reached(frozen: Sample, online: Sample, ceiling: Sample) -> bool:
    """Whether the goal is: 90 % of a gap of 0.15 or more, else within 0.02 of the ceiling."""
    if difference(ceiling, frozen) >= LEAST_GAP:
        share = gap_closed(frozen, online, ceiling)
        return share is not None and share >= SHARE
    return difference(ceiling, online) <= WITHIN


def recovered(parts: Sequence[Window], level: float, within: float = WITHIN) -> int | None:
    """Requests until the end of the first window within ``within`` of a level; None if never.

    Args:
        parts: a phase's windows in order.
        level: acceptance rate to come back to.
        within: how much below it still counts.
    """
    start = parts[0].first if parts else 0
    for part in parts:
        if part.acceptance_rate is not None and part.acceptance_rate >= level - within:
            return part.end - start
    return None


def transfers(matrix: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> dict[str, float]:
    """What later phases did to every earlier topic; negative is forgetting.

    Acceptance after the last phase less that after the topic's own phase, of all topics but the
    last: the terms of Lopez-Paz and Ranzato, arXiv 1706.08840, equation 3.

    Args:
        matrix: phase to topic to acceptance after that phase.
        order: of the phases, each named like its topic, two at least.
    """
    last = matrix[order[-1]]
    return {topic: last[topic] - matrix[topic][topic] for topic in order[:-1]}


def backward_transfer(matrix: Mapping[str, Mapping[str, float]], order: Sequence[str]) -> float:
    """The mean of :func:`transfers`, with the same arguments."""
    found = transfers(matrix, order)
    return math.fsum(found.values()) / len(found)


def pays_after(frozen: Sequence[Counts], online: Sequence[Counts], training_s: float) -> int | None:
    """First request at which online, training included, has been as fast as frozen; None if never.

    Training is taken to be spread evenly over the stream.

    Args:
        frozen: of the same prompts, in order.
        online: of the same prompts, in order.
        training_s: seconds of the whole stream.
    """
    share = training_s / len(online)
    lead = np.cumsum([f.seconds - o.seconds - share for f, o in zip(frozen, online, strict=True)])
    behind = np.flatnonzero(lead < 0)
    if len(behind) == 0:
        return 1
    first = int(behind[-1]) + 2
    return first if first <= len(online) else None
