"""Figures for publication out of the units of work: pure, nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from online.bench import unpacked
from online.figures import (
    LEAST_GAP,
    Counts,
    Interval,
    backward_transfer,
    bootstrap,
    bootstrap_mean_of_means,
    difference,
    gap_closed,
    mean,
    pays_after,
    reached,
    recovered,
    transfers,
    window,
    windows,
)
from online.learning import Imagining

_VISIBLE = 0.1  # OSD's least published gain


def topic_summary(
    stream: Mapping[str, Any],
    ceiling: Mapping[str, Any] | None,
    size: int,
    same: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A topic's figures.

    Args:
        stream: result of ``streams.run_stream``.
        ceiling: result of ``ceiling.run_ceiling``; None where it has not been made.
        size: requests per window.
        same: as ``ceiling``, learnt offline from the stream's own prompts.
    """
    frozen, online = unpacked(stream["frozen"]), unpacked(stream["online"])
    looks = {int(at): look for at, look in stream["checkpoints"].items()}
    last = looks[max(looks)]
    found: dict[str, Any] = {
        "requests": len(online),
        "test_prompts": len(last["acceptance"]),
        "windows": {
            "frozen": [asdict(w) for w in windows(frozen, size)],
            "online": [asdict(w) for w in windows(online, size)],
        },
        "curve": {
            at: _figure(bootstrap(mean, look["acceptance"])) for at, look in sorted(looks.items())
        },
        "acceptance": _stages(looks, ceiling, "acceptance", same),
        "overlap": _stages(looks, ceiling, "overlap", same),
        "live_test": _live(stream, ceiling),
        "visible_after": _visible(looks),
        "cost": cost(stream),
    }
    return found


