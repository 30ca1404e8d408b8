"""The kernels that select tokens equal torch."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.actors.engine import sampling, top_tokens
from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import make_sampling_batch, processed_probs
from paceline.actors.engine.top_tokens import (
    accept_greedy,
    most_probable,
    most_probable_into,
    top_logits,
    top_logits_of,
)

DTYPES = (torch.float32, torch.bfloat16)


@st.composite
def logits(draw: st.DrawFn, rows: int, steps: int) -> Tensor:
    """``[rows, steps, V]`` with many equal entries, and a forbidden token now and then."""
    vocab = draw(st.integers(1, 200) | st.integers(2_000, 3_000))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, steps, vocab, generator=generator) * draw(
        st.sampled_from([0.0, 0.3, 3.0, 60.0])
    )
    values = (values * 4).round() / 4
    if vocab > 1 and draw(st.booleans()):
        values[..., draw(st.integers(0, vocab - 1))] = -torch.inf
    return values.to(draw(st.sampled_from(DTYPES)))


@settings(deadline=None)
@given(logits(2, 3))
def test_the_first_of_the_largest_is_the_most_probable(values: Tensor) -> None:
    ids = torch.empty(2, 3, dtype=torch.int64)
    probs = torch.empty(2, 3)
    most_probable_into(values, ids, probs)

    scores = values.double()
    first = (scores == scores.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(ids, first)
    assert torch.equal(most_probable(values), first)
    expected = scores.softmax(-1).gather(-1, first[..., None]).squeeze(-1)
    assert torch.allclose(probs.double(), expected, rtol=2e-6)


@settings(deadline=None)
@given(logits(3, 1), st.integers(1, 80))
def test_top_logits_are_ordered_and_sum_over_all(values: Tensor, size: int) -> None:
    top, ids, total = top_logits(values, size)

    assert ids.shape == (3, 1, min(size, values.shape[-1]))
    assert torch.equal(top, values.float().topk(ids.shape[-1], dim=-1).values)
    assert torch.equal(values.float().gather(-1, ids), top)
    assert all(len(set(row.tolist())) == len(row) for row in ids.flatten(0, 1))
    assert torch.allclose(total.double(), values.double().logsumexp(-1), rtol=1e-6, atol=1e-6)
    assert [part.shape[0] for part in top_logits(values[:0], size)] == [0, 0, 0]
    parts = top_logits_of([values[2], values[:2, 0]], size)
    for part, whole in zip(parts, (top, ids, total), strict=True):
        assert torch.equal(part, whole[[2, 0, 1], 0])


@settings(deadline=None)
@given(logits(3, 1), st.sampled_from([0.05, 0.2, 1.0, 1.7]), st.integers(1, 80))
def test_top_k_keeps_the_softmax_at_a_temperature_of_the_first_ones(
    values: Tensor, temperature: float, size: int
) -> None:
    temperatures = torch.tensor([temperature, 1.0, temperature])
    params = [SamplingParams(9, temperature=t, top_k=size) for t in temperatures.tolist()]
    probs = processed_probs(values, make_sampling_batch(params, "cpu")).dense(values.shape[-1])

    values = values[:, 0]
    scaled = values.double() / temperatures.double()[:, None]
    first = scaled.sort(dim=-1, descending=True, stable=True).indices[:, :size]
    kept = torch.zeros_like(scaled).scatter(-1, first, scaled.softmax(-1).gather(-1, first))
    expected = kept / kept.sum(-1, keepdim=True)
    assert torch.allclose(probs[:, 0].double(), expected, rtol=5e-6, atol=1e-37)
    assert (probs[:, 0][values == -torch.inf] == 0.0).all()


KEPT = [{"top_p": 0.9137, "temperature": 0.2}, {"top_k": 70, "top_p": 0.6871}, {"min_p": 0.0931}]


@settings(deadline=None)
@given(logits(3, 2), st.permutations(KEPT), st.sampled_from([(0, 0, 0), (1, 0, 1)]))
def test_filters_keep_the_same_without_kernels(
    values: Tensor, filters: list[dict[str, float]], drafted: tuple[int, ...]
) -> None:
    batch = make_sampling_batch([SamplingParams(9, **own) for own in filters], "cpu")  # type: ignore[arg-type]
    own = torch.arange(2) <= torch.tensor(drafted)[:, None]
    given = values, batch, torch.tensor(drafted)
    found = processed_probs(*given).dense(values.shape[-1])[own]
    with patch.object(sampling, "kernels_for", lambda *_: None):
        expected = processed_probs(*given).dense(values.shape[-1])[own]
    assert torch.equal(found > 0, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-5, atol=0.0)


@settings(deadline=None)
@given(logits(3, 1))
def test_wider_logits_of_the_same_values_give_the_same_bits(values: Tensor) -> None:
    free = {"temperature": 0.8}
    for filters in (KEPT, [free, *KEPT[1:]]):
        batch = make_sampling_batch([SamplingParams(9, **own) for own in filters], "cpu")  # type: ignore[arg-type]
        for narrow in (values, values.half()):
            kept = [
                processed_probs(own, batch).dense(values.shape[-1])
                for own in (narrow, narrow.float())
            ]
            assert torch.equal(*kept)
    values = values[:, 0]
    probs, ids = torch.empty(2, 3), torch.empty(3, dtype=torch.int64)
    for logits_of_a_dtype, found in zip((values, values.float()), probs, strict=True):
        most_probable_into(logits_of_a_dtype, ids, found)
    assert torch.equal(*probs)
    assert all(map(torch.equal, top_logits(values, 64), top_logits(values.float(), 64)))


@settings(deadline=None)
@given(logits(3, 4), st.data())
def test_greedy_verification_accepts_the_targets_tokens(
    values: Tensor, data: st.DataObject
) -> None:
    own = most_probable(values)
    drafts = own[:, :3].clone()
    wrong = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))
    for row, position in enumerate(wrong):
        if position < 3:
            drafts[row, position] = (drafts[row, position] + 1) % (values.shape[-1] + 1)
    counts = data.draw(st.lists(st.integers(0, 3), min_size=3, max_size=3))

    accepted, final = accept_greedy(values, drafts, torch.tensor(counts))

    expected = [min(count, position) for count, position in zip(counts, wrong, strict=True)]
    assert accepted.tolist() == expected
    assert final.tolist() == [own[row, taken].item() for row, taken in enumerate(expected)]
    with patch.object(top_tokens, "kernels_for", lambda *_: None):
        without = accept_greedy(values, drafts, torch.tensor(counts))
    assert torch.equal(without[0], accepted)
    assert torch.equal(without[1], final)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_without_kernels_gives_the_same(dtype: torch.dtype) -> None:
    values = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    ids, probs = torch.empty(5, dtype=torch.int64), torch.empty(5)
    most_probable_into(values, ids, probs)
    top = top_logits(values, 20)

    with patch.object(top_tokens, "kernels_for", lambda *_: None):
        others, other_probs = torch.empty_like(ids), torch.empty_like(probs)
        most_probable_into(values, others, other_probs)
        other_top = top_logits_of([values[:2], values[2:]], 20)

    assert torch.equal(others, ids)
    assert torch.allclose(other_probs, probs, rtol=1e-5)
    assert torch.equal(other_top[0], top[0])
    assert torch.allclose(other_top[2], top[2], rtol=1e-6)
