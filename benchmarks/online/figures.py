"""Figures of units of work: windows, share of a gap closed, recovery, forgetting, cost. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from harness import Interval, Sample, bootstrap

from online.serving import Answer

LEAST_GAP = 0.15  # from frozen to ceiling, below which a share of it says little
SHARE = 0.9  # of such a gap that is to be closed
WITHIN = 0.02  # of the ceiling, if the gap is small
Unit = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Counts:
    """Speculation of one request; ``seconds`` are of the processor."""

    rounds: int
    drafted: int
    accepted: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Window:
    """Requests ``first`` to ``end - 1`` together; figures are None if nothing was drafted."""

    first: int
    end: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None


def packed(answers: Iterable[Answer]) -> list[list[float]]:
    """Counts of answers in the prompts' order, as JSON."""
    return [
        [a.rounds, a.drafted, a.accepted, a.tokens, round(a.seconds, 5)]
        for a in sorted(answers, key=lambda a: a.number)
    ]


def unpacked(rows: Sequence[Sequence[float]]) -> list[Counts]:
    """Counts of :func:`packed`."""
    return [Counts(int(r), int(d), int(a), int(t), s) for r, d, a, t, s in rows]


def windows(counts: Sequence[Counts], size: int) -> list[Window]:
    """Disjoint windows of ``size`` requests in order; a rest that fills none is left out."""
    return [window(counts[at : at + size], at) for at in range(0, len(counts) - size + 1, size)]


def window(counts: Sequence[Counts], first: int = 0) -> Window:
    """Requests as one window: sums over requests, then ratios."""
    rounds, drafted, accepted = (
        sum(getattr(c, name) for c in counts) for name in ("rounds", "drafted", "accepted")
    )
    rate = accepted / drafted if drafted else None
    return Window(first, first + len(counts), rate, 1.0 + accepted / rounds if rounds else None)


def mean(sample: Sample) -> float:
    """Mean of a sample."""
    return float(np.mean(sample))


def difference(upper: Sample, lower: Sample) -> float:
    """Difference of means."""
    return mean(upper) - mean(lower)


def gap_closed(frozen: Sample, online: Sample, ceiling: Sample) -> float | None:
    """(online - frozen) / (ceiling - frozen) of means; None if there is no gap to close."""
    gap = difference(ceiling, frozen)
    return difference(online, frozen) / gap if gap > 0 else None


def reached(frozen: Sample, online: Sample, ceiling: Sample) -> bool:
    """Whether the goal is: 90 % of a gap of 0.15 or more, else within 0.02 of the ceiling."""
    if difference(ceiling, frozen) >= LEAST_GAP:
        share = gap_closed(frozen, online, ceiling)
        return share is not None and share >= SHARE
    return difference(ceiling, online) <= WITHIN


def recovered(parts: Sequence[Window], level: float, within: float = WITHIN) -> int | None:
    """Requests until the end of the first window within ``within`` of a level; None if never."""
    for part in parts:
        if part.acceptance_rate is not None and part.acceptance_rate >= level - within:
            return part.end - parts[0].first
    return None


