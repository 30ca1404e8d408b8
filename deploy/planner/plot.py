"""The plan as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.deploy.planner.plan import Plan
from paceline.deploy.planner.speculation import options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0b6e4f", "#3a6ea5", "#b0482f", "#8a929a")
_STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7ea",
    "axes.axisbelow": True,
}


def draw(plan: Plan, path: Path) -> None:
    """Write a picture: speed-up by k for some batch sizes, and by batch size at the best k.

    Raises:
        OSError: where the file cannot be written.
        ValueError: for an ending that names no format.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), dpi=130)
        _by_k(left, plan)
        _by_batch(right, plan)
        scenario = plan.scenario
        figure.suptitle(
            f"{scenario.target.name} with {scenario.draft.name}, "
            f"{scenario.target_hardware.tensor_parallel} x {scenario.target_hardware.name}, "
            f"context {scenario.context}, acceptance {scenario.acceptance:g}"
        )
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
        pyplot.close(figure)


def _by_k(axes: Axes, plan: Plan) -> None:
    max_k = plan.options[-1].k
    sizes = sorted({1, plan.batch, *(size for size in (16, 128) if size <= plan.limit)})
    for size, colour in zip(sizes, _COLOURS, strict=False):
        found = options(plan.scenario, size, max_k)
        ups = [option.speed_up for option in found]
        axes.plot(range(max_k + 1), ups, marker="o", color=colour, label=f"batch {size}")
    axes.axhline(1.0, color="#22262b", linewidth=0.8)
    axes.set_xlabel("k, drafted tokens")
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(frameon=False)


def _by_batch(axes: Axes, plan: Plan) -> None:
    sizes = [size for size, _ in plan.batches]
    ups = [option.speed_up for _, option in plan.batches]
    axes.plot(sizes, ups, marker="o", color=_COLOURS[0])
    for size, option in plan.batches:
        axes.annotate(
            f"k={option.k}",
            (size, option.speed_up),
            textcoords="offset points",
            xytext=(0, 7),
            ha="center",
            fontsize=8,
        )
    axes.axhline(1.0, color="#22262b", linewidth=0.8)
    if plan.fits is not None and plan.fits <= plan.limit:
        axes.axvline(plan.fits, color=_COLOURS[2], linestyle=":", label="memory is full")
        axes.legend(frameon=False)
    axes.set_xscale("log", base=2)
    axes.set_xlim(0.8, 1.25 * sizes[-1])
    axes.set_xlabel("batch size")
    axes.set_ylabel("speed-up at the best k")
