"""Pictures of docs/small-target.md: curves of acceptance by topic, and matrices of shifts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd

from paceline.deploy.demo.plot import FROZEN, ONLINE, STYLE

mpl.use("Agg")
from matplotlib import pyplot

COLOURS = {
    "frozen": FROZEN,
    "online": ONLINE,
    "suffix": "#4f8a5b",
    "frozen_both": "#b39bc4",
    "both": "#7a4f9a",
}
_CEILING = {"color": "#3b5b92", "linestyle": "--", "label": "offline ceiling, on the test"}


def draw_curves(
    path: Path, curves: Mapping[str, pd.DataFrame], ceilings: Mapping[str, float], measure: str
) -> None:
    """A panel per topic: a curve per column over the requests of the index, and the ceiling."""
    if not curves:
        return
    lines = -(-len(curves) // 2)
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(lines, 2, squeeze=False, dpi=130, figsize=(12, 3.6 * lines))
        for axes in list(grid.flat)[len(curves) :]:
            axes.set_axis_off()
        for axes, (topic, frame) in zip(grid.flat, curves.items(), strict=False):
            frame.plot(ax=axes, color=COLOURS, ylim=(0, None), xlabel="requests", ylabel=measure)
            if topic in ceilings:
                axes.axhline(ceilings[topic], **_CEILING)
            axes.set_title(topic, loc="left", weight="bold")
            axes.legend(frameon=False, fontsize=8)
        _save(figure, path)


def draw_shifts(path: Path, shifts: Mapping[str, Any]) -> None:
    """A matrix per kind and system: acceptance on every test after every phase."""
    with pyplot.rc_context(STYLE | {"axes.grid": False}):
        figure, grid = pyplot.subplots(
            1, len(shifts), squeeze=False, dpi=130, figsize=(3.6 * len(shifts), 3.8)
        )
        for axes, (name, facts) in zip(grid.flat, shifts.items(), strict=True):
            matrix = pd.DataFrame(facts["matrix"]).T
            axes.imshow(matrix, vmin=0.0, vmax=1.0, cmap="YlGn", aspect="auto")
            axes.set_xticks(range(matrix.shape[1]), matrix.columns)
            axes.set_yticks(range(matrix.shape[0]), matrix.index)
            axes.set_title(name, loc="left", weight="bold")
            for (row, column), value in np.ndenumerate(matrix.to_numpy()):
                axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=9)
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
