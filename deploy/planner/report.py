"""The plan as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paceline.deploy.planner.models import ModelShape
from paceline.deploy.planner.roofline import Fit, Hardware, Work, error_summary
from paceline.deploy.planner.speculation import Plan, options

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def show(plan: Plan, console: Console) -> None:
    """Print the tables and the verdict."""
    scenario = plan.scenario
    for role, shape, hardware in (
        ("target", scenario.target, scenario.target_hardware),
        ("draft ", scenario.draft, scenario.draft_hardware),
    ):
        console.print(f"{role} {_model(shape)} on {_machine(hardware)}", highlight=False)
    console.print(
        f"batch {plan.batch}, context {scenario.context}, "
        f"acceptance {scenario.acceptance:g} per draft token\n",
        highlight=False,
    )
    for table in (_steps(plan), _options(plan), _comparison(plan)):
        console.print(table)
    if plan.fit is not None:
        console.print(_fit(plan.fit))
    for line in verdict(plan):
        console.print(line, highlight=False)


def verdict(plan: Plan) -> list[str]:
    """Best k, break-even batch and memory limit in sentences."""
    best, at = plan.best, plan.break_even_batch
    if best.k:
        lines = [f"At batch {plan.batch}: k = {best.k}, {best.speed_up:.2f} times plain decoding."]
    else:
        lines = [f"At batch {plan.batch}: speculation does not pay (k = 0)."]
    if at is None:
        lines.append(f"It pays at batch {plan.limit}, the largest of the search.")
    elif at == 1:
        lines.append(f"It pays at no batch size up to {plan.limit}.")
    else:
        lines.append(f"It stops paying at batch {at} (searched up to {plan.limit}).")
    if plan.fits is not None:
        held = f"Memory holds {plan.fits} requests of this context"
        lines.append(f"{held}, too few for the batch." if plan.fits < plan.batch else f"{held}.")
    return lines


def _steps(plan: Plan) -> Table:
    table = _table("A step", "", "weights", "KV", "activ.", "FLOPs", "ms")
    for step in plan.steps:
        table.add_row(step.name, *_moved(step.work), f"{1e3 * step.time.seconds:.3g}")
    return table


def _options(plan: Plan) -> Table:
    table = _table("A round", "k", r"E\[tokens]", "draft ms", "verify ms", "tokens/s", "speed-up")
    for option in plan.options:
        chosen = option.k == plan.best.k
        table.add_row(
            str(option.k),
            f"{option.expected_tokens:.2f}",
            f"{1e3 * option.draft_s:.3g}",
            f"{1e3 * option.verify_s:.3g}",
            f"{option.tokens_per_second:.4g}",
            f"{option.speed_up:.2f}{' *' if chosen else '  '}",
            style="bold" if chosen else None,
        )
    return table


def _comparison(plan: Plan) -> Table:
    found, n = plan.comparison, plan.comparison.tokens
    table = _table(f"{n} tokens of the target", "", "weights", "KV", "activ.", "FLOPs", "ms")
    for name, work, seconds in (
        (f"{n} of one request", found.one_request, found.one_request_s),
        (f"1 of each of {n}", found.many_requests, found.many_requests_s),
    ):
        table.add_row(name, *_moved(work), f"{1e3 * seconds:.3g}")
    ratio = found.many_requests_s / found.one_request_s
    table.add_row("", "", "", "", "", f"{ratio:.2f}x")
    return table


def _fit(fit: Fit) -> Table:
    table = _table("Fitted to measured steps: errors", "", "count", "median", "largest")
    for how, points in (("", fit.points), (", batch sizes not fitted to", fit.unseen)):
        for kind, errors in error_summary(points).items():
            median, largest = f"{errors['median']:.1%}", f"{errors['largest']:.1%}"
            table.add_row(f"{kind}{how}", f"{errors['count']:.0f}", median, largest)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", expand=False)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _moved(work: Work) -> tuple[str, str, str, str]:
    return (
        f"{_scaled(work.weight_bytes)}B",
        f"{_scaled(work.kv_bytes)}B",
        f"{_scaled(work.activation_bytes)}B",
        _scaled(work.flops),
    )


def _model(shape: ModelShape) -> str:
    size = _scaled(shape.parameters)
    if shape.experts:
        size += f" ({_scaled(shape.active_parameters)} active)"
    return f"{shape.name}: {size} parameters"


def _machine(hardware: Hardware) -> str:
    count = f"{hardware.tensor_parallel} x " if hardware.tensor_parallel > 1 else ""
    return (
        f"{count}{hardware.name} ({_scaled(hardware.bandwidth)}B/s, "
        f"{_scaled(hardware.flops)}FLOP/s, {1e6 * hardware.overhead_s:.3g} us a layer)"
    )


def _scaled(value: float) -> str:
    """Three digits and a unit prefix: ``141 G``."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000.0
    return f"{value:.3g} P"


_COLOURS = ("#0b6e4f", "#3a6ea5", "#b0482f", "#8a929a")
_STYLE: dict[str, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e7ea",
    "axes.axisbelow": True,
}


def draw(plan: Plan, path: Path) -> None:
    """Plot the speed-up by k for some batch sizes, and by batch size at the best k.

    Raises:
        OSError: the file cannot be written.
        ValueError: the file's ending is no known format.
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
    axes.set_xlabel("k, draft tokens")
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
