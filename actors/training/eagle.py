"""The forward of an EAGLE draft over a batch, several drafted tokens ahead.

In step j the draft predicts the j-th token behind a position whose hidden state the target has
computed; from the second on it reads its own hidden states of the step before, as when it serves
(training-time test of EAGLE-3, Li et al., arXiv 2503.01840).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from paceline.actors.training.batches import Batch
from paceline.actors.training.losses import (
    Objective,
    position_losses,
    recorded_acceptance,
    summarize,
)
from paceline.actors.training.settings import ObjectiveSettings
from paceline.actors.weights.eagle import VOCABULARY, EagleDraft

STEPS = 3
STEP_DECAY = 0.8  # weight of a step's loss relative to the one before
_NEVER = -1e4  # logit of tokens outside the vocabulary
_POSITIONS = 128  # whose logits exist at a time
_WIDTHS = 512  # see batches.py: few shapes of the head


@dataclass(frozen=True, slots=True)
class Effort:
    """How much of the objective is computed; a rough one takes a seventh of the time.

    Attributes:
        steps: drafted tokens.
        tokens: least number of those that stand for the draft's vocabulary, see
            :func:`draw_tokens`; None computes all.
        rng: draws them.
    """

    steps: int = STEPS
    tokens: int | None = None
    rng: np.random.Generator | None = None


FULL = Effort()


def draft_vocabulary(draft: EagleDraft, batch: Batch) -> Batch:
    """A batch with labels in the draft's vocabulary, D tokens.

    A token outside becomes D, the column of :func:`head_logits` that has no probability; what the
    target gave it is dropped, so that a position weighs as much as the draft can propose.
    """
    return _renamed(batch, draft.get_buffer(VOCABULARY).long(), int(draft.config.vocab_size))


def draw_tokens(
    batch: Batch, size: int, least: int, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens that stand for a vocabulary: all that the batch names, and some of the others.

    A drawn token stands for several: with the logarithm of their number added to its logit, the
    expected sum of exponentials is that of all (sampled softmax, Jean et al., arXiv 1412.2007).

    Args:
        batch: with labels in a vocabulary of D tokens.
        size: D.
        least: number of tokens.
        rng: draws them, uniformly.

    Returns:
        int64 ``[S]`` tokens, and float32 ``[S]``, what is added to their logits.
    """
    named = torch.zeros(size + 1, dtype=torch.bool)
    for ids in (batch.top_ids, batch.output_ids):
        named[ids.reshape(-1).cpu()] = True
    own, others = (found.nonzero()[:, 0] for found in (named[:size], ~named[:size]))
    width = -(-max(least, len(own) + _WIDTHS) // _WIDTHS) * _WIDTHS
    count = min(width - len(own), len(others))
    drawn = others[torch.from_numpy(rng.permutation(len(others))[:count])]
    added = torch.zeros(len(own) + count)
    added[len(own) :] = math.log(max(len(others), 1) / max(count, 1))
    device = batch.top_ids.device
    return torch.cat([own, drawn]).to(device), added.to(device)


def _renamed(batch: Batch, ids: Tensor, whole: int) -> Batch:
    """Labels as indices into some tokens of a vocabulary of ``whole`` ones."""
    size = len(ids)
    index = torch.full((whole,), size, device=ids.device)
    index[ids] = torch.arange(size, device=ids.device)
    top = index[batch.top_ids]
    outside = top == size
    return replace(
        batch,
        output_ids=index[batch.output_ids],
        top_ids=top,
        top_logprobs=batch.top_logprobs.masked_fill(outside, -torch.inf),
        processed_probs=batch.processed_probs.masked_fill(outside, 0.0),
    )


def head_logits(draft: EagleDraft, states: Tensor) -> Tensor:
    """Logits ``[N, D + 1]`` of states ``[N, H]``; the last column is of all tokens outside."""
    return _logits(draft.head, states, None)


def _logits(head: Tensor, states: Tensor, added: Tensor | None) -> Tensor:
    logits = functional.linear(states, head)
    if added is not None:
        logits = logits.float() + added
    return functional.pad(logits, (0, 1), value=_NEVER)


def eagle_objective(
    draft: EagleDraft,
    batch: Batch,
    settings: ObjectiveSettings,
    weights: Tensor,
    effort: Effort = FULL,
) -> Objective:
    """The objective of :mod:`losses`, a mean over the steps of falling weight.

    Args:
        draft: with its target's ends.
        batch: with hidden states.
        settings: see ObjectiveSettings.
        weights: float32 ``[N]``, of the positions.
        effort: see Effort.
    """
    own, goals = draft_vocabulary(draft, batch), []
    for states in step_states(draft, batch, effort.steps):
        loss, values, accepted = _HeadLosses.apply(  # type: ignore[no-untyped-call]
            states, draft, own, settings, weights, effort
        )
        goals.append(summarize(loss, values, accepted, own))
    decays = [STEP_DECAY**step for step in range(effort.steps)]
    shares = [decay / sum(decays) for decay in decays]

    def mean(name: str) -> Tensor:
        parts = [getattr(goal, name) for goal in goals]
        return torch.stack([s * part for s, part in zip(shares, parts, strict=True)]).sum(dim=0)

    return Objective(mean("loss"), mean("per_record"), mean("expected_acceptance"))


class _HeadLosses(torch.autograd.Function):
    """Losses from states, a part of the positions at a time.

    Logits of all positions would be hundreds of megabytes that every operation writes again; the
    gradient of the states is taken with each part's loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        draft: EagleDraft,
        batch: Batch,
        settings: ObjectiveSettings,
        weights: Tensor,
        effort: Effort,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted loss (a scalar), and loss and acceptance of every position, ``[N]`` each."""
        gradient, losses, accepted = torch.empty_like(states), [], []
        for start in range(0, len(states), _POSITIONS):
            at = slice(start, start + _POSITIONS)
            part, head, added = batch.positions(at), draft.head, None
            if effort.tokens is not None:
                assert effort.rng is not None
                ids, added = draw_tokens(part, len(head), effort.tokens, effort.rng)
                part, head = _renamed(part, ids, len(head) + 1), head[ids]
            with torch.enable_grad():
                own = states[at].detach().requires_grad_()
                logits = _logits(head, own, added)
                values = position_losses(logits, part, settings)
                if settings.loss == "hard_label":  # no label outside the vocabulary can be learnt
                    values = values * (part.output_ids < len(head))
                gradient[at] = torch.autograd.grad((weights[at] * values).sum(), own)[0]
            losses.append(values.detach())
            with torch.no_grad():
                accepted.append(recorded_acceptance(logits, part.top_ids, part.top_logprobs))
        ctx.save_for_backward(gradient)
        every = torch.cat(losses)
        kept = torch.cat(accepted)
        ctx.mark_non_differentiable(every, kept)
        return (weights * every).sum(), every, kept

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        """The states' gradient, times that of the loss."""
        return (outer[0] * ctx.saved_tensors[0], None, None, None, None, None)


def step_states(draft: EagleDraft, batch: Batch, steps: int = STEPS) -> list[Tensor]:
    """The head's input at the batch's positions in every step, ``[N, H]`` each.

    Args:
        draft: with its target's ends.
        batch: with hidden states.
        steps: drafted tokens.
    """
    assert batch.hidden is not None
    width = batch.input_ids.shape[1]
    positions = torch.arange(width, device=batch.input_ids.device)[None]
    hidden, cache = shifted(batch.hidden.to(draft.dtype)), DynamicCache()
    found = []
    for step in range(steps):
        state = draft.trunk(
            inputs_embeds=draft.inputs(batch.input_ids, hidden),
            attention_mask=_mask(step, width, draft),
            position_ids=positions.expand(len(batch.input_ids), -1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        found.append(state[batch.rows, batch.columns])
        hidden = shifted(state)
    return found


@torch.inference_mode()
def state_basis(draft: EagleDraft, batches: Iterable[Batch]) -> Tensor:
    """The principal components of the head's inputs, float32 ``[R, H]``, orthonormal rows.

    Of their second moments, not centred: a product with the head's rows needs their mean too.

    Args:
        draft: with its target's ends.
        batches: with hidden states.
    """
    size = int(draft.config.hidden_size)
    moments = torch.zeros(size, size)
    for batch in batches:
        states = torch.cat(step_states(draft, batch)).float().cpu()
        moments += states.T @ states
    vectors: Tensor = torch.linalg.eigh(moments).eigenvectors
    return vectors[:, -len(draft.basis) :].T.contiguous()


def shifted(hidden: Tensor) -> Tensor:
    """States ``[B, T, H]`` moved to the next position; the first has none, zeros."""
    return functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def _mask(step: int, width: int, draft: EagleDraft) -> Tensor:
    """Additive mask ``[1, 1, T, (step + 1) * T]`` over the keys of all steps so far.

    Keys of the first step, from the target's states, reach ``step`` positions less far; each later
    step has one key of every drafted token.
    """
    at = torch.arange(width, device=draft.device)
    behind = at[:, None] - at[None]
    seen = [behind >= step, *(behind == step - own for own in range(1, step + 1))]
    allowed = torch.cat(seen, dim=1)
    mask = torch.zeros(allowed.shape, dtype=draft.dtype, device=draft.device)
    return mask.masked_fill_(~allowed, torch.finfo(draft.dtype).min)[None, None]
