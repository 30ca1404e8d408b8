"""What speculation gains: tokens of a round over its time, against plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.costs import Precision, StepTime, Work, step_time, step_work
from paceline.deploy.planner.hardware import Hardware
from paceline.deploy.planner.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything but the batch size and k.

    Attributes:
        target: the model that answers.
        draft: the model that proposes.
        target_hardware: what the target runs on.
        draft_hardware: what the draft runs on.
        precision: bytes of a number.
        context: positions of each request that are in the cache.
        acceptance: expected acceptance, the same at every position and independent.
    """

    target: ModelShape
    draft: ModelShape
    target_hardware: Hardware
    draft_hardware: Hardware
    precision: Precision
    context: int
    acceptance: float

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            ConfigError: for an acceptance outside [0, 1] or a context below 1.
        """
        if not 0.0 <= self.acceptance <= 1.0:
            raise ConfigError(f"acceptance must lie between 0 and 1, not {self.acceptance}")
        if self.context < 1:
            raise ConfigError(f"context must be at least 1 token, not {self.context}")

    def target_work(self, rows: int, tokens: int) -> Work:
        """The target's forward over ``rows`` requests with ``tokens`` new tokens each."""
        return step_work(self.target, self.precision, rows, tokens, self.context)

    def target_time(self, rows: int, tokens: int) -> StepTime:
        """Seconds of the target's forward."""
        return step_time(self.target_work(rows, tokens), self.target_hardware)

    def draft_work(self, rows: int) -> Work:
        """One draft step: a token for every row."""
        return step_work(self.draft, self.precision, rows, 1, self.context)

    def draft_time(self, rows: int) -> StepTime:
        """Seconds of one draft step."""
        return step_time(self.draft_work(rows), self.draft_hardware)


@dataclass(frozen=True, slots=True)
class Option:
    """A round with k drafted tokens for every request of the batch.

    Attributes:
        k: drafted tokens; 0 is plain decoding.
        expected_tokens: of a request and round, the recovered or bonus token included.
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
    """Tokens of a round, (1 - a^(k+1)) / (1 - a): Leviathan et al. 2023, equation 1."""
    if acceptance == 1.0:
        return k + 1.0
    return (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def options(scenario: Scenario, batch: int, max_k: int) -> list[Option]:
    """k = 0 ... ``max_k`` at a batch size."""
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
    """The k that gives the most tokens per second; of equals the smallest."""
    return max(options(scenario, batch, max_k), key=lambda option: option.speed_up)


def stops_paying(scenario: Scenario, max_k: int, limit: int) -> int | None:
    """The batch size from which on speculation does not pay up to ``limit``.

    Returns:
        1 where it never pays, None where it still does at ``limit``. Speed-up need not fall
        steadily (a mixture's is lowest where more tokens still hit more experts): what is
        sought is the last crossing, looked for at ``limit``, half of it, and so on.
    """
    return last_crossing(lambda batch: best_option(scenario, batch, max_k).k > 0, limit)


def last_crossing(pays: Callable[[int], bool], limit: int) -> int | None:
    """The smallest number behind the last one that pays; see :func:`stops_paying`."""
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
class Comparison:
    """n new tokens, of one request or of n: the target's work and time in both cases."""

    tokens: int
    one_request: Work
    many_requests: Work
    one_request_s: float
    many_requests_s: float


def compare(scenario: Scenario, tokens: int) -> Comparison:
    """``tokens`` tokens of one request against one token of each of ``tokens`` requests.

    Weights, products and activations are the same; keys and values are read once or n times.
    """
    return Comparison(
        tokens=tokens,
        one_request=scenario.target_work(1, tokens),
        many_requests=scenario.target_work(tokens, 1),
        one_request_s=scenario.target_time(1, tokens).seconds,
        many_requests_s=scenario.target_time(tokens, 1).seconds,
    )


def largest_batch(scenario: Scenario) -> int | None:
    """Requests whose keys and values fit beside the weights; None where memory is unknown.

    Target and draft are counted where they share accelerators (the same hardware); else the
    target alone.
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
