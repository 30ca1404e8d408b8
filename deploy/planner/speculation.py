"""Speed-up of speculation, best k and break-even batch, from a roofline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.models import ModelShape
from paceline.deploy.planner.roofline import (
    Fit,
    Hardware,
    Precision,
    StepTime,
    Work,
    error_summary,
    step_time,
    step_work,
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Models, machines, context and acceptance.

    Attributes:
        target: shape of the target.
        draft: shape of the draft.
        target_hardware: of the target.
        draft_hardware: of the draft.
        precision: bytes per number.
        context: cached positions per request.
        acceptance: expected acceptance, i.i.d. over positions.
    """

    target: ModelShape
    draft: ModelShape
    target_hardware: Hardware
    draft_hardware: Hardware
    precision: Precision
    context: int
    acceptance: float

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ConfigError: for an acceptance outside [0, 1] or a context below 1.
        """
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"acceptance must lie between 0 and 1, not {self.acceptance}")
        if self.context < 1:
            raise ConfigError(f"context must be at least 1 token, not {self.context}")

    def target_work(self, rows: int, tokens: int) -> Work:
        """Work of the target's forward over ``rows`` requests with ``tokens`` new tokens each."""
        return step_work(self.target, self.precision, rows, tokens, self.context)

    def target_time(self, rows: int, tokens: int) -> StepTime:
        """Seconds of the target's forward."""
        return step_time(self.target_work(rows, tokens), self.target_hardware)

    def draft_work(self, rows: int) -> Work:
        """Work of one draft step: a token per row."""
        return step_work(self.draft, self.precision, rows, 1, self.context)

    def draft_time(self, rows: int) -> StepTime:
        """Seconds of one draft step."""
        return step_time(self.draft_work(rows), self.draft_hardware)


@dataclass(frozen=True, slots=True)
class Option:
    """A round with k draft tokens per request.

    Attributes:
        k: draft tokens; 0 is plain decoding.
        expected_tokens: per request and round, with the recovered or bonus token.
        draft_s: seconds of the k draft steps.
        verify_s: seconds of the target's forward.
        tokens_per_second: of the whole batch.
        speed_up: against k = 0.
    """

    k: int
    expected_tokens: float
    draft_s: float
    verify_s: float
    tokens_per_second: float
    speed_up: float


def expected_tokens(acceptance: float, k: int) -> float:
    """Expected tokens per round, (1 - a^(k+1)) / (1 - a): Leviathan et al. 2023, equation 1."""
    if acceptance == 1.0:
        return k + 1.0
    return (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def options(scenario: Scenario, batch: int, max_k: int) -> list[Option]:
    """Rounds with k = 0 ... ``max_k`` at a batch size."""
    found: list[Option] = []
    draft_s = scenario.draft_time(batch).seconds
    plain_s = scenario.target_time(batch, 1).seconds
    for k in range(max_k + 1):
        tokens = expected_tokens(scenario.acceptance, k)
        verify_s = scenario.target_time(batch, k + 1).seconds
        round_s = k * draft_s + verify_s
        found.append(
            Option(
                k=k,
                expected_tokens=tokens,
                draft_s=k * draft_s,
                verify_s=verify_s,
                tokens_per_second=batch * tokens / round_s,
                speed_up=tokens * plain_s / round_s,
            )
        )
    return found


def best_option(scenario: Scenario, batch: int, max_k: int) -> Option:
    """The k with the most tokens per second; the smallest of equal ones."""
    return max(options(scenario, batch, max_k), key=lambda option: option.speed_up)


def break_even_batch(scenario: Scenario, max_k: int, limit: int) -> int | None:
    """Smallest batch size from which speculation does not pay, up to ``limit``.

    The speed-up is not monotonic (a mixture's is lowest while more tokens hit more experts), so
    this searches the last crossing: at ``limit``, half of it, and so on.

    Returns:
        1 if it never pays, None if it pays at ``limit``.
    """
    return last_crossing(lambda batch: best_option(scenario, batch, max_k).k > 0, limit)


def last_crossing(pays: Callable[[int], bool], limit: int) -> int | None:
    """The number after the last one that pays; see :func:`break_even_batch`."""
    if pays(limit):
        return None
    high, low = limit, limit // 2
    while low and not pays(low):
        high, low = low, low // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pays(middle) else (low, middle)
    return high


@dataclass(frozen=True, slots=True)
class BatchComparison:
    """Work and time of the target for n new tokens of one request, and for one of each of n."""

    tokens: int
    one_request: Work
    many_requests: Work
    one_request_s: float
    many_requests_s: float


def compare(scenario: Scenario, tokens: int) -> BatchComparison:
    """Compare ``tokens`` tokens of one request with one token of each of ``tokens`` requests.

    Weights, products and activations are equal; keys and values are read once or n times.
    """
    return BatchComparison(
        tokens=tokens,
        one_request=scenario.target_work(1, tokens),
        many_requests=scenario.target_work(tokens, 1),
        one_request_s=scenario.target_time(1, tokens).seconds,
        many_requests_s=scenario.target_time(tokens, 1).seconds,
    )


def largest_batch(scenario: Scenario) -> int | None:
    """Requests whose KV cache fits beside the weights; None if the memory's size is unknown.

    Counts target and draft if they have the same hardware, else the target alone.
    """
    hardware = scenario.target_hardware
    if hardware.memory_bytes is None:
        return None
    together = scenario.draft_hardware == hardware
    models = [scenario.target, scenario.draft] if together else [scenario.target]
    weights = sum(model.parameters for model in models) * scenario.precision.weight
    kept = sum(
        2 * model.kv_heads * model.head_dim * model.cached_positions(scenario.context)
        / min(hardware.tensor_parallel, model.kv_heads)
        for model in models
    )  # fmt: skip
    free = hardware.memory_bytes - weights / hardware.tensor_parallel
    return max(0, int(free // (kept * scenario.precision.kv)))


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: its work and its time."""

    name: str
    work: Work
    time: StepTime


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of ``paceline plan``.

    Attributes:
        scenario: models and machines.
        batch: concurrent requests.
        steps: plain decoding, verification at the best k, one draft step.
        options: k = 0, 1, ...
        best: the option with the most tokens per second.
        batches: batch sizes and the best option of each, for the picture.
        break_even_batch: see :func:`break_even_batch`.
        limit: largest batch size of the search.
        fits: see :func:`largest_batch`.
        comparison: n tokens of one request and one of each of n.
        fit: to measured steps; None for a preset.
    """

    scenario: Scenario
    batch: int
    steps: tuple[Step, ...]
    options: tuple[Option, ...]
    best: Option
    batches: tuple[tuple[int, Option], ...]
    break_even_batch: int | None
    limit: int
    fits: int | None
    comparison: BatchComparison
    fit: Fit | None = None


def make_plan(
    scenario: Scenario, batch: int, max_k: int, limit: int, tokens: int, fit: Fit | None = None
) -> Plan:
    """Plan a scenario.

    Args:
        scenario: models and machines.
        batch: concurrent requests.
        max_k: largest k.
        limit: largest batch size of the search for the break-even, or what memory holds.
        tokens: n of the comparison.
        fit: see Plan.
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
        break_even_batch=break_even_batch(scenario, max_k, limit),
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
    """The plan as JSON; bytes, seconds, tokens per second."""
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
        "stops_paying_at_batch": plan.break_even_batch,
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
