"""A plan: everything that the tables, the picture and the JSON show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paceline.deploy.planner.costs import StepTime, Work
from paceline.deploy.planner.measured import Fit, error_summary
from paceline.deploy.planner.shapes import ModelShape
from paceline.deploy.planner.speculation import (
    Comparison,
    Option,
    Scenario,
    best_option,
    compare,
    largest_batch,
    options,
    stops_paying,
)


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: its work and its time."""

    name: str
    work: Work
    time: StepTime


@dataclass(frozen=True, slots=True)
class Plan:
    """What ``paceline plan`` says.

    Attributes:
        scenario: what was asked about.
        batch: requests at once.
        steps: plain decoding, verifying at the best k, one draft step.
        options: k = 0, 1, ...
        best: the option with the most tokens per second.
        batches: batch sizes and the best option of each, for the picture.
        stops_paying_at: batch size from which on speculation does not pay; None up to the limit.
        limit: the largest batch size that was looked at.
        fits: requests that memory holds; None where its size is unknown.
        comparison: n tokens of one request against one of each of n.
        fit: how the machine was fitted to measured steps; None where a preset was taken.
    """

    scenario: Scenario
    batch: int
    steps: tuple[Step, ...]
    options: tuple[Option, ...]
    best: Option
    batches: tuple[tuple[int, Option], ...]
    stops_paying_at: int | None
    limit: int
    fits: int | None
    comparison: Comparison
    fit: Fit | None = None


def make_plan(
    scenario: Scenario, batch: int, max_k: int, limit: int, tokens: int, fit: Fit | None = None
) -> Plan:
    """Work it out.

    Args:
        scenario: models, machines, context, acceptance.
        batch: requests at once.
        max_k: the largest k.
        limit: the largest batch size for the search of where speculation stops to pay; fewer
            where memory does not hold as many.
        tokens: n of the comparison.
        fit: goes into the plan as it is.
    """
    found = options(scenario, batch, max_k)
    best = best_option(scenario, batch, max_k)
    fits = largest_batch(scenario)
    limit = max(batch, limit if fits is None else min(limit, fits))
    sizes = sorted({limit, *(1 << power for power in range(limit.bit_length()))})
    return Plan(
        scenario=scenario,
        batch=batch,
        steps=_steps(scenario, batch, best.k or max_k),
        options=tuple(found),
        best=best,
        batches=tuple((size, best_option(scenario, size, max_k)) for size in sizes),
        stops_paying_at=stops_paying(scenario, max_k, limit),
        limit=limit,
        fits=fits,
        comparison=compare(scenario, tokens),
        fit=fit,
    )


def _steps(scenario: Scenario, batch: int, k: int) -> tuple[Step, ...]:
    return (
        Step("target, 1 token", scenario.target_work(batch, 1), scenario.target_time(batch, 1)),
        Step(
            f"target, {k + 1} tokens",
            scenario.target_work(batch, k + 1),
            scenario.target_time(batch, k + 1),
        ),
        Step("draft, 1 token", scenario.draft_work(batch), scenario.draft_time(batch)),
    )


def to_json(plan: Plan) -> dict[str, Any]:
    """Plain data; bytes, seconds, tokens per second."""
    scenario = plan.scenario
    data: dict[str, Any] = {
        "target": _model(scenario.target),
        "draft": _model(scenario.draft),
        "target_hardware": asdict(scenario.target_hardware),
        "draft_hardware": asdict(scenario.draft_hardware),
        "precision": asdict(scenario.precision),
        "context": scenario.context,
        "acceptance": scenario.acceptance,
        "batch": plan.batch,
        "steps": {
            step.name: {**_work(step.work), **asdict(step.time), "seconds": step.time.seconds}
            for step in plan.steps
        },
        "options": [asdict(option) for option in plan.options],
        "best_k": plan.best.k,
        "best_speed_up": plan.best.speed_up,
        "batches": [{"batch": size, **asdict(option)} for size, option in plan.batches],
        "stops_paying_at_batch": plan.stops_paying_at,
        "largest_batch_tried": plan.limit,
        "requests_that_fit": plan.fits,
        "comparison": {
            "tokens": plan.comparison.tokens,
            "one_request": _work(plan.comparison.one_request),
            "many_requests": _work(plan.comparison.many_requests),
            "one_request_s": plan.comparison.one_request_s,
            "many_requests_s": plan.comparison.many_requests_s,
        },
    }
    if plan.fit is not None:
        data["fit"] = {
            "errors": error_summary(plan.fit.points),
            "errors_of_unseen_batch_sizes": error_summary(plan.fit.unseen),
            "points": [{**asdict(point), "error": point.error} for point in plan.fit.points],
        }
    return data


def _model(shape: ModelShape) -> dict[str, Any]:
    counts = {
        "parameters": shape.parameters,
        "active_parameters": shape.active_parameters,
        "kv_values_per_token": shape.kv_values_per_token,
    }
    return {**asdict(shape), **counts}


def _work(work: Work) -> dict[str, float]:
    return {**asdict(work), "bytes_moved": work.bytes_moved, "flops": work.flops}
