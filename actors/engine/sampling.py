"""Sampling distributions of a batch, with one code path for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_

import torch
from torch import Tensor

from paceline.actors.engine.logits_processors import LogitsProcessors, make_logits_processors
from paceline.actors.engine.request import SamplingParams, TokenLogprob
from paceline.actors.engine.top_tokens import top_logits


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B rows as tensors.

    Attributes:
        temperature: float32 ``[B]``, 1 for greedy rows.
        top_p: float32 ``[B]``.
        top_k: int64 ``[B]``; V or more is off.
        min_p: float32 ``[B]``.
        seeds: int64 ``[B]``, 0 without a seed.
        choices: int64 ``[B]``.
        greedy: bool ``[B]``.
        seeded_rows: int64, indices of the sampled rows with a seed.
        unseeded_rows: int64, indices of those without.
        logits_processors: None if no row has any.
    """

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    choices: Tensor
    greedy: Tensor
    seeded_rows: Tensor
    unseeded_rows: Tensor
    all_greedy: bool
    any_seeded: bool
    any_unseeded: bool
    all_unseeded: bool
    any_filter: bool
    any_logprobs: bool
    logits_processors: LogitsProcessors | None


_NO_LIMIT = 1 << 40
_SIZES = 64, 1024  # tokens that are mostly all that a filter keeps


def _signed(seed: int) -> int:
    """Fold a Python integer into a signed 64-bit word."""
    folded = seed & ((1 << 64) - 1)
    return folded - (1 << 64) if folded >= 1 << 63 else folded


class SamplingBatchCache:
    """Keeps the latest SamplingBatch, since a batch mostly stays the same between rounds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._params: list[SamplingParams] = []
        self._batch = make_sampling_batch([], device)

    def get(self, params: list[SamplingParams]) -> SamplingBatch:
        """Return the batch of B requests, remade only if one of the objects is another."""
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if not same:
            self._params, self._batch = params, make_sampling_batch(params, self._device)
        return self._batch


def make_sampling_batch(
    params: Sequence[SamplingParams], device: torch.device | str
) -> SamplingBatch:
    """Stack the parameters of B requests; the tensors must not be modified."""
    greedy = [p.greedy for p in params]

    def sampled(own: SamplingParams, with_seed: bool) -> bool:
        return not own.greedy and (own.seed is not None) == with_seed

    def tensor(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingBatch(
        temperature=tensor([1.0 if p.greedy else p.temperature for p in params], torch.float32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        top_k=tensor([min(p.top_k or _NO_LIMIT, _NO_LIMIT) for p in params], torch.int64),
        min_p=tensor([p.min_p for p in params], torch.float32),
        seeds=tensor([_signed(p.seed or 0) for p in params], torch.int64),
        choices=tensor([p.choice for p in params], torch.int64),
        greedy=tensor(greedy, torch.bool),
        all_greedy=all(greedy),
        seeded_rows=tensor([i for i, p in enumerate(params) if sampled(p, True)], torch.int64),
        unseeded_rows=tensor([i for i, p in enumerate(params) if sampled(p, False)], torch.int64),
        any_seeded=any(sampled(p, True) for p in params),
        any_unseeded=any(sampled(p, False) for p in params),
        all_unseeded=all(sampled(p, False) for p in params),
        any_filter=any(
            not p.greedy and (p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0) for p in params
        ),
        any_logprobs=any(p.logprobs is not None for p in params),
        logits_processors=make_logits_processors(params, torch.device(device)),
    )


def keep_mask(sorted_probs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Return the mask of top_k, then top_p, then min_p over descending probabilities.

    At least one entry is kept. The order and the renormalisation in between are transformers';
    min_p is relative to the first probability, so it needs none.

    Args:
        sorted_probs: float32 ``[..., V]``, descending along the last axis: a distribution, or its
            first entries if none behind them is kept.
        top_p: float32 ``[...]``.
        top_k: int64 ``[...]``.
        min_p: float32 ``[...]``.

    Returns:
        bool ``[..., V]``.
    """
    ranks = torch.arange(sorted_probs.shape[-1], device=sorted_probs.device)
    within_k = ranks < top_k.unsqueeze(-1)
    kept = sorted_probs * within_k
    # Not sum(): its order of additions depends on the number of rows and threads.
    sums = kept.cumsum(-1)
    total = torch.where(top_k.unsqueeze(-1) > len(ranks), 1.0, sums[..., -1:])
    before = (sums - kept) / total
    # top_p = 1 keeps everything, however the cumulative sum rounds.
    within_p = (before < top_p.unsqueeze(-1)) | (top_p.unsqueeze(-1) >= 1.0)
    within_p[..., 0] = True
    likely = sorted_probs >= min_p.unsqueeze(-1) * sorted_probs[..., :1]
    return within_k & within_p & likely


