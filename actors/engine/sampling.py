"""From logits to the distribution that a request samples: one code path for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor

from paceline.actors.engine.logits_processors import LogitRules, make_rules
from paceline.actors.engine.request import SamplingParams, TokenLogprob


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of B rows as tensors.

    ``temperature``, ``top_p`` and ``min_p`` are float32 ``[B]``, ``top_k`` int64 ``[B]`` (V or
    more is off), ``seeds`` (0 where there is none) and ``choices`` int64 ``[B]``, ``greedy`` and
    ``seeded`` bool ``[B]``. ``rules`` is None where no row has any.
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
    rules: LogitRules | None


_NO_LIMIT = 1 << 40


def _signed(seed: int) -> int:
    """A Python integer folded into a signed 64-bit word."""
    folded = seed & ((1 << 64) - 1)
    return folded - (1 << 64) if folded >= 1 << 63 else folded


class LatestBatch:
    """The parameters of a batch that mostly stays the same from round to round."""

    def __init__(self, device: torch.device) -> None:
        """Begin with none; ``device`` is where the tensors go."""
        self._device = device
        self._params: list[SamplingParams] = []
        self._batch = batch_params([], device)

    def of(self, params: list[SamplingParams]) -> SamplingBatch:
        """The parameters of B requests, stacked anew only where one is another object."""
        same = len(params) == len(self._params) and all(map(is_, params, self._params))
        if not same:
            self._params, self._batch = params, batch_params(params, self._device)
        return self._batch


def batch_params(params: Sequence[SamplingParams], device: torch.device | str) -> SamplingBatch:
    """Stack the parameters of B requests; the tensors are shared and never changed."""
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
        rules=make_rules(params, torch.device(device)),
    )


def keep_mask(sorted_probs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """Which of the descending probabilities top_k, then top_p, then min_p keep; never none.

    The order and the renormalisation in between are transformers' own. min_p compares with the
    first probability, so that no renormalisation matters to it.

    Args:
        sorted_probs: float32 ``[..., V]``, descending along the last axis.
        top_p: float32 ``[...]``.
        top_k: int64 ``[...]``.
        min_p: float32 ``[...]``.

    Returns:
        bool ``[..., V]``.
    """
    ranks = torch.arange(sorted_probs.shape[-1], device=sorted_probs.device)
    within_k = ranks < top_k.unsqueeze(-1)
    kept = sorted_probs * within_k
    # The last of a running sum: how sum() adds depends on the number of rows and threads.
    sums = kept.cumsum(-1)
    before = (sums - kept) / sums[..., -1:]
    # top_p = 1 must keep everything, whatever the cumulative sum rounds to.
    within_p = (before < top_p.unsqueeze(-1)) | (top_p.unsqueeze(-1) >= 1.0)
    within_p[..., 0] = True
    likely = sorted_probs >= min_p.unsqueeze(-1) * sorted_probs[..., :1]
    return within_k & within_p & likely


def processed_probs(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """The distribution that each row samples from.

    Args:
        logits: float ``[B, T, V]``, after the rows' rules (:func:`rules.ruled_logits`).
        batch: parameters of the B rows.

    Returns:
        float32 ``[B, T, V]``, each row sums to 1. A greedy row gets its T = 1 distribution.
    """
    probs = torch.softmax(logits.float() / batch.temperature[:, None, None], dim=-1)
    if not batch.any_filter:
        return probs
    steps = logits.shape[1]
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    keep = keep_mask(
        ordered,
        batch.top_p[:, None].expand(-1, steps),
        batch.top_k[:, None].expand(-1, steps),
        batch.min_p[:, None].expand(-1, steps),
    )
    filtered = torch.zeros_like(probs).scatter_(-1, order, ordered * keep)
    filtered = filtered / filtered.cumsum(-1)[..., -1:]
    # A row without a filter keeps its very bits, whoever else is in the batch.
    free = (batch.top_p >= 1.0) & (batch.top_k >= probs.shape[-1]) & (batch.min_p <= 0.0)
    whole = free | batch.greedy
    return torch.where(whole[:, None, None], probs, filtered)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw an index with probability proportional to its weight.

    By inversion of the running sum in double precision: one random number per row, no
    normalisation, and an entry of weight 0 is never drawn.

    Args:
        weights: float32 ``[..., V]``, not negative, one of them positive.
        generator: source of randomness.

    Returns:
        int64 ``[...]``.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    total = sums[..., -1:]
    at = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=weights.device)
    # A product that rounds up to the total would lie beyond the last entry.
    at = torch.minimum(at * total, torch.nextafter(total, torch.zeros_like(total)))
    # Weights that are no numbers have no index; theirs must not end in an embedding.
    return torch.searchsorted(sums, at, right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


@torch.inference_mode()
def token_logprobs(
    logits: Tensor, emitted: Sequence[Sequence[int]], wanted: Sequence[int | None]
) -> list[list[TokenLogprob]]:
    """What the target said of a round's tokens: its own softmax, before any rule or filter.

    Args:
        logits: float ``[B, k + 1, V]``, the target's as they came.
        emitted: per row the tokens that the round added, at most k + 1.
        wanted: per row the number of alternatives, None where nothing is asked.

    Returns:
        per row an entry per emitted token, empty where nothing is asked.
    """
    at = [
        (row, step, token)
        for row, tokens in enumerate(emitted)
        if wanted[row] is not None
        for step, token in enumerate(tokens)
    ]
    answers: list[list[TokenLogprob]] = [[] for _ in emitted]
    if not at:
        return answers
    rows, steps, tokens = torch.tensor(at, device=logits.device).T
    laws = torch.log_softmax(logits[rows, steps].float(), dim=-1)
    own = laws.gather(-1, tokens[:, None])[:, 0].tolist()
    size = min(max(n for n in wanted if n is not None), laws.shape[-1])
    values, ids = laws.topk(size, dim=-1)
    for (row, _, _), logprob, top in zip(
        at, own, zip(ids.tolist(), values.tolist(), strict=True), strict=True
    ):
        best = tuple(zip(*top, strict=True))[: wanted[row]]
        answers[row].append(TokenLogprob(logprob, best))
    return answers
