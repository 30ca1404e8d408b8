"""Plot of the demo: acceptance over requests, online and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.deploy.demo.stats import (
    RequestLog,
    range_text,
    rolling_acceptance,
    totals,
    version_changes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONLINE, FROZEN, INK, FAINT = "#0b6e4f", "#b0482f", "#22262b", "#8a929a"
_PANEL_POINTS, _LABEL_POINTS = 190.0, 13.0  # height of a panel, and of a label with margin
_SHADES = ("#ffffff", "#f1f4f7", "#ffffff", "#f1f4f7")
STYLE: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.grid": True,
    "grid.color": "#e3e7ea",
    "axes.axisbelow": True,
}


def draw(
    path: Path,
    topics: Sequence[str],
    log: RequestLog,
    phases: Sequence[tuple[str, int]],
    end: int,
    window: int = 24,
) -> None:
    """Write the plot as a PNG.

    Args:
        path: file to write.
        topics: one panel each.
        log: every request.
        phases: name and first order of each phase.
        end: order after the stream's last request.
        window: requests per point of the online curve.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = (len(topics) + 1) // 2
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(
            rows, 2, figsize=(12, 3.3 * rows + 1.2), sharey=True, squeeze=False, dpi=130
        )
        panels = list(grid.flat)
        for axes, topic in zip(panels, topics, strict=False):
            _panel(axes, topic, log, phases, end, window)
        for axes in panels[len(topics) :]:
            axes.set_visible(False)
        _label(figure, grid, _subtitle(topics, log))
        figure.subplots_adjust(
            left=0.055, right=0.985, top=0.865, bottom=0.075, hspace=0.34, wspace=0.07
        )
        figure.savefig(path)
        pyplot.close(figure)


def _label(figure: Any, grid: Any, subtitle: str) -> None:
    for axes in grid[:, 0]:
        axes.set_ylabel("accepted / drafted tokens")
    for axes in grid[-1]:
        axes.set_xlabel("requests served")
    figure.text(0.055, 0.965, "Drafts that learn from traffic", size=16, weight="bold")
    figure.text(0.055, 0.935, subtitle, size=10.5, color=FAINT)


def _subtitle(topics: Sequence[str], log: RequestLog) -> str:
    count = sum(1 for _ in log.select(arm="online", part="stream"))
    dots = range_text([log.num_measured_last(topic) for topic in topics])
    return (
        f"Acceptance rate over {count} requests. Dashed: the first one of a new weight version. "
        f"Dots: {dots} unseen prompts."
    )


def _panel(
    axes: Axes,
    topic: str,
    log: RequestLog,
    phases: Sequence[tuple[str, int]],
    end: int,
    window: int,
) -> None:
    _shade(axes, phases, end)
    online = list(log.select(topic, "online", "stream"))
    twins = list(log.select(topic, "frozen", "stream"))
    for order, version in version_changes(online):
        axes.axvline(order, ymax=0.84, color=ONLINE, alpha=0.35, lw=0.9, ls=(0, (3, 3)))
        axes.annotate(
            f"v{version}", (order, 0.84), xycoords=("data", "axes fraction"), size=7,
            color=ONLINE, ha="center", va="bottom",
        )  # fmt: skip
    # twins are fewer: a smaller window covers the same time
    twin_window = max(3, round(window * len(twins) / max(1, len(online))))
    gap = end / 6
    _curve(axes, rolling_acceptance(twins, twin_window), gap, color=FROZEN, lw=1.6)
    _curve(axes, rolling_acceptance(online, window), gap, color=ONLINE, lw=2.2)
    _ends(axes, topic, log, end)
    axes.set_title(topic, loc="left", weight="bold", size=12)
    axes.set_xlim(-0.02 * end, max(end, 1) * 1.2)
    axes.set_ylim(0, 1)


def _shade(axes: Axes, phases: Sequence[tuple[str, int]], end: int) -> None:
    starts = [start for _, start in phases] + [end]
    lines = name_lines(phases, end)
    for index, (name, start) in enumerate(phases):
        axes.axvspan(start, starts[index + 1], color=_SHADES[index % len(_SHADES)], lw=0, zorder=0)
        if index:
            axes.axvline(start, color=INK, lw=1.0, alpha=0.55)
        axes.annotate(
            name, (start, 0.985), xycoords=("data", "axes fraction"),
            xytext=(4, -10 * lines[index]), textcoords="offset points",
            size=8, color=FAINT, va="top",
        )  # fmt: skip


def name_lines(phases: Sequence[tuple[str, int]], end: int) -> list[int]:
    """Line, 0 or 1, of each phase's name, so that names of short phases do not overlap.

    A character takes about 1/70 of the panel.
    """
    lines: list[int] = []
    free = [float("-inf"), float("-inf")]
    for name, start in phases:
        line = 0 if start >= free[0] or free[1] >= free[0] else 1
        free[line] = start + (len(name) + 2) * max(end, 1) * 1.22 / 70
        lines.append(line)
    return lines


def _curve(axes: Axes, points: Sequence[tuple[int, float]], gap: float, **style: Any) -> None:
    """Plot a line with gaps while a topic had no requests."""
    piece: list[tuple[int, float]] = []
    for point in [*points, None]:
        if piece and (point is None or point[0] - piece[-1][0] > gap):
            axes.plot(*zip(*piece, strict=True), solid_capstyle="round", **style)
            piece = []
        if point is not None:
            piece.append(point)


def _ends(axes: Axes, topic: str, log: RequestLog, end: int) -> None:
    """Plot the last measurement, on unseen prompts, as labelled dots."""
    last = totals(log.select(topic, "online", "last")).acceptance_rate
    frozen = totals(log.select(topic, "frozen", "last")).acceptance_rate
    dot: dict[str, Any] = {"marker": "o", "ms": 7, "mec": "white", "mew": 1.2, "clip_on": False}
    places = [(last, ONLINE, "online"), (frozen, FROZEN, "frozen")]
    shown = [(value, color, name) for value, color, name in places if value is not None]
    shifts = label_shifts([value for value, _, _ in shown])
    for (value, color, name), shift in zip(shown, shifts, strict=True):
        axes.plot([end * 1.02], [value], color=color, zorder=5, **dot)
        axes.annotate(
            f"{value:.2f} {name}", (end * 1.02, value), xytext=(8, shift),
            textcoords="offset points", color=color, size=9, weight="bold", va="center",
            annotation_clip=False,
        )  # fmt: skip


def label_shifts(values: Sequence[float]) -> list[float]:
    """Vertical shifts, points, of two labels at these heights (0 to 1), so that both are readable.

    The higher one moves up and the lower one down (if equal, the first moves up). One near the
    floor does not move down; the other one moves further up.
    """
    if len(values) < 2 or abs(values[0] - values[1]) * _PANEL_POINTS >= _LABEL_POINTS:
        return [0.0] * len(values)
    lack = _LABEL_POINTS - abs(values[0] - values[1]) * _PANEL_POINTS
    down = min(lack / 2, min(values) * _PANEL_POINTS)
    high, low = lack - down, -down
    return [high, low] if values[0] >= values[1] else [low, high]
