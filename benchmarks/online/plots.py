"""Pictures of the figures: acceptance over each stream, and the matrices of the shifts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.deploy.demo.plot import FAINT, FROZEN, INK, ONLINE

_CEILING = "#3b5b92"
_IMAGINED = "#b8860b"
_STYLE: dict[str, Any] = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ea",
}


def draw_streams(path: Path, figures: dict[str, Any]) -> None:
    """A panel per topic: acceptance rate by window, online and frozen, and the ceiling's."""
    _draw_panels(path, figures["topics"], _stream)


def draw_imagined(path: Path, figures: dict[str, Any]) -> None:
    """A panel per topic that was imagined for: acceptance on the test after so many requests.

    Of several amounts of imagining the largest.
    """
    topics = {name: facts for name, facts in figures["topics"].items() if facts.get("imagined")}
    _draw_panels(path, topics, _imagined)


def _draw_panels(
    path: Path, topics: dict[str, Any], panel: Callable[[Any, str, dict[str, Any]], None]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (len(topics) + 1) // 2
    with pyplot.rc_context(_STYLE):
        figure, grid = pyplot.subplots(
            lines, min(2, len(topics)), figsize=(12, 3.6 * lines), squeeze=False, dpi=130
        )
        for axes, (topic, facts) in zip(grid.flat, topics.items(), strict=False):
            panel(axes, topic, facts)
        for axes in list(grid.flat)[len(topics) :]:
            axes.set_axis_off()
        grid.flat[0].legend(frameon=False, fontsize=8)
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def _frame(axes: Any, topic: str, measure: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_title(topic, loc="left", weight="bold")
    axes.set_xlabel("requests")
    axes.set_ylabel(measure)
    axes.grid(axis="y")


def _stream(axes: Any, topic: str, facts: dict[str, Any]) -> None:
    for name, colour in (("frozen", FROZEN), ("online", ONLINE)):
        parts = [w for w in facts["windows"][name] if w["acceptance_rate"] is not None]
        middles = [(w["first"] + w["end"]) / 2 for w in parts]
        axes.plot(middles, [w["acceptance_rate"] for w in parts], color=colour, label=name)
    if "ceiling" in facts["live_test"]:
        level = facts["live_test"]["ceiling"]["acceptance_rate"]["value"]
        axes.axhline(level, color=_CEILING, linestyle="--", label="offline ceiling, on the test")
    _frame(axes, topic, "acceptance rate")


def _imagined(axes: Any, topic: str, facts: dict[str, Any]) -> None:
    most = max(facts["imagined"], key=lambda own: (own["per_record"], own["micro_steps"]))
    alone = {int(at): found["value"] for at, found in facts["curve"].items()}
    taught = {int(at): value for at, value in most["curve"].items()}
    stages = most["acceptance"]
    axes.axhline(stages["frozen"]["value"], color=FROZEN, label="frozen")
    axes.plot(*zip(*sorted(alone.items()), strict=True), color=ONLINE, label="online")
    label = f"online, {most['per_record']:g} prompts imagined for each"
    axes.plot(*zip(*sorted(taught.items()), strict=True), color=_IMAGINED, marker="o", label=label)
    if "ceiling" in stages:
        level = stages["ceiling"]["value"]
        axes.axhline(level, color=_CEILING, linestyle="--", label="offline ceiling")
    _frame(axes, topic, "acceptance on the test")
    axes.legend(frameon=False, fontsize=8)


def draw_shifts(path: Path, figures: dict[str, Any]) -> None:
    """A matrix per kind and system: acceptance on every test after every phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cells = [
        (f"{kind}, {system}", facts["matrix"])
        for kind, systems in figures["shifts"].items()
        for system, facts in systems.items()
    ]
    with pyplot.rc_context(_STYLE):
        figure, grid = pyplot.subplots(
            1, len(cells), figsize=(3.6 * len(cells), 3.8), squeeze=False, dpi=130
        )
        for axes, (title, matrix) in zip(grid.flat, cells, strict=True):
            _matrix(axes, title, matrix)
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def _matrix(axes: Any, title: str, matrix: dict[str, dict[str, float]]) -> None:
    topics = list(next(iter(matrix.values())))
    values = [[found[topic] for topic in topics] for found in matrix.values()]
    axes.imshow(values, vmin=0.0, vmax=1.0, cmap="YlGn", aspect="auto")
    axes.set_xticks(range(len(topics)), topics)
    axes.set_yticks(range(len(values)), list(matrix))
    axes.set_title(title, loc="left", fontsize=10)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9)
