"""Sampling distributions of a batch, with one code path for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.inference import inference
from paceline.actors.engine.logits_processors import LogitsProcessors, make_logits_processors
from paceline.actors.engine.native.kernels import kernels_for
from paceline.actors.engine.request import SamplingParams, TokenLogprob
from paceline.actors.engine.top_tokens import softmax_at


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Sampling parameters of B rows as tensors.

    Attributes:
        temperature: float32 ``[B]``, 1 for greedy rows.
        top_p: float32 ``[B]``.
        top_k: int64 ``[B]``; V or more is off. 1 for greedy rows.
        min_p: float32 ``[B]``.
        seeds: int64 ``[B]``, 0 without a seed.
        choices: int64 ``[B]``.
        greedy: bool ``[B]``.
        filtered_rows: int64, indices of the greedy rows and of those with top_p, top_k or min_p.
        unfiltered_rows: int64, indices of all others.
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
    filtered_rows: Tensor
    unfiltered_rows: Tensor
    seeded_rows: Tensor
    unseeded_rows: Tensor
    all_greedy: bool
    any_seeded: bool
    any_unseeded: bool
    all_unseeded: bool
    any_filter: bool
    all_filtered: bool
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
    filtered = [p.greedy or p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in params]
    top_k = [1 if p.greedy else min(p.top_k or _NO_LIMIT, _NO_LIMIT) for p in params]

    def sampled(own: SamplingParams, with_seed: bool) -> bool:
        return not own.greedy and (own.seed is not None) == with_seed

    def tensor(values: list[float] | list[int] | list[bool], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return SamplingBatch(
        temperature=tensor([1.0 if p.greedy else p.temperature for p in params], torch.float32),
        top_p=tensor([p.top_p for p in params], torch.float32),
        top_k=tensor(top_k, torch.int64),
        min_p=tensor([p.min_p for p in params], torch.float32),
        seeds=tensor([_signed(p.seed or 0) for p in params], torch.int64),
        choices=tensor([p.choice for p in params], torch.int64),
        greedy=tensor(greedy, torch.bool),
        filtered_rows=tensor([i for i, cut in enumerate(filtered) if cut], torch.int64),
        unfiltered_rows=tensor([i for i, cut in enumerate(filtered) if not cut], torch.int64),
        all_greedy=all(greedy),
        seeded_rows=tensor([i for i, p in enumerate(params) if sampled(p, True)], torch.int64),
        unseeded_rows=tensor([i for i, p in enumerate(params) if sampled(p, False)], torch.int64),
        any_seeded=any(sampled(p, True) for p in params),
        any_unseeded=any(sampled(p, False) for p in params),
        all_unseeded=all(sampled(p, False) for p in params),
        any_filter=any(filtered),
        all_filtered=all(filtered),
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


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """Distributions that rows sample from, over their K candidates.

    Attributes:
        probs: float32 ``[..., K]``, each sums to 1.
        ids: int64 ``[..., K]``, their token ids, ascending; equal ones at the end are padding, of
            probability 0. None if they are all tokens: K is V.
    """

    probs: Tensor
    ids: Tensor | None = None

    def __getitem__(self, index: Any) -> TargetProbs:
        """Index the dimensions before the last."""
        return TargetProbs(self.probs[index], None if self.ids is None else self.ids[index])

    def tokens(self, columns: Tensor) -> Tensor:
        """Token ids of candidates, int64 ``[...]``."""
        if self.ids is None:
            return columns
        return self.ids.gather(-1, columns[..., None]).squeeze(-1)

    def find(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the candidates that tokens ``[..., S]`` are, and if they are any, as bool."""
        if self.ids is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        columns = torch.searchsorted(self.ids.contiguous(), tokens.contiguous())
        columns = columns.clamp_(max=self.ids.shape[-1] - 1)
        return columns, self.ids.gather(-1, columns) == tokens

    def of(self, tokens: Tensor) -> Tensor:
        """Probabilities of tokens int64 ``[..., S]``."""
        if self.ids is None:
            return self.probs.gather(-1, tokens)
        columns, found = self.find(tokens)
        return self.probs.gather(-1, columns) * found

    def dense(self, vocab: int) -> Tensor:
        """Probabilities of all V tokens, float32 ``[..., V]``."""
        if self.ids is None:
            return self.probs
        whole = self.probs.new_zeros(*self.probs.shape[:-1], vocab)
        return whole.scatter_add_(-1, self.ids, self.probs)  # adds, for the padding


