"""The picture of the routing benchmark, and what its policies are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WHOLE = ("mixed", "unpicked", "languages")  # groups of groups
NAMES = {
    "frozen": "the initial draft",
    "single": "one online draft",
    "rule": "experts, classifier",
    "measured": "experts, classifier + Hedge",
    "general": "experts, general alone",
    "chance": "experts, any",
    "label": "experts, topic known",
    "best": "experts, best in hindsight",
    "worst": "experts, worst in hindsight",
}


def draw(path: Path, rows: Sequence[Mapping[str, Any]], along: Mapping[int, Any]) -> None:
    """Acceptance along the stream, and of every policy on the largest groups, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = [g for g in WHOLE if any(r["group"] == g for r in rows)]
    figure, axes = pyplot.subplots(1, 1 + len(groups), figsize=(5 + 5 * len(groups), 4), dpi=120)
    lines = np.atleast_1d(axes)
    for name in next(iter(along.values()), {}):
        shortest = min(len(own[name]) for own in along.values())
        values = np.mean([own[name][:shortest] for own in along.values()], axis=0)
        lines[0].plot(values, label=NAMES[name])
    lines[0].set(title="along the mixed stream", xlabel="rounds of training")
    lines[0].legend(fontsize=7)
    for panel, group in zip(lines[1:], groups, strict=True):
        own = [r for r in rows if r["group"] == group][::-1]
        found = [r["mean_acceptance_length"] for r in own]
        reach = [[f["value"] - f["low"] for f in found], [f["high"] - f["value"] for f in found]]
        panel.errorbar([f["value"] for f in found], range(len(own)), xerr=reach, fmt="o")
        panel.set_yticks(range(len(own)), [NAMES[r["policy"]] for r in own], fontsize=7)
        panel.set(title=f"{group}: tokens per round")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
