"""Sampling distributions against transformers' own warpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import (
    SamplingBatch,
    draw,
    make_sampling_batch,
    processed_probs,
)
from paceline.actors.engine.top_tokens import softmax_at


def distributions(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 ``[B, T, V]``."""
    return processed_probs(logits, batch).dense(logits.shape[-1])


CASES = [
    (1.0, 1.0, 0, 0.0),
    (0.7, 1.0, 0, 0.0),
    (1.3, 0.9, 0, 0.0),
    (1.0, 1.0, 5, 0.0),
    (0.8, 0.5, 7, 0.0),
    (1.0, 0.01, 0, 0.0),
    (1.0, 1.0, 0, 0.1),
    (1.5, 0.95, 20, 0.2),
    (0.8, 1.0, 3, 0.01),
    (1.0, 1.0, 0, 1.0),
]


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "min_p"), CASES)
def test_equals_transformers(temperature: float, top_p: float, top_k: int, min_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, 50, generator=generator) * 3
    params = SamplingParams(1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = torch.softmax(warpers(None, logits.reshape(-1, 50).clone()), -1).reshape(4, 3, 50)
    torch.testing.assert_close(
        distributions(logits, make_sampling_batch([params] * 4, "cpu")), expected
    )


@pytest.mark.parametrize(
    "filters",
    [
        {"top_p": 0.9},
        {"top_k": 300},
        {"top_k": 64, "top_p": 0.99},
        {"top_k": 1500, "top_p": 0.8333},
        {"top_k": 5},
        {"min_p": 0.05},
    ],
)
def test_wide_and_narrow_distributions_are_filtered_alike(filters: dict[str, Any]) -> None:
    """Of 2,000 tokens; some rows keep a handful of them, others nearly all."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.tensor([0.0, 0.3, 1.0, 3.0, 30.0])[:, None, None]
    logits = (torch.randn(5, 2, 2000, generator=generator) * spread * 16).round() / 16  # with ties
    params = SamplingParams(1, **filters)
    probs = distributions(logits, make_sampling_batch([params] * 5, "cpu"))
    whole = torch.softmax(logits, -1)
    ordered, order = whole.double().sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(2000)
    kept = ordered * (ranks < (params.top_k or 2000))
    total = kept.sum(-1, keepdim=True)
    kept *= (kept.cumsum(-1) - kept < params.top_p * total) | (params.top_p == 1.0)
    kept *= ordered >= params.min_p * ordered[..., :1]
    expected = torch.zeros_like(kept).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))
    torch.testing.assert_close(probs, expected.float(), rtol=1e-4, atol=1e-7)
    for i, row in enumerate(logits):
        alone = distributions(row[None], make_sampling_batch([params], "cpu"))[0]
        assert torch.equal(alone, probs[i])


def test_rows_keep_their_own_parameters() -> None:
    logits = torch.randn(3, 1, 20, generator=torch.Generator().manual_seed(1))
    params = [
        SamplingParams(max_tokens=1, temperature=0.5),
        SamplingParams(max_tokens=1, temperature=0.0),
        SamplingParams(max_tokens=1, top_k=1),
    ]
    probs = distributions(logits, make_sampling_batch(params, "cpu"))
    torch.testing.assert_close(probs[0, 0], torch.softmax(logits[0, 0] / 0.5, -1))
    assert probs[1, 0, logits[1, 0].argmax()] == 1.0  # greedy
    assert probs[2, 0].max() == 1.0


def test_only_what_filtered_rows_keep_follows() -> None:
    """Rows keep 29, 900 and 1 of 3,000 tokens; fewer than are ordered are not forbidden."""
    logits = torch.full((3, 2, 3000), -torch.inf)
    logits[..., 7:2900:100] = torch.randn(3, 2, 29, generator=torch.Generator().manual_seed(2))
    logits[1, 1] = 0.0
    params = [
        SamplingParams(9, top_p=0.999999),
        SamplingParams(9, top_k=900),
        SamplingParams(9, temperature=0.0),
    ]
    probs = processed_probs(logits, make_sampling_batch(params, "cpu"))
    whole = probs.dense(3000)
    assert probs.probs.shape == (3, 2, 1024)
    every = torch.arange(3000).expand(3, 2, 3000)
    assert torch.equal(probs.of(every), whole)
    torch.testing.assert_close(whole[0], torch.softmax(logits[0], -1))
    assert torch.equal(whole[0] > 0, logits[0] > -torch.inf)
    assert torch.equal(whole[1, 1] > 0, torch.arange(3000) < 900)  # the first of equal ones
    narrow = processed_probs(logits[::2], make_sampling_batch(params[::2], "cpu"))
    assert narrow.probs.shape == (2, 2, 64)
    assert torch.equal(narrow.dense(3000), whole[::2])


@pytest.mark.parametrize("unfiltered", [(), (1,), (0, 1, 2)])
def test_padding_behind_drafts_is_left_out(unfiltered: tuple[int, ...]) -> None:
    logits = torch.randn(3, 4, 500, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(9, top_p=0.5),
        SamplingParams(9, top_k=7),
        SamplingParams(9, min_p=0.1),
    ]
    for row in unfiltered:
        params[row] = SamplingParams(9, temperature=1.0)
    batch, drafted = make_sampling_batch(params, "cpu"), torch.tensor([0, 3, 1])
    own = torch.arange(4) <= drafted[:, None]
    whole = processed_probs(logits, batch).dense(500)
    padded = logits.masked_fill(~own[..., None], torch.nan)  # it would be an error, or wide
    found = processed_probs(padded, batch, drafted).dense(500)
    assert torch.equal(found[own], whole[own])


def test_draw_never_draws_a_zero() -> None:
    weights = torch.tensor([0.0, 1e-30, 0.0]).expand(1000, 3)
    drawn = draw(weights, torch.Generator().manual_seed(0))
    assert (drawn == 1).all()


@pytest.mark.parametrize("size", [5, 512, 49_153])
@pytest.mark.parametrize("temperature", [0.05, 0.8, 2.0])
def test_softmax_at_a_temperature(size: int, temperature: float) -> None:
    """Forbidden tokens get nothing, and rows are the same bits in either dtype."""
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(6)) * 6
    logits[:, 2] = -torch.inf
    logits = logits.bfloat16()
    rows, given = torch.tensor([0, 3]), torch.full((2,), temperature)
    found = softmax_at(logits, rows, given)[rows]
    expected = torch.softmax(logits[rows].double() / temperature, dim=-1).float()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-20)
    assert (found[:, 2] == 0.0).all()
    assert torch.equal(softmax_at(logits.float(), rows, given)[rows], found)


def test_a_rows_distribution_does_not_depend_on_its_neighbours_filters() -> None:
    """Not by one bit: a seeded text must be the same in every batch."""
    logits = torch.randn(3, 2, 300, generator=torch.Generator().manual_seed(4)) * 3
    free, cut = SamplingParams(1), SamplingParams(1, top_p=0.5, top_k=7, min_p=0.1)
    alone = distributions(logits[:1], make_sampling_batch([free], "cpu"))
    crowd = distributions(logits, make_sampling_batch([free, cut, cut], "cpu"))
    assert torch.equal(crowd[:1], alone)
    cut_alone = distributions(logits[1:2], make_sampling_batch([cut], "cpu"))
    assert torch.equal(crowd[1:2], cut_alone)


def test_what_filters_keep_is_the_same_bits_in_every_batch() -> None:
    torch.set_num_threads(2)  # with which a sum over one row adds in another order
    logits = torch.randn(4, 1, 50_304, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(max_tokens=1, temperature=0.9, top_p=0.9, seed=1)
    crowd = distributions(logits, make_sampling_batch([params] * 4, "cpu"))
    alone = [distributions(row[None], make_sampling_batch([params], "cpu"))[0] for row in logits]
    assert torch.equal(torch.stack(alone), crowd)