def imagined_summary(
    run: Mapping[str, Any], amount: Imagining, ceiling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Figures of a topic that also learnt from imagined prompts.

    Args:
        run: result of ``imagined.run_imagined``.
        amount: that this run imagined.
        ceiling: as in :func:`topic_summary`.
    """
    looks = {int(at): look for at, look in run["checkpoints"].items()}
    return {
        "acceptance": _stages(looks, ceiling, "acceptance", None),
        "curve": {at: mean(look["acceptance"]) for at, look in sorted(looks.items())},
        "live_test": live(unpacked(run["test_online"])),
        **asdict(amount),
        "made": run["imagined"]["made"],
        "in_test": run["imagined"].get("in_test"),
        "imagining_s": run["imagined"]["seconds"],
        "training_s": run["learning"]["seconds"],
        "published": run["learning"]["published"],
        "machine": run["machine"],
    }


def _stages(
    looks: Mapping[int, Mapping[str, Any]],
    ceiling: Mapping[str, Any] | None,
    measure: str,
    same: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Frozen, online and ceiling on the same test prompts, and how much of the gap was closed."""
    frozen, online = looks[0][measure], looks[max(looks)][measure]
    found: dict[str, Any] = {
        "frozen": _figure(bootstrap(mean, frozen)),
        "online": _figure(bootstrap(mean, online)),
        "gain": _figure(bootstrap(difference, online, frozen)),
    }
    if same is not None:
        scores = same["test"][measure]
        found["same_prompts"] = _figure(bootstrap(mean, scores))
        found["below_same_prompts"] = _figure(bootstrap(difference, scores, online))
    if ceiling is not None:
        best = ceiling["test"][measure]
        found |= {
            "ceiling": _figure(bootstrap(mean, best)),
            "gap": _figure(bootstrap(difference, best, frozen)),
            "below_ceiling": _figure(bootstrap(difference, best, online)),
            "gap_closed": _figure(bootstrap(gap_closed, frozen, online, best)),
            "gap_is_large": difference(best, frozen) >= LEAST_GAP,
            "reached": reached(frozen, online, best),
        }
    return found


def seeds_summary(
    runs: Sequence[Mapping[str, Any]], ceiling: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """Per training seed: acceptance at the stream's end, and the gap closed.

    Args:
        runs: the stream served, then rehearsals under other seeds.
        ceiling: result of ``ceiling.run_ceiling``, or None.
    """
    found = []
    for run in runs:
        looks = {int(at): look for at, look in run["checkpoints"].items()}
        frozen, online = looks[0]["acceptance"], looks[max(looks)]["acceptance"]
        closed = None
        if ceiling is not None:
            closed = gap_closed(frozen, online, ceiling["test"]["acceptance"])
        found.append({"acceptance": mean(online), "gap_closed": closed})
    return found


def _live(stream: Mapping[str, Any], ceiling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The test served for real: acceptance rate and mean acceptance length with intervals."""
    parts = {"frozen": stream["test_frozen"], "online": stream["test_online"]}
    if ceiling is not None:
        parts["ceiling"] = ceiling["test_counts"]
    return {name: live(unpacked(rows)) for name, rows in parts.items()}


def live(counts: Sequence[Counts]) -> dict[str, Any]:
    """Acceptance rate and mean acceptance length of requests, resampled by request."""
    columns = [
        [float(getattr(c, name)) for c in counts] for name in ("accepted", "drafted", "rounds")
    ]

    def rate(accepted: Any, drafted: Any, _rounds: Any) -> float | None:
        return float(accepted.sum() / drafted.sum()) if drafted.sum() else None

    def length(accepted: Any, _drafted: Any, rounds: Any) -> float | None:
        return float(1.0 + accepted.sum() / rounds.sum()) if rounds.sum() else None

    return {
        "acceptance_rate": _figure(bootstrap(rate, *columns)),
        "mean_acceptance_length": _figure(bootstrap(length, *columns)),
    }


def _visible(looks: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Requests until the first look at which the gain over frozen is 0.1; None if never."""
    for at, look in sorted(looks.items()):
        if difference(look["acceptance"], looks[0]["acceptance"]) >= _VISIBLE:
            return at
    return None


def cost(stream: Mapping[str, Any]) -> dict[str, Any]:
    """Seconds and tokens of training per gained point (0.01) of test acceptance, and the speed-up.

    Seconds are those of serving and training in the same process on the same threads.
    """
    frozen, online = unpacked(stream["frozen"]), unpacked(stream["online"])
    looks = {int(at): look for at, look in stream["checkpoints"].items()}
    gain = bootstrap(difference, looks[max(looks)]["acceptance"], looks[0]["acceptance"])
    points = 100.0 * (gain.value or 0.0)
    facts = stream["learning"]
    serving_s = {"frozen": _seconds(frozen), "online": _seconds(online)}
    rates = {
        "frozen": _tokens(frozen) / serving_s["frozen"],
        "online": _tokens(online) / (serving_s["online"] + facts["seconds"]),
        "online without training": _tokens(online) / serving_s["online"],
        "last quarter, online": _rate(online[-len(online) // 4 :]),
        "last quarter, frozen": _rate(frozen[-len(frozen) // 4 :]),
    }
    return {
        "points": points,
        "training_s": facts["seconds"],
        "micro_steps": facts["micro_steps"],
        "rounds_published": facts["published"],
        "rounds_rejected": facts["rejected"],
        "tokens_learnt": facts["positions"],
        "tokens_served": _tokens(online),
        "seconds_per_point": _per_point(facts["seconds"], gain),
        "tokens_per_point": _per_point(facts["positions"], gain),
        "serving_s": serving_s,
        "tokens_per_s": rates,
        "speedup": rates["online"] / rates["frozen"],
        "speedup_without_training": rates["online without training"] / rates["frozen"],
        "speedup_at_the_end": rates["last quarter, online"] / rates["last quarter, frozen"],
        "pays_after": pays_after(frozen, online, facts["seconds"]),
    }


def _per_point(spent: float, gain: Interval) -> dict[str, float | None]:
    """What a point has cost; bounds where the gain is clear of nothing."""
    value, low, high = (
        spent / (100.0 * end) if end is not None and end > 0 else None
        for end in (gain.value, gain.high, gain.low)
    )
    if value is None or low is None or high is None:
        return {"value": value, "low": None, "high": None}
    return {"value": value, "low": low, "high": high}


def _seconds(counts: Sequence[Counts]) -> float:
    return sum(c.seconds for c in counts)


def _tokens(counts: Sequence[Counts]) -> int:
    return sum(c.tokens for c in counts)


def _rate(counts: Sequence[Counts]) -> float:
    return _tokens(counts) / _seconds(counts)


def shift_summary(
    shift: Mapping[str, Any], levels: Mapping[str, float], size: int, *, abrupt: bool
) -> dict[str, Any]:
    """The matrix, what was forgotten, and how soon every phase had recovered.

    Args:
        shift: result of ``shifts.run_shift``.
        levels: topic to the acceptance rate that its own stream had after as many requests.
        size: requests per window.
        abrupt: whether every phase is one topic; only then are there transfer and recovery.
    """
    order, matrix = shift["order"], _matrix(shift, abrupt=abrupt)
    found: dict[str, Any] = {
        "matrix": matrix,
        "mean_at_the_end": _figure(
            bootstrap_mean_of_means([shift["scores"][-1][topic] for topic in order])
        ),
        "learning": {k: v for k, v in shift["learning"].items() if k != "decisions"},
    }
    counts = [unpacked(phase["counts"]) for phase in shift["phases"]]
    found["acceptance_rate"] = window([c for part in counts for c in part]).acceptance_rate
    if not abrupt:
        return found
    found["backward_transfer"] = backward_transfer(matrix, order)
    found["transfers"] = transfers(matrix, order)
    found["most_lost"] = most_lost(matrix)
    found["recovery"] = {
        topic: recovered(windows(part, size), levels[topic])
        for topic, part in zip(order, counts, strict=True)
        if topic in levels
    }
    found["phase_windows"] = {
        topic: [w.acceptance_rate for w in windows(part, size)]
        for topic, part in zip(order, counts, strict=True)
    }
    return found


def _matrix(shift: Mapping[str, Any], *, abrupt: bool) -> dict[str, dict[str, float]]:
    order = shift["order"]
    names = ["before", *(order if abrupt else [f"quarter {i + 1}" for i in range(len(order))])]
    return {
        name: {topic: mean(scores[topic]) for topic in order}
        for name, scores in zip(names, shift["scores"], strict=True)
    }


def shift_seeds(runs: Sequence[Mapping[str, Any]], *, abrupt: bool) -> list[dict[str, Any]]:
    """Per training seed: where every topic ended, and what was lost on the way.

    Args:
        runs: the shift served, then rehearsals under other seeds.
        abrupt: as in :func:`shift_summary`.
    """
    found = []
    for run in runs:
        matrix = _matrix(run, abrupt=abrupt)
        last = list(matrix.values())[-1]
        own: dict[str, Any] = {"at_the_end": last, "mean_at_the_end": mean(list(last.values()))}
        if abrupt:
            own["backward_transfer"] = backward_transfer(matrix, run["order"])
            own["most_lost"] = most_lost(matrix)
        found.append(own)
    return found


def most_lost(matrix: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The topic that fell deepest, at any phase, below the best that it had been before."""
    worst: dict[str, Any] = {"topic": None, "lost": 0.0}
    best: dict[str, float] = {}
    for scores in matrix.values():
        for topic, score in scores.items():
            best[topic] = max(score, best.get(topic, score))
            if best[topic] - score > worst["lost"]:
                worst = {"topic": topic, "lost": best[topic] - score}
    return worst


def level_of(stream: Mapping[str, Any], size: int, requests: int) -> float | None:
    """Acceptance rate that a topic's own stream had: four windows up to so many requests."""
    return window(
        unpacked(stream["online"])[max(0, requests - 4 * size) : requests]
    ).acceptance_rate


def _figure(found: Interval) -> dict[str, float | None]:
    return {k: None if v is None else round(v, 4) for k, v in asdict(found).items()}
