"""Losses over what replay keeps of the target: K token probabilities and one tail bucket.

Everything is per position, in nats, computed in float32 (float64 where the logits are). The tail,
all tokens that were not recorded, is one bucket of its own and never renormalised away: a draft
that puts mass outside the recorded tokens pays for it. By the data processing inequality each
divergence of the buckets is a lower bound of the one over the whole vocabulary, and equal to it
at K = V.

All but `hard_label` take the same four arguments: ``draft_logits`` float ``[N, V]``; ``top_ids``
int64 ``[N, K]``, distinct within a row; ``top_logprobs`` float ``[N, K]``, the target's log p of
these, -inf where it has none; ``tail_mass`` float ``[N]``, p of all other tokens. They return
``[N]``, and gradients flow to the logits alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST = math.log(1e-7)  # least log of a tail's mass: no position may weigh without bound
_NEVER = -100.0  # stands for log 0, so that nothing that is computed from it is infinite
_HYBRID_SHARPNESS = 3.0


def recorded_logprobs(draft_logits: Tensor, top_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's log-probabilities on the recorded buckets.

    Args:
        draft_logits: float ``[N, V]``.
        top_ids: int64 ``[N, K]``, distinct within a row.

    Returns:
        ``[N, K]`` log q of the recorded tokens, and ``[N]`` log q of the tail, at least
        log(1e-7); float32, or float64 where the logits are.
    """
    logits = _wide(draft_logits)
    top = logits.gather(-1, top_ids)
    whole = top.logsumexp(dim=-1)
    if top_ids.shape[-1] == logits.shape[-1]:
        log_q = top - whole[..., None]
        return log_q, log_q.new_full(log_q.shape[:-1], _LEAST)
    # Summed over the tail's own tokens: 1 - sum(q) has no digits left where q is sharp. What is
    # left of the whole sum are K terms: the vocabulary is gone through once.
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
    # xlogy is 0 at a mass of 0, and so is the gradient
    return top + torch.xlogy(tail, tail) - tail * log_q_tail


def reverse_kl(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """KL(draft || target) on the recorded buckets.

    A bucket that the target gives nothing counts as one of exp(-100), a tail as one of 1e-7:
    the draft pays for what it puts there, but not without bound.
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
    entropy of (beta, 1 - beta). It is no weighted sum of the two KLs between p and q. Divided
    by beta it tends to the forward KL as beta goes to 0, and likewise to the reverse one at 1.

    Raises:
        ValueError: for a beta that is not between 0 and 1.
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
    """1 - sum of min(p, q) on the recorded buckets: the chance that a draft token is rejected.

    Leviathan et al. 2211.17192, section 3.2.
    """
    _, upper = expected_acceptance(draft_logits, top_ids, top_logprobs, tail_mass)
    return 1.0 - upper


def lk_hybrid(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """Forward KL far from the target, rejection near it: w KL + (1 - w) (1 - alpha).

    alpha is the expected acceptance on the buckets, and w = exp(-3 alpha) has no gradient. Where
    draft and target hardly overlap the gradient of 1 - alpha vanishes, that of the KL does not.
    """
    rejection = total_variation(draft_logits, top_ids, top_logprobs, tail_mass)
    weight = (_HYBRID_SHARPNESS * (rejection.detach() - 1.0)).exp()
    divergence = forward_kl(draft_logits, top_ids, top_logprobs, tail_mass)
    return weight * divergence + (1.0 - weight) * rejection


def hard_label(draft_logits: Tensor, token_ids: Tensor) -> Tensor:
    """Cross-entropy of the tokens themselves: fine-tuning, the baseline of distillation.

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
    """Bounds of sum over the vocabulary of min(p, q), the chance that a draft token is accepted.

    Returns:
        ``[N]`` lower bound, the recorded tokens alone, and ``[N]`` upper bound, with min(p, q)
        of the two tail buckets added.
    """
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    lower = torch.minimum(top_logprobs.to(log_q.dtype).exp(), log_q.exp()).sum(-1)
    return lower, lower + torch.minimum(tail_mass.to(log_q.dtype), log_q_tail.exp())


def recorded_acceptance(draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor) -> Tensor:
    """The lower bound of :func:`expected_acceptance` alone, ``[N]``, at half the work."""
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
