"""Losses over what replay keeps of the target: K token probabilities and one tail bucket.

Everything is per position, float32, in nats. The tail, all tokens that were not recorded, is
one bucket of its own and never renormalised away: a draft that puts mass outside the recorded
tokens pays for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST = math.log(1e-7)  # least log of a draft's tail mass: no position may weigh without bound


def recorded_logprobs(draft_logits: Tensor, top_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's log-probabilities on the recorded buckets.

    Args:
        draft_logits: float ``[N, V]``.
        top_ids: int64 ``[N, K]``, distinct within a row.

    Returns:
        float32 ``[N, K]`` log q of the recorded tokens, and float32 ``[N]`` log q of the tail,
        at least log(1e-7).
    """
    logits = draft_logits.float()
    whole = logits.logsumexp(dim=-1, keepdim=True)
    log_q = logits.gather(-1, top_ids) - whole
    if top_ids.shape[-1] == logits.shape[-1]:
        return log_q, log_q.new_full(log_q.shape[:-1], _LEAST)
    # Summed over the tail's own tokens: 1 - sum(q) has no digits left where q is sharp.
    tail = logits.scatter(-1, top_ids, -torch.inf).logsumexp(dim=-1)
    return log_q, (tail - whole.squeeze(-1)).clamp(min=_LEAST)


def forward_kl(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> Tensor:
    """KL(target || draft) on the recorded buckets: a lower bound of the full KL, equal at K = V.

    Args:
        draft_logits: float ``[N, V]``.
        top_ids: int64 ``[N, K]``.
        top_logprobs: float ``[N, K]``, log p of these tokens; -inf is a token of mass 0.
        tail_mass: float ``[N]``, p of all other tokens.

    Returns:
        float32 ``[N]``.
    """
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    log_p = top_logprobs.float()
    p = log_p.exp()
    top = (p * (log_p.nan_to_num(neginf=0.0) - log_q)).sum(-1)
    tail = tail_mass.float()
    # xlogy is 0 at a mass of 0, and so is the gradient
    return top + torch.xlogy(tail, tail) - tail * log_q_tail


def expected_acceptance(
    draft_logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, tail_mass: Tensor
) -> tuple[Tensor, Tensor]:
    """Bounds of sum over the vocabulary of min(p, q), the chance that a draft token is accepted.

    Args:
        draft_logits: float ``[N, V]``.
        top_ids: int64 ``[N, K]``.
        top_logprobs: float ``[N, K]``.
        tail_mass: float ``[N]``.

    Returns:
        float32 ``[N]`` lower bound, the recorded tokens alone, and float32 ``[N]`` upper
        bound, with min(p, q) of the two tail buckets added.
    """
    log_q, log_q_tail = recorded_logprobs(draft_logits, top_ids)
    lower = torch.minimum(top_logprobs.float().exp(), log_q.exp()).sum(-1)
    return lower, lower + torch.minimum(tail_mass.float(), log_q_tail.exp())