def processed_probs(
    logits: Tensor, batch: SamplingBatch, num_drafted: Tensor | None = None
) -> TargetProbs:
    """Return the distribution that each row samples from.

    Its bits do not depend on the other rows. If every row is filtered, what follows costs as the
    tokens that they keep, not as the vocabulary.

    Args:
        logits: float ``[B, T, V]``, after :func:`process_logits`.
        batch: parameters of the B rows.
        num_drafted: int64 ``[B]``; on CPUs what lies behind a row's own tokens is left out.

    Returns:
        ``[B, T, K]``; a greedy row gets its most probable token, and padding anything.
    """
    rows, steps, vocab = logits.shape
    if logits.dtype is torch.float16:  # has no kernels; a penalty of another row makes it float32
        logits = logits.float()
    flat = logits.flatten(0, 1)
    cut = own_positions(batch.filtered_rows, steps, num_drafted)
    if batch.all_filtered:
        found = _filter(flat if len(cut) == len(flat) else flat[cut], _params(batch, cut, steps))

        def padded(part: Tensor) -> Tensor:
            if len(part) < len(flat):
                part = part.new_zeros(len(flat), part.shape[-1]).index_copy_(0, cut, part)
            return part.view(rows, steps, -1)

        return TargetProbs(padded(found.probs), None if found.ids is None else padded(found.ids))
    free = own_positions(batch.unfiltered_rows, steps, num_drafted)
    # All tokens of padding, which nobody reads, are too many to fill.
    probs = softmax_at(flat, free, batch.temperature[free // steps])
    if batch.any_filter:
        kept = _filter(flat[cut], _params(batch, cut, steps))
        probs.index_copy_(0, cut, kept.dense(vocab))
    return TargetProbs(probs.view(rows, steps, -1))


def _params(batch: SamplingBatch, at: Tensor, steps: int) -> list[Tensor]:
    """What :func:`_filter` takes, of positions ``at`` of rows of ``steps`` each."""
    params = [batch.top_p, batch.top_k, batch.min_p, batch.temperature]
    if steps == 1 and len(at) == len(batch.greedy):
        return params
    rows = at // steps
    return [part[rows] for part in params]


def own_positions(rows: Tensor, steps: int, num_drafted: Tensor | None) -> Tensor:
    """Positions of rows among all rows' ``steps`` each, on CPUs without padding.

    Args:
        rows: int64, ascending, of B.
        steps: T.
        num_drafted: int64 ``[B]``; None: nothing is padding.

    Returns:
        int64 ``[N]`` of B * T, ascending.
    """
    if steps == 1:
        return rows
    if num_drafted is None or rows.device.type != "cpu":
        each = torch.arange(steps, device=rows.device)
        return (rows[:, None] * steps + each).flatten()
    counts = num_drafted.tolist()  # lists are faster than so small tensors
    at = [row * steps + i for row in rows.tolist() for i in range(counts[row] + 1)]
    return torch.tensor(at, dtype=torch.int64)


def _filter(logits: Tensor, params: Sequence[Tensor], sizes: Sequence[int] = _SIZES) -> TargetProbs:
    """Keep and renormalise what :func:`keep_mask` keeps of N distributions.

    That mostly lies in the first few entries, and sorting all takes as long as a forward: more
    entries are ordered for the rows alone that keep more.

    Args:
        logits: float ``[N, V]``.
        params: ``top_p``, ``top_k``, ``min_p`` and ``temperature``, ``[N]`` each.
        sizes: how many entries to order, and then how many instead; all at last.
    """
    vocab = logits.shape[-1]
    size = sizes[0] if sizes and sizes[0] < vocab else vocab
    kernels = kernels_for(logits.device, logits.dtype)
    if kernels is not None and size < vocab:
        probs, ids, wide = kernels.keep_top(logits, params, size)
        found = TargetProbs(probs, ids)
    else:
        *filters, temperature = params
        scores = logits.float()
        # Not topk, which may take another of several equal tokens in another batch.
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., :size]
        # In doubles as the kernels: floats round a quotient of 100 by 4e-6.
        whole = torch.softmax(scores.double() / temperature[:, None], dim=-1)
        ordered = whole.gather(-1, order).float()
        kept = ordered * keep_mask(ordered, *filters)
        kept /= kept.cumsum(-1)[..., -1:]
        if size == vocab:
            return TargetProbs(torch.zeros_like(kept).scatter_(-1, order, kept))
        # In the tokens' order a draw takes the same token from the candidates as from all tokens.
        ids, places = order.sort(dim=-1)
        found = TargetProbs(kept.gather(-1, places), ids)
        top_k = filters[1]
        wide = (top_k > size) & ((kept[..., -1] > 0) | (top_k < vocab))
    if not bool(wide.any()):
        return found
    more = _filter(logits[wide], [own[wide] for own in params], sizes[1:])
    if more.ids is None:
        probs = found.dense(vocab)
        probs[wide] = more.probs
        return TargetProbs(probs)
    padding = more.ids.shape[-1] - size
    probs = functional.pad(found.probs, (0, padding))
    ids = torch.cat([ids, ids[:, -1:].expand(-1, padding)], dim=-1)
    probs[wide], ids[wide] = more.probs, more.ids
    return TargetProbs(probs, ids)


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
    shape, device = weights.shape[:-1], weights.device
    return invert(
        weights, torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    )


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The entry in which ``uniform`` of the weights' sum is reached, see :func:`draw`.

    Args:
        weights: float32 ``[..., V]``.
        uniform: float64 ``[...]``, in [0, 1).

    Returns:
        int64 ``[...]``.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[..., -1:]
    # A product that rounds up to the total would lie beyond the last entry.
    at = torch.minimum(uniform[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN weights give an index past the end, which must not reach an embedding.
    return torch.searchsorted(sums, at, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


@inference
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


@inference
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
