"""Pictures of docs/results.md: acceptance over streams and on tests, and matrices of shifts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.deploy.demo.plot import FAINT, FROZEN, INK, ONLINE

_CEILING, _SYNTHETIC = "#3b5b92", "#b8860b"
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


@contextmanager
def _panels(path: Path, titles: Sequence[str], columns: int, **options: Any) -> Iterator[list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = -(-len(titles) // columns)
    with pyplot.rc_context(_STYLE):
        figure, grid = pyplot.subplots(lines, columns, squeeze=False, dpi=130, **options)
        for axes, title in zip(grid.flat, titles, strict=False):
            axes.set_title(title, loc="left", weight="bold")
        for axes in list(grid.flat)[len(titles) :]:
            axes.set_axis_off()
        yield list(grid.flat)
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def _frame(axes: Any, measure: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests")
    axes.set_ylabel(measure)
    axes.grid(axis="y")
    axes.legend(frameon=False, fontsize=8)


def draw_streams(path: Path, topics: Mapping[str, Any]) -> None:
    """A panel per topic: acceptance rate by window, online and frozen, and the ceiling's."""
    with _panels(path, list(topics), min(2, len(topics)), figsize=(12, 7.2)) as panels:
        for axes, facts in zip(panels, topics.values(), strict=False):
            for name, colour in (("frozen", FROZEN), ("online", ONLINE)):
                parts = [w for w in facts["windows"][name] if w["acceptance_rate"] is not None]
                middles = [(w["first"] + w["end"]) / 2 for w in parts]
                axes.plot(middles, [w["acceptance_rate"] for w in parts], color=colour, label=name)
            if "ceiling" in facts["test_served"]:
                level = facts["test_served"]["ceiling"]["acceptance_rate"]["value"]
                label = "offline ceiling, on the test"
                axes.axhline(level, color=_CEILING, linestyle="--", label=label)
            _frame(axes, "acceptance rate")


def draw_synthetic(path: Path, topics: Mapping[str, Any]) -> None:
    """A panel per topic: acceptance on the test, with the most synthetic prompts and without."""
    own = {name: facts for name, facts in topics.items() if facts["synthetic"]}
    with _panels(path, list(own), min(2, len(own)), figsize=(12, 7.2)) as panels:
        for axes, facts in zip(panels, own.values(), strict=False):
            most = max(facts["synthetic"], key=lambda s: (s["per_record"], s["micro_steps"]))
            label = f"online, {most['per_record']:g} synthetic prompts for each"
            axes.axhline(facts["frozen"]["value"], color=FROZEN, label="frozen")
            curve = facts["checkpoints"]
            axes.plot(list(curve), list(curve.values()), color=ONLINE, label="online")
            curve = most["checkpoints"]
            axes.plot(list(curve), list(curve.values()), "o-", color=_SYNTHETIC, label=label)
            if "ceiling" in facts:
                level = facts["ceiling"]["value"]
                axes.axhline(level, color=_CEILING, linestyle="--", label="offline ceiling")
            _frame(axes, "acceptance on the test")


def draw_shifts(path: Path, shifts: Mapping[str, Any]) -> None:
    """A matrix per kind and system: acceptance on every test after every phase."""
    found = {name: facts["matrix"] for name, facts in shifts.items()}
    size = (3.6 * len(found), 3.8)
    with _panels(path, list(found), len(found), figsize=size) as panels:
        for axes, matrix in zip(panels, found.values(), strict=True):
            topics = list(next(iter(matrix.values())))
            values = [[scores[topic] for topic in topics] for scores in matrix.values()]
            axes.imshow(values, vmin=0.0, vmax=1.0, cmap="YlGn", aspect="auto")
            axes.set_xticks(range(len(topics)), topics)
            axes.set_yticks(range(len(values)), list(matrix))
            for row, line in enumerate(values):
                for column, value in enumerate(line):
                    axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9)
