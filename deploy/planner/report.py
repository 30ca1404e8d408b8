"""The plan as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from paceline.deploy.planner.costs import Work
from paceline.deploy.planner.hardware import Hardware
from paceline.deploy.planner.measured import Fit, error_summary
from paceline.deploy.planner.plan import Plan
from paceline.deploy.planner.shapes import ModelShape


def show(plan: Plan, console: Console) -> None:
    """Print everything."""
    scenario = plan.scenario
    for role, shape, hardware in (
        ("target", scenario.target, scenario.target_hardware),
        ("draft ", scenario.draft, scenario.draft_hardware),
    ):
        console.print(f"{role} {_model(shape)} on {_machine(hardware)}", highlight=False)
    console.print(
        f"batch {plan.batch}, context {scenario.context}, "
        f"acceptance {scenario.acceptance:g} per drafted token\n",
        highlight=False,
    )
    for table in (_steps(plan), _options(plan), _comparison(plan)):
        console.print(table)
    if plan.fit is not None:
        console.print(_fit(plan.fit))
    for line in verdict(plan):
        console.print(line, highlight=False)


def verdict(plan: Plan) -> list[str]:
    """The answer in sentences."""
    best, at = plan.best, plan.stops_paying_at
    if best.k:
        lines = [f"At batch {plan.batch}: k = {best.k}, {best.speed_up:.2f} times plain decoding."]
    else:
        lines = [f"At batch {plan.batch}: speculation does not pay (k = 0)."]
    if at is None:
        lines.append(f"It pays at batch {plan.limit}, the largest looked at.")
    elif at == 1:
        lines.append(f"It pays at no batch size that was looked at, up to {plan.limit}.")
    else:
        lines.append(f"It stops to pay at batch {at} (looked at up to {plan.limit}).")
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
    """Three digits and the power of 1000: ``141 G``."""
    for unit in ("", "K", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000.0
    return f"{value:.3g} P"
