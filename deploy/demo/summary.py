"""The demo's result as JSON and as a table for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.deploy.demo.stats import Log, Stopwatch, count_words, figures

DIGITS = 4
SHIFTED = ("sql", "shell")  # what the first drafts have never seen
_OUTCOMES = ("published", "rejected", "promoted", "rolled_back")
LEAST_GAIN = 0.25  # of their acceptance rate, online against frozen


def summarize(
    topics: Sequence[str],
    log: Log,
    speed: Stopwatch,
    decisions: Iterable[Mapping[str, Any]],
    versions: Mapping[str, int],
    wall_seconds: float,
    measured: int = 40,
) -> dict[str, Any]:
    """The object of ``summary.json``.

    Args:
        topics: names, in the order to be shown.
        log: every request.
        speed: the timed rounds of the last measurement.
        decisions: the gate's, each with ``outcome``.
        versions: topic to the weight version at the end.
        wall_seconds: the whole demo.
        measured: how many of a topic's first requests are its ``acceptance_rate_first``.
    """
    outcomes = Counter(decision.get("outcome") for decision in decisions)
    result = {
        "topics": {topic: _topic(topic, log, versions, measured) for topic in topics},
        "tokens_per_second": {
            arm: round(speed.rate(arm), 1) for arm in ("plain", "frozen", "online")
        },
        "updates": {name: outcomes[name] for name in _OUTCOMES},
        "last_prompts": {topic: log.count_last(topic) for topic in topics},
        "wall_seconds": round(wall_seconds, 1),
    }
    return result | {"goals": _goals(result, len(log.failures))}


def _goals(result: Mapping[str, Any], failures: int) -> dict[str, bool]:
    """What the demo sets out to show, and whether this run did."""
    speed = result["tokens_per_second"]
    gains = {
        f"{topic}_gain": _gain(result["topics"][topic]) >= LEAST_GAIN
        for topic in SHIFTED
        if topic in result["topics"]
    }
    return gains | {
        "online_faster_than_plain": speed["online"] > speed["plain"],
        "online_faster_than_frozen": speed["online"] > speed["frozen"],
        "no_failed_request": failures == 0,
    }


def _gain(row: Mapping[str, Any]) -> float:
    gain: float = row["acceptance_rate_last"] - row["frozen_acceptance_rate_last"]
    return gain


def _topic(topic: str, log: Log, versions: Mapping[str, int], measured: int) -> dict[str, Any]:
    first = figures(log.first(topic, measured))
    last = figures(log.select(topic, "online", "last"))
    frozen = figures(log.select(topic, "frozen", "last"))
    return {
        "acceptance_rate_first": _rounded(first.acceptance_rate),
        "acceptance_rate_last": _rounded(last.acceptance_rate),
        "frozen_acceptance_rate_last": _rounded(frozen.acceptance_rate),
        "mean_acceptance_length_last": _rounded(last.mean_acceptance_length),
        "weight_version": versions.get(topic, 0),
    }


def _rounded(value: float | None) -> float:
    return round(value or 0.0, DIGITS)


def write(summary: Mapping[str, Any], log: Log, folder: Path) -> None:
    """``summary.json``, and every sample as a line of ``requests.jsonl``."""
    text = json.dumps(summary, indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    lines = (json.dumps(sample.as_dict()) for sample in log.samples)
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def result_table(summary: Mapping[str, Any], measured: int) -> Table:
    """Per topic: acceptance at the start and at the end, online against frozen.

    Args:
        summary: of :func:`summarize`.
        measured: most prompts per topic in each measurement.
    """
    last = count_words(list(summary["last_prompts"].values()))
    title = f"Acceptance rate: each topic's first {measured} prompts and its last {last}"
    table = Table(title=title, title_justify="left")
    table.add_column("topic")
    for name in ("first", "last", "frozen twin", "gain", "mean length", "version"):
        table.add_column(name, justify="right")
    for topic, row in summary["topics"].items():
        gain = _gain(row)
        color = "green" if gain > 0.02 else "red" if gain < -0.02 else "default"
        table.add_row(
            topic,
            f"{row['acceptance_rate_first']:.2f}",
            f"{row['acceptance_rate_last']:.2f}",
            f"{row['frozen_acceptance_rate_last']:.2f}",
            f"[{color}]{gain:+.2f}[/]",
            f"{row['mean_acceptance_length_last']:.2f}",
            f"v{row['weight_version']}",
        )
    return table


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """Speed and updates in words."""
    speed, updates = summary["tokens_per_second"], summary["updates"]
    plain = speed["plain"] or 1.0
    return [
        f"tokens/s on the same prompts: plain {speed['plain']:.0f}, "
        f"frozen drafts {speed['frozen']:.0f} ({speed['frozen'] / plain:.2f}x), "
        f"online drafts {speed['online']:.0f} ({speed['online'] / plain:.2f}x)",
        f"gate: {updates['published']} updates published, {updates['rejected']} rejected; "
        f"canary: {updates['promoted']} promoted, {updates['rolled_back']} rolled back",
    ]


_GOAL_WORDS = {
    "online_faster_than_plain": "online drafts faster than plain decoding",
    "online_faster_than_frozen": "online drafts faster than the frozen ones",
    "no_failed_request": "no failed request",
}


def goal_lines(summary: Mapping[str, Any]) -> list[str]:
    """Whether this run showed what the demo sets out to show, goal by goal."""
    goals = summary["goals"]
    lines = []
    for name, met in goals.items():
        topic = name.removesuffix("_gain")
        words = _GOAL_WORDS.get(
            name, f"{topic}: acceptance rate at least {LEAST_GAIN} above the frozen twin's"
        )
        lines.append(f"  {'[green]met[/]   ' if met else '[red]missed[/]'} {words}")
    missed = sum(not met for met in goals.values())
    head = "Goals of the demo: all met in this run."
    if missed:
        head = (
            f"Goals of the demo: {missed} of {len(goals)} missed in this run "
            "(a busy or slow machine learns less in the same minutes)."
        )
    return [head, *lines]
