"""The demo's live table: what each topic's draft does, beside its frozen twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paceline.deploy.cli.tables import acceptances, outcome_label
from paceline.deploy.demo.stats import Arm, Failure, Figures, Log, figures

WINDOW = 30
TWIN_WINDOW = 10


@dataclass(slots=True)
class View:
    """What the table shows besides the samples; the demo changes it as it goes."""

    phase: str = "starting"
    elapsed: float = 0.0
    total: float = 0.0
    capacity: float | None = None
    rate: float | None = None
    versions: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    trainer: str = ""

    def take_status(self, status: Mapping[str, Any]) -> None:
        """Keep what ``/v1/paceline/status`` says of versions, gate and trainer.

        A part that is dead for the moment reports an error instead: the last word stays.
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
            self.trainer = _trainer(trainer)


def _trainer(status: Mapping[str, Any]) -> str:
    if "error" in status:
        return "restarting"
    words = (status.get("state"), status.get("topic"))
    steps = status.get("steps")
    text = " ".join(str(word) for word in words if word)
    return f"{text}, {steps} steps" if steps is not None else text


def gate_words(decision: Mapping[str, Any] | None) -> str:
    """The last decision: outcome, and acceptance before and after, expected or live."""
    if decision is None:
        return "-"
    served, candidate = acceptances(decision)
    text = outcome_label(decision)
    if isinstance(served, int | float) and isinstance(candidate, int | float):
        text += f" {served:.2f} → {candidate:.2f}"
    return text


def render(topics: Sequence[str], log: Log, view: View) -> RenderableType:
    """The whole display."""
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
        online = figures(log.recent(topic, "online", WINDOW))
        frozen = figures(log.recent(topic, "frozen", TWIN_WINDOW))
        total = sum(1 for _ in log.select(topic, "online"))
        table.add_row(
            topic,
            str(total),
            *_pair(online, frozen),
            f"v{view.versions.get(topic, 0)}",
            gate_words(view.decisions.get(topic)),
        )
    return Group(_head(view), table, _foot(log, view))


def _pair(online: Figures, frozen: Figures) -> list[str]:
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


def _head(view: View) -> Text:
    width = 30
    done = min(1.0, view.elapsed / view.total) if view.total else 0.0
    filled = round(width * done)
    text = Text()
    text.append("Paceline demo  ", style="bold")
    text.append("━" * filled, style="green")
    text.append("━" * (width - filled), style="bright_black")
    text.append(f"  {_clock(view.elapsed)} of {_clock(view.total)}  ")
    text.append(view.phase, style="bold cyan")
    return text


def _foot(log: Log, view: View) -> Text:
    parts = []
    if view.capacity is not None:
        parts.append(f"capacity {view.capacity:.1f} requests/s")
    if view.rate is not None:
        parts.append(f"arriving {view.rate:.1f}/s")
    if view.trainer:
        parts.append(f"trainer: {view.trainer}")
    text = Text("  ".join(parts), style="bright_black")
    failed = len(log.failures)
    text.append(f"  failed requests: {failed}", style="bold red" if failed else "bright_black")
    return text


def progress_line(topics: Sequence[str], log: Log, view: View) -> str:
    """The display in one line, for where there is no terminal."""
    cells = []
    for topic in topics:
        rates = [_recent_rate(log, topic, arm, n) for arm, n in _CURVES]
        cells.append(f"{topic} v{view.versions.get(topic, 0)} {rates[0]}/{rates[1]}")
    return (
        f"[{_clock(view.elapsed)}] {view.phase}: acceptance online/frozen: {', '.join(cells)}; "
        f"{len(log.samples)} answers, {len(log.failures)} failed"
    )


_CURVES: tuple[tuple[Arm, int], ...] = (("online", WINDOW), ("frozen", TWIN_WINDOW))


def _recent_rate(log: Log, topic: str, arm: Arm, count: int) -> str:
    rate = figures(log.recent(topic, arm, count)).acceptance_rate
    return "-" if rate is None else f"{rate:.2f}"


def failure_lines(failures: Sequence[Failure], most: int = 5) -> list[str]:
    """The first failures in words."""
    lines = [f"{f.at:6.1f} s  {f.topic}/{f.arm}: {f.reason}" for f in failures[:most]]
    return lines + ([f"… and {len(failures) - most} more"] if len(failures) > most else [])


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
