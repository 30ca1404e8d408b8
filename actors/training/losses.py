"""The loss of a batch: divergences per position, and the positions' weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.training.batches import Batch
from paceline.actors.training.settings import ObjectiveSettings

_LEAST = math.log(1e-7)  # lower bound of a tail's log mass, so that losses are bounded
_NEVER = -100.0  # in place of log 0
_HYBRID_SHARPNESS = 3.0


def recorded_logprobs(draft_logits: Tensor, top_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's log-probabilities on the recorded buckets.

    Args:
        draft_logits: float ``[N, V]``.
        top_ids: int64 ``[N, K]``, distinct within a row.

    Returns:
        ``[N, K]`` log q of the recorded tokens, and ``[N]`` log q of the tail, at least
        log(1e-7); float32, or float64 if the logits are.
    """
    logits = _wide(draft_logits)
    top = logits.gather(-1, top_ids)
    whole = top.logsumexp(dim=-1)
    if top_ids.shape[-1] == logits.shape[-1]:
        log_q = top - whole[..., None]
        return log_q, log_q.new_full(log_q.shape[:-1], _LEAST)
    # Summed over the tail's own tokens: 1 - sum(q) has no digits left if q is sharp. The whole sum
    # then needs K more terms: one pass over the vocabulary.
    tail = logits.scatter(-1, top_ids, -torch.inf).logsumexp(dim=-1)
    whole = torch.logaddexp(whole, tail)
    return top - whole[..., None], (tail - whole).clamp(min=_LEAST)


