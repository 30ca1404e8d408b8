"""The demo's result as JSON and as a table for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.deploy.demo.stats import Log, Stopwatch, figures

DIGITS = 4


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
    return {
        "topics": {topic: _topic(topic, log, versions, measured) for topic in topics},
        "tokens_per_second": {
            arm: round(speed.rate(arm), 1) for arm in ("plain", "frozen", "online")
        },
        "updates": {name: outcomes[name] for name in ("published", "rejected")},
        "wall_seconds": round(wall_seconds, 1),
    }


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
        measured: prompts per topic in each measurement.
    """
    title = f"Acceptance rate: the first and the last {measured} prompts of each topic"
    table = Table(title=title, title_justify="left")
    table.add_column("topic")
    for name in ("first", "last", "frozen twin", "gain", "mean length", "version"):
        table.add_column(name, justify="right")
    for topic, row in summary["topics"].items():
        gain = row["acceptance_rate_last"] - row["frozen_acceptance_rate_last"]
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
        f"gate: {updates['published']} updates published, {updates['rejected']} rejected",
    ]
