"""Output of the demo: live table, result table, ``summary.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.deploy.cli.tables import acceptances, outcome_label
from paceline.deploy.demo.stats import (
    Arm,
    FailedRequest,
    RequestLog,
    Throughput,
    Totals,
    range_text,
    totals,
)

WINDOW = 30
TWIN_WINDOW = 10
_ANSWER_S = 5.0  # for which an answer is shown
_PROMPT_CELLS = 44
_TOPIC_CELLS = 7


@dataclass(slots=True)
class LiveState:
    """State of the live table besides the results; updated while the demo runs."""

    phase: str = "starting"
    elapsed: float = 0.0
    total: float = 0.0
    capacity: float | None = None
    rate: float | None = None
    versions: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: str = ""

    def update(self, status: Mapping[str, Any]) -> None:
        """Take versions, decisions and trainer from ``/v1/paceline/status``.

        A part that reports an error keeps its last state.
        """
        versions = status.get("weight_versions")
        if isinstance(versions, dict) and "error" not in versions:
            self.versions = {topic: int(version) for topic, version in versions.items()}
        decisions = status.get("decisions")
        if isinstance(decisions, list):
            for decision in decisions:
                self.decisions[str(decision.get("topic"))] = decision
        trainer = status.get("trainer")
        if isinstance(trainer, dict):
            self.trainer = _trainer_text(trainer)


def _trainer_text(status: Mapping[str, Any]) -> str:
    if "error" in status:
        return "restarting"
    words = (status.get("state"), status.get("topic"))
    steps = status.get("steps")
    text = " ".join(str(word) for word in words if word)
    return f"{text}, {steps} steps" if steps is not None else text


def decision_text(decision: Mapping[str, Any] | None) -> str:
    """Outcome of a decision, and acceptance before and after, expected or live."""
    if decision is None:
        return "-"
    served, candidate = acceptances(decision)
    text = outcome_label(decision)
    if isinstance(served, int | float) and isinstance(candidate, int | float):
        text += f" {served:.2f} → {candidate:.2f}"
    return text


def render(topics: Sequence[str], log: RequestLog, state: LiveState) -> RenderableType:
    """Render the live table."""
    table = Table(expand=False, header_style="bold", pad_edge=False)
    table.add_column("topic", style="bold")
    table.add_column("requests", justify="right")
    table.add_column("acceptance\nonline", justify="right", style="green")
    table.add_column("\nfrozen", justify="right", style="red")
    table.add_column("mean length\nonline", justify="right", style="green")
    table.add_column("\nfrozen", justify="right", style="red")
    table.add_column("tokens/s\nonline", justify="right", style="green")
    table.add_column("\nfrozen", justify="right", style="red")
    table.add_column("draft\nversion", justify="right")
    table.add_column("last decision\n(acceptance)")
    for topic in topics:
        online = totals(log.recent(topic, "online", WINDOW))
        frozen = totals(log.recent(topic, "frozen", TWIN_WINDOW))
        total = sum(1 for _ in log.select(topic, "online"))
        table.add_row(
            topic,
            str(total),
            *_pair(online, frozen),
            f"v{state.versions.get(topic, 0)}",
            decision_text(state.decisions.get(topic)),
        )
    parts: list[RenderableType] = [_head(state), table, _foot(log, state)]
    if (answer := answer_line(log, state.elapsed)) is not None:
        parts.append(answer)
    return Group(*parts)


def _pair(online: Totals, frozen: Totals) -> list[str]:
    cells: list[str] = []
    for name, digits in (
        ("acceptance_rate", 2),
        ("mean_acceptance_length", 2),
        ("tokens_per_second", 0),
    ):
        for side in (online, frozen):
            value = getattr(side, name)
            cells.append("-" if value is None else f"{value:.{digits}f}")
    return cells


def _head(state: LiveState) -> Text:
    width = 30
    done = min(1.0, state.elapsed / state.total) if state.total else 0.0
    filled = round(width * done)
    text = Text()
    text.append("Paceline demo  ", style="bold")
    text.append("━" * filled, style="green")
    text.append("━" * (width - filled), style="bright_black")
    text.append(f"  {_clock(state.elapsed)} of {_clock(state.total)}  ")
    text.append(state.phase, style="bold cyan")
    return text


def _foot(log: RequestLog, state: LiveState) -> Text:
    parts = []
    if state.capacity is not None:
        parts.append(f"capacity {state.capacity:.1f} requests/s")
    if state.rate is not None:
        parts.append(f"arriving {state.rate:.1f}/s")
    if state.trainer:
        parts.append(f"trainer: {state.trainer}")
    text = Text("  ".join(parts), style="bright_black")
    failed = len(log.failures)
    text.append(f"  failed requests: {failed}", style="bold red" if failed else "bright_black")
    return text


def answer_line(log: RequestLog, elapsed: float) -> Text | None:
    """A recent prompt and its answer, each from its start, to be cut at the display's width.

    Another answer is shown every few seconds, so that it can be read; None before the first.
    """
    result = log.latest(elapsed - elapsed % _ANSWER_S)
    if result is None:
        return None
    prompt = Text(_one_line(result.prompt))
    prompt.truncate(_PROMPT_CELLS, overflow="ellipsis")
    return Text.assemble(
        (f"{result.topic:{_TOPIC_CELLS}}", "bold"),
        (prompt.plain, "bright_black"),
        " → ",
        _one_line(result.answer),
        no_wrap=True,
        overflow="ellipsis",
    )


def _one_line(text: str) -> str:
    """Words on one line, without control characters."""
    words = " ".join(text.split())
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def progress_line(topics: Sequence[str], log: RequestLog, state: LiveState) -> str:
    """The display in one line, if there is no terminal."""
    cells = []
    for topic in topics:
        rates = [_recent_rate(log, topic, arm, n) for arm, n in _CURVES]
        cells.append(f"{topic} v{state.versions.get(topic, 0)} {rates[0]}/{rates[1]}")
    return (
        f"[{_clock(state.elapsed)}] {state.phase}: acceptance online/frozen: {', '.join(cells)}; "
        f"{len(log.results)} answers, {len(log.failures)} failed"
    )


_CURVES: tuple[tuple[Arm, int], ...] = (("online", WINDOW), ("frozen", TWIN_WINDOW))


def _recent_rate(log: RequestLog, topic: str, arm: Arm, count: int) -> str:
    rate = totals(log.recent(topic, arm, count)).acceptance_rate
    return "-" if rate is None else f"{rate:.2f}"


def failure_lines(failures: Sequence[FailedRequest], most: int = 5) -> list[str]:
    """Text of the first failures."""
    lines = [f"{f.at:6.1f} s  {f.topic}/{f.arm}: {f.reason}" for f in failures[:most]]
    return lines + ([f"… and {len(failures) - most} more"] if len(failures) > most else [])


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


DIGITS = 4
SHIFTED = ("sql", "shell")  # unseen by the first drafts
_OUTCOMES = ("published", "rejected")
LEAST_GAIN = 0.12  # of their acceptance rate, online against frozen
LEAST_SPEEDUP = 1.25  # of tokens/s, online against plain


def summarize(
    topics: Sequence[str],
    log: RequestLog,
    speed: Throughput,
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
        decisions: of the gate, each with ``outcome``.
        versions: weight version at the end, by topic.
        wall_seconds: of the whole demo.
        measured: number of a topic's first requests in ``acceptance_rate_first``.
    """
    outcomes = Counter(decision.get("outcome") for decision in decisions)
    compared, changed = log.answer_changes()
    result = {
        "topics": {topic: _topic(topic, log, versions, measured) for topic in topics},
        "tokens_per_second": {
            arm: round(speed.rate(arm), 1) for arm in ("plain", "frozen", "online")
        },
        "updates": {name: outcomes[name] for name in _OUTCOMES},
        "answers": {"compared": compared, "changed": changed},
        "last_prompts": {topic: log.num_measured_last(topic) for topic in topics},
        "wall_seconds": round(wall_seconds, 1),
    }
    return result | {"goals": _goals(result, len(log.failures))}