def forward_kl(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """KL(target || draft) on the recorded buckets."""
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    log_p = top_logprobs.to(log_q.dtype)
    p = log_p.exp()
    top = (p * (log_p.nan_to_num(neginf=0.0) - log_q)).sum(-1)
    tail = tail_mass.to(log_q.dtype)
    # xlogy is 0 at a mass of 0, as is its gradient
    return top + torch.xlogy(tail, tail) - tail * log_q_tail


def reverse_kl(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """KL(draft || target) on the recorded buckets.

    A bucket without target probability counts as exp(-100), a tail as 1e-7: the draft pays for
    its probability there, within bounds.
    """
    log_q, log_p = _buckets(draft_logits, top_ids, top_logprobs, tail_mass)
    return (log_q.exp() * (log_q - log_p)).sum(-1)


def jsd(
    draft_logits: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    tail_mass: Tensor,
    *,
    beta: float = 0.5,
) -> Tensor:
    """Generalised Jensen-Shannon divergence on the recorded buckets.

    With m = beta p + (1 - beta) q of target p and draft q it is
    beta KL(p || m) + (1 - beta) KL(q || m) (Agarwal et al. 2306.13649, eq. 1), at most the
    entropy of (beta, 1 - beta). It is not a weighted sum of the two KLs between p and q. Divided
    by beta it tends to the forward KL as beta goes to 0, and likewise to the reverse one at 1.

    Raises:
        ValueError: beta is not between 0 and 1.
    """
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta must lie between 0 and 1, not be {beta}")
    log_q, log_p = _buckets(draft_logits, top_ids, top_logprobs, tail_mass)
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
    target = (log_p.exp() * (log_p - log_m)).sum(-1)
    draft = (log_q.exp() * (log_q - log_m)).sum(-1)
    return beta * target + (1.0 - beta) * draft


def total_variation(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """1 - sum of min(p, q) on the recorded buckets: the probability of a rejection.

    Leviathan et al. 2211.17192, section 3.2.
    """
    _, upper = expected_acceptance(draft_logits, top_ids, top_logprobs, tail_mass)
    return 1.0 - upper


def lk_hybrid(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """Forward KL far from the target, rejection near it: w KL + (1 - w) (1 - alpha).

    alpha is the expected acceptance on the buckets, and w = exp(-3 alpha) has no gradient. If
    draft and target hardly overlap, the gradient of 1 - alpha vanishes, that of the KL does not.
    """
    rejection = total_variation(draft_logits, top_ids, top_logprobs, tail_mass)
    weight = (_HYBRID_SHARPNESS * (rejection.detach() - 1.0)).exp()
    divergence = forward_kl(draft_logits, top_ids, top_logprobs, tail_mass)
    return weight * divergence + (1.0 - weight) * rejection


def hard_label(draft_logits: Tensor, token_ids: Tensor) -> Tensor:
    """Cross-entropy of the emitted tokens: fine-tuning, the baseline of distillation.

    Args:
        draft_logits: float ``[N, V]``.
        token_ids: int64 ``[N]``.

    Returns:
        ``[N]``.
    """
    logits = _wide(draft_logits)
    return logits.logsumexp(dim=-1) - logits.gather(-1, token_ids[:, None]).squeeze(-1)


def expected_acceptance(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds of the expected acceptance, the sum over the vocabulary of min(p, q).

    Returns:
        ``[N]`` lower bound, over the recorded tokens, and ``[N]`` upper bound, with min(p, q) of
        the tails added.
    """
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    lower = torch.minimum(top_logprobs.to(log_q.dtype).exp(), log_q.exp()).sum(-1)
    return lower, lower + torch.minimum(tail_mass.to(log_q.dtype), log_q_tail.exp())


def recorded_acceptance(draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """The lower bound of :func:`expected_acceptance`, ``[N]``, at half the cost."""
    logits = _wide(draft_logits)
    log_q = logits.gather(-1, top_ids) - logits.logsumexp(dim=-1, keepdim=True)
    return torch.minimum(top_logprobs.to(log_q.dtype).exp(), log_q.exp()).sum(-1)


def _buckets(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Finite log q and log p of the K + 1 buckets, ``[N, K + 1]`` each."""
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    log_p = top_logprobs.to(log_q.dtype).clamp(min=_NEVER)
    log_p_tail = tail_mass.to(log_q.dtype).clamp(min=math.exp(_LEAST)).log()
    both = (
        torch.cat([log_q, log_q_tail[:, None]], -1),
        torch.cat([log_p, log_p_tail[:, None]], -1),
    )
    return both[0].clamp(min=_NEVER), both[1]


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


_DIVERGENCES = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
    "lk_hybrid": lk_hybrid,
}


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of a batch.

    Attributes:
        loss: scalar, with a gradient.
        per_record: ``[B]`` unweighted mean loss over the emitted positions of each record, without
            a gradient.
        expected_acceptance: scalar, mean lower bound over the emitted positions, without a
            gradient.
    """

    loss: Tensor
    per_record: Tensor
    expected_acceptance: Tensor


def objective(
    logits: Tensor, batch: Batch, settings: ObjectiveSettings, weights: Tensor | None = None
) -> Objective:
    """The weighted mean of the losses of a batch's positions.

    Args:
        logits: float ``[N, V]``, the draft's at the batch's positions.
        batch: the N positions.
        settings: see ObjectiveSettings.
        weights: float32 ``[N]``, of a share of a larger batch; None: those of
            :func:`position_weights`.
    """
    values = position_losses(logits, batch, settings)
    weights = position_weights([batch], settings) if weights is None else weights
    with torch.no_grad():
        accepted = recorded_acceptance(logits, batch.top_ids, batch.top_logprobs)
    return summarize((weights * values).sum(), values.detach(), accepted, batch)


@torch.no_grad()
def summarize(loss: Tensor, values: Tensor, accepted: Tensor, batch: Batch) -> Objective:
    """The objective of a batch, from the loss and acceptance of every position, ``[N]`` each."""
    emitted = (~batch.branch).to(values.dtype)
    sums = values.new_zeros(batch.num_records)
    counts = sums.index_add(0, batch.rows, emitted)
    sums = sums.index_add(0, batch.rows, emitted * values)
    return Objective(loss, sums / counts, (accepted * emitted).sum() / emitted.sum())


def position_losses(logits: Tensor, batch: Batch, settings: ObjectiveSettings) -> Tensor:
    """The unweighted loss of every position, ``[N]``."""
    if settings.loss == "hard_label":
        return hard_label(logits, batch.output_ids)
    target = (batch.top_ids, batch.top_logprobs, batch.tail_mass)
    if settings.loss == "jsd":
        return jsd(logits, *target, beta=settings.jsd_beta)
    return _DIVERGENCES[settings.loss](logits, *target)


def position_weights(batches: Sequence[Batch], settings: ObjectiveSettings) -> Tensor:
    """Weight of every position of an optimizer step, float32 ``[N]``; they sum to 1.

    Args:
        batches: of the step; how it is split changes nothing.
        settings: see ObjectiveSettings.
    """
    accepted = torch.cat([batch.accepted for batch in batches])
    branch = torch.cat([batch.branch for batch in batches])
    weight = _rejection_weights(accepted, branch, settings)
    emitted = _shares(weight * ~branch)
    proposed = _shares(weight * (branch | (accepted >= 0)))
    share = {"target": 0.0, "student": 1.0, "mixed": settings.student_share}[settings.sampling]
    total = _shares((1.0 - share) * emitted + share * proposed)
    # without any draft token nothing was rejected or proposed
    return torch.where(total.sum() > 0.0, total, _shares((~branch).float()))


def _rejection_weights(accepted: Tensor, branch: Tensor, settings: ObjectiveSettings) -> Tensor:
    rejected = (accepted == 0) & ~branch
    if settings.weighting == "rejected_only":
        return rejected.float()
    factor = settings.rejection_weight if settings.weighting == "first_rejection" else 1.0
    return torch.where(rejected, factor, 1.0)


def _shares(weights: Tensor) -> Tensor:
    """Weights normalised to a sum of 1; zeros stay zeros."""
    return weights / weights.sum().clamp(min=1e-12)
