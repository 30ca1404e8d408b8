"""The loss of a batch: which positions count, with which weight each, see ObjectiveSettings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.training import losses
from paceline.actors.training.batches import Batch
from paceline.actors.training.objective_settings import ObjectiveSettings

_DIVERGENCES = {
    "forward_kl": losses.forward_kl,
    "reverse_kl": losses.reverse_kl,
    "total_variation": losses.total_variation,
    "lk_hybrid": losses.lk_hybrid,
}


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a batch.

    Attributes:
        loss: scalar, with a gradient.
        per_record: ``[B]`` mean loss over the emitted positions of each record, whatever they
            weigh, without a gradient.
        expected_acceptance: scalar, mean of its lower bound over the emitted positions, without
            a gradient.
    """

    loss: Tensor
    per_record: Tensor
    expected_acceptance: Tensor


def objective(
    logits: Tensor, batch: Batch, settings: ObjectiveSettings, weights: Tensor | None = None
) -> Objective:
    """Weigh the positions of a batch and average their losses.

    Args:
        logits: float ``[N, V]``, the draft's at the batch's positions.
        batch: the N positions.
        settings: see ObjectiveSettings.
        weights: float32 ``[N]``, where the batch is a part of one whose weights were shared out;
            None: those of :func:`position_weights`.
    """
    values = position_losses(logits, batch, settings)
    weights = position_weights([batch], settings) if weights is None else weights
    loss = (weights * values).sum()
    with torch.no_grad():
        accepted = losses.recorded_acceptance(logits, batch.top_ids, batch.top_logprobs)
        emitted = (~batch.branch).to(values.dtype)
        sums = values.new_zeros(batch.num_records)
        counts = sums.index_add(0, batch.rows, emitted)
        sums = sums.index_add(0, batch.rows, emitted * values.detach())
        return Objective(loss, sums / counts, (accepted * emitted).sum() / emitted.sum())


def position_losses(logits: Tensor, batch: Batch, settings: ObjectiveSettings) -> Tensor:
    """The loss of every position, ``[N]``, before any weighting."""
    if settings.loss == "hard_label":
        return losses.hard_label(logits, batch.output_ids)
    target = (batch.top_ids, batch.top_logprobs, batch.tail_mass)
    if settings.loss == "jsd":
        return losses.jsd(logits, *target, beta=settings.jsd_beta)
    return _DIVERGENCES[settings.loss](logits, *target)


def position_weights(batches: Sequence[Batch], settings: ObjectiveSettings) -> Tensor:
    """Weight of every position of what a step learns from, float32 ``[N]``; they sum to 1.

    Args:
        batches: one after the other; how they are parted changes nothing.
        settings: see ObjectiveSettings.
    """
    accepted = torch.cat([batch.accepted for batch in batches])
    branch = torch.cat([batch.branch for batch in batches])
    weight = _rejection_weights(accepted, branch, settings)
    emitted = _shares(weight * ~branch)
    proposed = _shares(weight * (branch | (accepted >= 0)))
    share = {"target": 0.0, "student": 1.0, "mixed": settings.student_share}[settings.sampling]
    total = _shares((1.0 - share) * emitted + share * proposed)
    # without a single draft token nothing was rejected and nothing proposed
    return torch.where(total.sum() > 0.0, total, _shares((~branch).float()))


def _rejection_weights(accepted: Tensor, branch: Tensor, settings: ObjectiveSettings) -> Tensor:
    rejected = (accepted == 0) & ~branch
    if settings.weighting == "rejected_only":
        return rejected.float()
    factor = settings.rejection_weight if settings.weighting == "first_rejection" else 1.0
    return torch.where(rejected, factor, 1.0)


def _shares(weights: Tensor) -> Tensor:
    """The same, summing to 1; zeros stay zeros."""
    return weights / weights.sum().clamp(min=1e-12)
