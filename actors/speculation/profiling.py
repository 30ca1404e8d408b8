"""Profiling of the target and its drafts, for the goodput policy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

import torch

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.top_tokens import most_probable
from paceline.actors.speculation.colocated import ProfiledStack
from paceline.actors.speculation.costs import (
    DraftCosts,
    PrefillCosts,
    StepCosts,
    grid_points,
    profile,
)
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pool.profile import profile_pool
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.weights.slots import is_candidate

_PROFILED_CONTEXT = 128  # tokens
_PROFILED_PROMPT = 64  # tokens
_ENOUGH_S = 2.0  # of the target's profile on CPUs: a server must start
_ROLLOUT = 4  # draft steps of one call that are profiled together


def stepper(runner: ModelRunner, context: int) -> Callable[[int, int, int], None]:
    """``run(rows, tokens, experts)``: one forward behind ``context`` cached positions."""

    def run(rows: int, tokens: int, experts: int) -> None:
        ids, positions = _new_tokens(runner, rows, context, tokens)
        layout = ExpertLayout([i % experts for i in range(rows)], runner.device)
        logits = runner.forward(range(rows), ids, positions, context + tokens, layout=layout)
        most_probable(logits).tolist()  # waits for the device

    return run


def verify_stepper(runner: ModelRunner, context: int, most: int) -> Callable[[int, int], None]:
    """``run(rows, column)``: one verification behind ``context`` positions.

    The column is GoodputPolicy's; of a ragged one's drafted tokens the first rows have ``most``
    each, the others none.
    """

    def run(rows: int, column: int) -> None:
        drafted = [column - 1] * rows
        if runner.is_ragged:
            own = max(most, -(-(column - 1) // rows))
            drafted = [min(max(column - 1 - i * own, 0), own) for i in range(rows)]
        tokens = max(drafted) + 1
        ids, positions = _new_tokens(runner, rows, context, tokens)
        num_drafted = torch.tensor(drafted, device=runner.device)
        logits = runner.verify(range(rows), ids, positions, context + tokens, num_drafted)
        most_probable(logits).tolist()  # waits for the device

    return run


def rollout_stepper(runner: ModelRunner, context: int) -> Callable[[int, int], None]:
    """``run(rows, experts)``: ``_ROLLOUT`` draft steps at once behind ``context`` positions."""

    def run(rows: int, experts: int) -> None:
        ids, positions = _new_tokens(runner, rows, context, 1 + _ROLLOUT)
        layout = ExpertLayout([i % experts for i in range(rows)], runner.device)
        new, span = (ids[:, :2], positions[:, :2]), context + 1 + _ROLLOUT
        drafted = runner.rollout(range(rows), *new, span, _ROLLOUT, layout)
        if drafted is None:  # no graph was recorded: each step is a forward
            forward = stepper(runner, context)
            for _ in range(_ROLLOUT):
                forward(rows, 1, experts)
        else:
            drafted[0].tolist()  # waits for the device

    return run


def _new_tokens(
    runner: ModelRunner, rows: int, context: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """So many token ids per row and their positions behind ``context``, for which it has blocks."""
    for row in range(rows):  # if memory is short, some rows read the padding block
        runner.kv.allocate(row, context + tokens)
    positions = (context + torch.arange(tokens, device=runner.device)).expand(rows, -1)
    return torch.zeros(rows, tokens, dtype=torch.int64, device=runner.device), positions


def profile_draft(
    draft: ModelRunner, context: int, rows: Sequence[int], experts: Sequence[int]
) -> dict[tuple[int, int], float]:
    """Seconds of one draft step by (rows, experts)."""
    if not draft.rolls_out:
        run = stepper(draft, context)
        return profile(lambda b, e: run(b, 1, e), rows, experts, time.perf_counter)
    several = rollout_stepper(draft, context)
    times = profile(several, rows, experts, time.perf_counter)
    return {at: seconds / _ROLLOUT for at, seconds in times.items()}


def build_policy(
    settings: TargetSettings,
    runner: ModelRunner,
    stacks: Sequence[ExpertStack],
    pool: PoolProposer | None = None,
    others: Sequence[ProfiledStack] = (),
    *,
    suffixes: bool = False,
    num_models: Callable[[Collection[str]], int] = len,
) -> GoodputPolicy | None:
    """Profile costs and build the goodput policy; None if k is fixed or there are no drafts.

    With ``suffixes`` it weighs suffix drafts too, which cost no more than their verification.
    ``num_models`` is the proposer's.

    All drafts are assumed to cost as much as those of the first architecture; ``others`` are
    profiled only if there is nothing else. Costs of a pool's drafts include the round trip.
    """
    drafts = stacks or pool or others
    if settings.num_speculative_tokens is not None or not (drafts or suffixes):
        return None
    rows = grid_points(settings.max_num_seqs)
    most = max(1, min(settings.max_speculative_tokens, runner.max_model_len - 2))
    columns = {1, 2, (most + 2) // 2, most + 1}
    if runner.is_ragged:
        columns |= {n + 1 for n in (2 * most, 4 * most) if n < runner.max_model_len}
    start = max(0, min(_PROFILED_CONTEXT, runner.max_model_len - max(columns)))
    run = verify_stepper(runner, start, most)
    # On GPUs only the third turn and later ones replay graphs, as rounds do.
    enough_s = _ENOUGH_S if runner.device.type == "cpu" else math.inf
    target_costs = profile(run, rows, sorted(columns), time.perf_counter, enough_s=enough_s)
    for row in range(settings.max_num_seqs):
        runner.kv.free(row)
    if not drafts:
        costs = DraftCosts({(1, 1): target_costs[1, 1]})  # never asked for
    elif pool is not None:
        costs = DraftCosts(profile_pool(pool, settings, rows, target_costs[1, 1]))
    elif not stacks:
        costs = DraftCosts(profile(lambda b, _: others[0].step(b), rows, [1], time.perf_counter))
    else:
        draft = stacks[0].runner
        served = sum(not is_candidate(name) for name in stacks[0].names)
        experts = grid_points(min(served, len(draft.models), settings.max_num_seqs))
        costs = DraftCosts(profile_draft(draft, start, rows, experts), _profile_prefill(draft))
        for row in range(settings.max_num_seqs):
            draft.kv.free(row)
    return GoodputPolicy(
        StepCosts(target_costs), costs, most, ragged=runner.is_ragged, num_models=num_models
    )


def _profile_prefill(draft: ModelRunner) -> PrefillCosts:
    """Costs of a draft's prefill, from prompts of two lengths."""
    few, many = 1, max(2, min(_PROFILED_PROMPT, draft.max_model_len - 1))
    draft.kv.allocate(0, many)

    def run(_: int, tokens: int) -> None:
        draft.prefill(0, [0] * tokens, 0)
        if draft.device.type == "cuda":
            torch.cuda.synchronize(draft.device)

    times = profile(run, [1], [few, many], time.perf_counter)
    token_s = max(times[1, many] - times[1, few], 0.0) / (many - few)
    return PrefillCosts(max(times[1, few] - few * token_s, 0.0), token_s)