def processed_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Return the distribution that each row samples from.

    Args:
        logits: float ``[B, T, V]``, after :func:`process_logits`.
        batch: parameters of the B rows.

    Returns:
        float32 ``[B, T, V]``, each row sums to 1. A greedy row gets its T = 1 distribution.
    """
    probs = torch.softmax(logits.float() / batch.temperature[:, None, None], dim=-1)
    if not batch.any_filter:
        return probs
    # A row without a filter keeps its bits in every batch.
    free = (batch.top_p >= 1.0) & (batch.top_k >= probs.shape[-1]) & (batch.min_p <= 0.0)
    cut = ~(free | batch.greedy)[:, None].expand(logits.shape[:2])
    rows, _ = cut.nonzero(as_tuple=True)
    filters = [own[rows] for own in (batch.top_p, batch.top_k, batch.min_p)]
    probs[cut] = _filter(probs[cut], filters)
    return probs


def _filter(probs: Tensor, filters: Sequence[Tensor], sizes: Sequence[int] = _SIZES) -> Tensor:
    """Keep and renormalise what :func:`keep_mask` keeps of distributions ``[N, V]``.

    That mostly lies in the first few entries, and sorting all takes as long as a forward: more
    entries are ordered for the rows alone that keep more.

    Args:
        probs: float32 ``[N, V]``.
        filters: ``top_p``, ``top_k`` and ``min_p``, ``[N]`` each.
        sizes: how many entries to order, and then how many instead; all at last.
    """
    vocab, top_k = probs.shape[-1], filters[1]
    if sizes and sizes[0] < vocab:
        ordered, order, _ = top_logits(probs, sizes[0])
        known = top_k <= sizes[0]
    else:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        known = torch.ones_like(top_k, dtype=torch.bool)
    kept = ordered * keep_mask(ordered, *filters)
    filtered = torch.zeros_like(probs).scatter_(-1, order, kept / kept.cumsum(-1)[..., -1:])
    wide = ~known & ((kept[..., -1] > 0) | (top_k < vocab))
    if bool(wide.any()):
        filtered[wide] = _filter(probs[wide], [own[wide] for own in filters], sizes[1:])
    return filtered


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index with probability proportional to its weight.

    Inverts the cumulative sum in double precision: one random number per row, no normalisation,
    and an entry of weight 0 is never drawn.

    Args:
        weights: float32 ``[..., V]``, not negative, at least one positive.
        generator: source of randomness.

    Returns:
        int64 ``[...]``.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[..., -1:]
    at = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=weights.device)
    # A product that rounds up to the total would lie beyond the last entry.
    at = torch.minimum(at * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN weights give an index past the end, which must not reach an embedding.
    return torch.searchsorted(sums, at, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, emitted: Sequence[Sequence[int]], wanted: Sequence[int | None]
) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of a round's tokens, unprocessed.

    Args:
        logits: float ``[B, k + 1, V]``, the target's, unprocessed.
        emitted: per row the round's tokens, at most k + 1.
        wanted: per row the number of alternatives, None if not requested.

    Returns:
        per row an entry per emitted token, empty if not requested.
    """
    at = [
        (row, step, token)
        for row, tokens in enumerate(emitted)
        if wanted[row] is not None
        for step, token in enumerate(tokens)
    ]
    found: list[list[TokenLogprob]] = [[] for _ in emitted]
    if not at:
        return found
    rows, steps, tokens = torch.tensor(at, device=logits.device).T
    logprobs = torch.log_softmax(logits[rows, steps].float(), dim=-1)
    size = max(n for n in wanted if n is not None)
    for (row, _, _), entry in zip(at, _entries(logprobs, tokens, size), strict=True):
        found[row].append(replace(entry, top=entry.top[: wanted[row]]))
    return found


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], size: int) -> list[TokenLogprob]:
    """Return the log-probabilities of prompt tokens, unprocessed, with their ranks.

    Args:
        logits: float ``[T, V]``, the target's before each token.
        token_ids: T tokens.
        size: number of alternatives.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    tokens = torch.tensor(token_ids, device=logits.device)
    own = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs >= own).sum(dim=-1).tolist()
    entries = _entries(logprobs, tokens, size)
    return [replace(entry, rank=rank) for entry, rank in zip(entries, ranks, strict=True)]


def _entries(logprobs: Tensor, tokens: Tensor, size: int) -> list[TokenLogprob]:
    """Return the entries of N tokens with the ``size`` most probable ones, from ``[N, V]``."""
    own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(min(size, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(logprob, tuple(zip(*top, strict=True)))
        for logprob, *top in zip(own, ids.tolist(), values.tolist(), strict=True)
    ]