def most_lost(matrix: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The topic that fell deepest, at any phase, below its best before, and by how much."""
    worst: dict[str, Any] = {"topic": None, "lost": 0.0}
    best: dict[str, float] = {}
    for scores in matrix.values():
        for topic, score in scores.items():
            best[topic] = max(score, best.get(topic, score))
            if best[topic] - score > worst["lost"]:
                worst = {"topic": topic, "lost": best[topic] - score}
    return worst


def pays_after(frozen: Sequence[Counts], online: Sequence[Counts], training_s: float) -> int | None:
    """First request at which online, training spread evenly over it, is as fast; None if never."""
    share = training_s / len(online)
    lead = np.cumsum([f.seconds - o.seconds - share for f, o in zip(frozen, online, strict=True)])
    behind = np.flatnonzero(lead < 0)
    first = int(behind[-1]) + 2 if len(behind) else 1
    return first if first <= len(online) else None


def _rounded(found: Interval) -> dict[str, float | None]:
    return {k: None if v is None else round(v, 4) for k, v in asdict(found).items()}


def _checkpoints(unit: Unit) -> dict[int, list[float]]:
    found = {int(at): own["acceptance"] for at, own in unit["checkpoints"].items()}
    return dict(sorted(found.items()))


def topic_summary(stream: Unit, ceiling: Unit | None, size: int) -> dict[str, Any]:
    """Figures of a topic's stream, in windows of ``size`` requests."""
    found = acceptance_summary(stream, ceiling)
    parts = {"frozen": stream["test_frozen"], "online": stream["test_online"]}
    if ceiling is not None:
        parts["ceiling"] = ceiling["test_counts"]
    return found | {
        "requests": len(stream["online"]),
        "windows": {
            name: [asdict(w) for w in windows(unpacked(stream[name]), size)]
            for name in ("frozen", "online")
        },
        "test_served": {name: served(unpacked(rows)) for name, rows in parts.items()},
        "cost": cost(stream),
    }


def acceptance_summary(unit: Unit, ceiling: Unit | None) -> dict[str, Any]:
    """Acceptance on the test: frozen, online, ceiling, share of the gap closed, checkpoints."""
    scores = _checkpoints(unit)
    frozen, online = scores[0], scores[max(scores)]
    found: dict[str, Any] = {
        "frozen": _rounded(bootstrap(mean, frozen)),
        "online": _rounded(bootstrap(mean, online)),
        "gain": _rounded(bootstrap(difference, online, frozen)),
        "checkpoints": {at: round(mean(own), 4) for at, own in scores.items()},
    }
    if ceiling is not None:
        best = ceiling["test"]["acceptance"]
        found |= {
            "ceiling": _rounded(bootstrap(mean, best)),
            "gap_closed": _rounded(bootstrap(gap_closed, frozen, online, best)),
            "reached": reached(frozen, online, best),
        }
    return found


def seeds_summary(runs: Sequence[Unit], ceiling: Unit | None) -> list[dict[str, Any]]:
    """Acceptance at the stream's end and the gap closed, per training seed."""
    found = []
    for run in runs:
        scores = _checkpoints(run)
        frozen, online = scores[0], scores[max(scores)]
        best = None if ceiling is None else ceiling["test"]["acceptance"]
        closed = None if best is None else gap_closed(frozen, online, best)
        found.append({"acceptance": mean(online), "gap_closed": closed})
    return found


def served(counts: Sequence[Counts]) -> dict[str, Any]:
    """Acceptance rate and mean acceptance length of requests, resampled by request."""
    columns = np.array([[c.accepted, c.drafted, c.rounds] for c in counts], dtype=np.float64).T

    def rate(accepted: Any, drafted: Any, _: Any) -> float | None:
        return float(accepted.sum() / drafted.sum()) if drafted.sum() else None

    def length(accepted: Any, _: Any, rounds: Any) -> float | None:
        return float(1.0 + accepted.sum() / rounds.sum()) if rounds.sum() else None

    return {
        "acceptance_rate": _rounded(bootstrap(rate, *columns)),
        "mean_acceptance_length": _rounded(bootstrap(length, *columns)),
    }


def cost(stream: Unit) -> dict[str, Any]:
    """Training's seconds per point (0.01) of test acceptance, and speed over the frozen twin.

    Seconds are those of serving and training in the same process on the same threads.
    """
    frozen, online = unpacked(stream["frozen"]), unpacked(stream["online"])
    scores, facts = _checkpoints(stream), stream["learning"]
    points = 100.0 * difference(scores[max(scores)], scores[0])

    def rate(counts: Sequence[Counts], more_s: float = 0.0) -> float:
        return sum(c.tokens for c in counts) / (sum(c.seconds for c in counts) + more_s)

    names = ("micro_steps", "published", "rejected", "positions")
    return {name: facts[name] for name in names} | {
        "points": points,
        "training_s": facts["seconds"],
        "seconds_per_point": facts["seconds"] / points if points > 0 else None,
        "speedup": rate(online, facts["seconds"]) / rate(frozen),
        "speedup_without_training": rate(online) / rate(frozen),
        "pays_after": pays_after(frozen, online, facts["seconds"]),
    }


def shift_summary(
    shift: Unit, levels: Mapping[str, float], size: int, *, abrupt: bool
) -> dict[str, Any]:
    """Acceptance matrix, most lost topic, and requests until recovery by phase."""
    order = shift["order"]
    names = ["before", *(order if abrupt else [f"quarter {i + 1}" for i in range(len(order))])]
    matrix = {
        name: {topic: mean(scores[topic]) for topic in order}
        for name, scores in zip(names, shift["scores"], strict=True)
    }
    last = [shift["scores"][-1][topic] for topic in order]
    at_the_end = bootstrap(lambda *s: mean([mean(own) for own in s]), *last, paired=False)
    found: dict[str, Any] = {
        "matrix": matrix,
        "mean_at_the_end": _rounded(at_the_end),
        "micro_steps": shift["learning"]["micro_steps"],
    }
    if not abrupt:
        return found
    found["most_lost"] = most_lost(matrix)
    if "phases" in shift:
        parts = [windows(unpacked(phase["counts"]), size) for phase in shift["phases"]]
        found["recovery"] = {
            topic: recovered(part, levels[topic])
            for topic, part in zip(order, parts, strict=True)
            if topic in levels
        }
    return found


def level_of(stream: Unit, size: int, requests: int) -> float | None:
    """Acceptance rate of a topic's own stream: four windows up to so many requests."""
    own = unpacked(stream["online"])[max(0, requests - 4 * size) : requests]
    return window(own).acceptance_rate