def _goals(result: Mapping[str, Any], failures: int) -> dict[str, bool]:
    """Goals of the demo, met or missed by this run."""
    speed, answers = result["tokens_per_second"], result["answers"]
    gains = {
        f"{topic}_gain": _gain(result["topics"][topic]) >= LEAST_GAIN
        for topic in SHIFTED
        if topic in result["topics"]
    }
    return gains | {
        "online_faster_than_plain": speed["online"] >= LEAST_SPEEDUP * speed["plain"],
        "online_faster_than_frozen": speed["online"] > speed["frozen"],
        "no_failed_request": failures == 0,
        "answers_unchanged": answers["compared"] > 0 and answers["changed"] == 0,
    }


def _gain(row: Mapping[str, Any]) -> float:
    gain: float = row["acceptance_rate_last"] - row["frozen_acceptance_rate_last"]
    return gain


def _topic(
    topic: str, log: RequestLog, versions: Mapping[str, int], measured: int
) -> dict[str, Any]:
    first = totals(log.first(topic, measured))
    last = totals(log.select(topic, "online", "last"))
    frozen = totals(log.select(topic, "frozen", "last"))
    return {
        "acceptance_rate_first": _rounded(first.acceptance_rate),
        "acceptance_rate_last": _rounded(last.acceptance_rate),
        "frozen_acceptance_rate_last": _rounded(frozen.acceptance_rate),
        "mean_acceptance_length_last": _rounded(last.mean_acceptance_length),
        "weight_version": versions.get(topic, 0),
    }


def _rounded(value: float | None) -> float:
    return round(value or 0.0, DIGITS)


def write(summary: Mapping[str, Any], log: RequestLog, folder: Path) -> None:
    """Write ``summary.json``, and every result as a line of ``requests.jsonl``."""
    text = json.dumps(summary, indent=2) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    lines = (json.dumps(result.as_dict()) for result in log.results)
    (folder / "requests.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def result_table(summary: Mapping[str, Any], measured: int) -> Table:
    """Acceptance per topic at the start and the end, online and frozen.

    Args:
        summary: of :func:`summarize`.
        measured: most prompts per topic in each measurement.
    """
    last = range_text(list(summary["last_prompts"].values()))
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
    """Text of speed, updates and unchanged answers."""
    speed, updates = summary["tokens_per_second"], summary["updates"]
    answers = summary["answers"]
    plain = speed["plain"] or 1.0
    return [
        f"tokens/s on the same prompts: plain {speed['plain']:.0f}, "
        f"frozen drafts {speed['frozen']:.0f} ({speed['frozen'] / plain:.2f}x), "
        f"online drafts {speed['online']:.0f} ({speed['online'] / plain:.2f}x)",
        f"gate: {updates['published']} updates published, {updates['rejected']} rejected "
        "(the canary is off: a trial would take half of a topic's requests)",
        f"greedy answers changed by drafts: {answers['changed']} of {answers['compared']}",
    ]


_GOAL_WORDS = {
    "online_faster_than_plain": (
        f"online drafts at least {LEAST_SPEEDUP} times as fast as plain decoding"
    ),
    "online_faster_than_frozen": "online drafts faster than the frozen ones",
    "no_failed_request": "no failed request",
    "answers_unchanged": "greedy answers unchanged by drafts",
}


def goal_lines(summary: Mapping[str, Any]) -> list[str]:
    """Text of the goals, met or missed."""
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
