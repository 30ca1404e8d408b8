"""Distributions and their most probable tokens, computed from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.actors.engine.native.kernels import kernels_for


def most_probable(logits: Tensor) -> Tensor:
    """Return the index of the largest entry along the last axis, the first of equal ones.

    Args:
        logits: float ``[..., V]``.

    Returns:
        int64 ``[...]``.
    """
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is None:
        return logits.argmax(dim=-1)
    ids = torch.empty(logits.shape[:-1], dtype=torch.int64)
    kernels.top_one(logits, ids)
    return ids


def have_distributions(logits: Tensor) -> bool:
    """Whether float logits ``[..., V]`` each give a distribution: no NaN, no +inf, not only -inf.

    Without kernels it is also false if some of them are -inf.
    """
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is not None:
        return kernels.have_distributions(logits)
    return math.isfinite(logits.sum().item())


def most_probable_into(logits: Tensor, ids: Tensor, probs: Tensor) -> None:
    """Write :func:`most_probable` to ``ids``, and the entry's softmax at T = 1 to ``probs``.

    Args:
        logits: float ``[..., V]``.
        ids: int64 ``[...]``, contiguous.
        probs: float32 ``[...]``, contiguous.
    """
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is not None:
        kernels.top_one(logits, ids, probs)
        return
    scores = logits.float()
    top, at = scores.max(dim=-1)
    ids.copy_(at)
    probs.copy_((top - scores.logsumexp(dim=-1)).exp())


def top_logits(logits: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the K largest logits, descending.

    Args:
        logits: float ``[..., V]``.
        size: K, reduced to V if larger.

    Returns:
        float32 values and int64 ids ``[..., K]``; float32 logsumexp ``[...]``.
    """
    shape = logits.shape[:-1]
    top, ids, total = top_logits_of([logits.flatten(0, -2)], size)
    wide = *shape, ids.shape[-1]
    return top.view(wide), ids.view(wide), total.view(shape)


def top_logits_of(parts: Sequence[Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the K largest logits, descending, of tensors ``[m, V]`` that are M rows together.

    Args:
        parts: float, at least one, all of a dtype; kernels read them where they are.
        size: K, reduced to V if larger.

    Returns:
        float32 values and int64 ids ``[M, K]``; float32 logsumexp ``[M]``.
    """
    size = min(size, parts[0].shape[-1])
    kernels = kernels_for(parts[0].device, parts[0].dtype)
    if kernels is not None:
        return kernels.top_k(parts, size)
    scores = torch.cat(list(parts)).float()
    values, ids = scores.topk(size, dim=-1)
    return values, ids, scores.logsumexp(dim=-1)


def softmax_at(logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    """Return ``softmax(logits / temperature)`` of some rows; the others' entries are arbitrary.

    Args:
        logits: float ``[M, V]``.
        rows: int64 ``[N]`` of the M.
        temperature: float32 ``[N]``.

    Returns:
        float32 ``[M, V]``.
    """
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is not None:
        return kernels.softmax_at(logits, rows, temperature)
    own = logits if len(rows) == len(logits) else logits[rows]
    probs = torch.softmax(own.float() / temperature[:, None], dim=-1)
    if len(probs) == len(logits):
        return probs
    return probs.new_empty(logits.shape).index_copy_(0, rows, probs)


def accept_greedy(logits: Tensor, drafts: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Verify B rows greedily: a draft token is accepted if it is the most probable one.

    Args:
        logits: float ``[B, k + 1, V]``; ``logits[:, i]`` follows the i-th draft token.
        drafts: int64 ``[B, k]``.
        num_drafted: int64 ``[B]``; positions at and after it are padding.

    Returns:
        number of accepted tokens, and the most probable token after them, int64 ``[B]`` each.
    """
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is not None:
        return kernels.accept(logits, drafts, num_drafted)
    tokens, k = most_probable(logits), drafts.shape[1]
    inside = torch.arange(k, device=drafts.device) < num_drafted[:, None]
    accepted = leading_true((tokens[:, :k] == drafts) & inside)
    return accepted, tokens.gather(-1, accepted[:, None]).squeeze(-1)


def leading_true(flags: Tensor) -> Tensor:
    """Count the leading True along the last axis, bool ``[B, k]`` to int64 ``[B]``."""
    return flags.to(torch.int64).cumprod(dim=-1).sum(dim=-1)
