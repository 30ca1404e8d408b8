"""Forward KL and expected acceptance on recorded buckets, against the full distributions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.training.losses import (
    expected_acceptance,
    forward_kl,
    recorded_acceptance,
)

seeds = st.integers(0, 2**31)
sharpness = st.floats(0.1, 12.0)


def draw(
    seed: int, sharp: float, rows: int = 5, vocab: int = 11
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draft = sharp * torch.randn(rows, vocab, generator=generator)
    target = sharp * torch.randn(rows, vocab, generator=generator)
    return draft, target.log_softmax(-1)


def record(log_p: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, ids = log_p.topk(top, dim=-1)
    tail = (1.0 - values.exp().sum(-1)).clamp(min=0.0)
    return ids, values, tail


def full_kl(draft: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.kl_div(
        draft.log_softmax(-1), log_p, log_target=True, reduction="none"
    ).sum(-1)


@settings(max_examples=50, deadline=None)
@given(seeds, sharpness)
def test_forward_kl_is_the_full_one_where_everything_is_recorded(seed: int, sharp: float) -> None:
    draft, log_p = draw(seed, sharp)
    ids, values, _ = record(log_p, log_p.shape[1])
    loss = forward_kl(draft, ids, values, torch.zeros(len(draft)))
    torch.testing.assert_close(loss, full_kl(draft, log_p), atol=1e-4, rtol=1e-4)


@settings(max_examples=50, deadline=None)
@given(seeds, sharpness, st.integers(1, 10))
def test_forward_kl_is_that_of_the_buckets_and_below_the_full_one(
    seed: int, sharp: float, top: int
) -> None:
    draft, log_p = draw(seed, sharp)
    ids, values, tail = record(log_p, top)
    loss = forward_kl(draft, ids, values, tail)
    q = draft.double().softmax(-1)
    p_buckets = torch.cat([values.double().exp(), tail.double()[:, None]], 1)
    q_top = q.gather(1, ids)
    q_tail = q.scatter(1, ids, 0.0).sum(1, keepdim=True).clamp(min=1e-7)
    q_buckets = torch.cat([q_top, q_tail], 1)
    exact = (torch.xlogy(p_buckets, p_buckets) - p_buckets * q_buckets.log()).sum(1)
    torch.testing.assert_close(loss.double(), exact, atol=2e-3, rtol=2e-3)
    assert (loss <= full_kl(draft, log_p) + 2e-3).all()
    assert (loss >= -1e-4).all()


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0.1, 4.0))
def test_gradient_is_q_minus_p_where_everything_is_recorded(seed: int, sharp: float) -> None:
    draft, log_p = draw(seed, sharp)
    draft.requires_grad_(True)
    ids, values, _ = record(log_p, log_p.shape[1])
    forward_kl(draft, ids, values, torch.zeros(len(draft))).sum().backward()
    assert draft.grad is not None
    expected = draft.detach().softmax(-1) - log_p.exp()
    torch.testing.assert_close(draft.grad, expected, atol=1e-4, rtol=1e-3)


@settings(max_examples=30, deadline=None)
@given(seeds, st.floats(0.1, 4.0), st.integers(1, 8))
def test_mass_outside_the_recorded_tokens_is_pushed_towards_the_tail_mass(
    seed: int, sharp: float, top: int
) -> None:
    draft, log_p = draw(seed, sharp)
    ids, values, tail = record(log_p, top)
    draft.requires_grad_(True)
    forward_kl(draft, ids, values, tail).sum().backward()
    assert draft.grad is not None
    inside = torch.zeros_like(draft).scatter(1, ids, 1.0).bool()
    outside = draft.grad.masked_fill(inside, 0.0).sum(1)
    q_tail = draft.detach().softmax(-1).masked_fill(inside, 0.0).sum(1)
    torch.testing.assert_close(outside, q_tail - tail, atol=2e-3, rtol=2e-2)


@settings(max_examples=50, deadline=None)
@given(seeds, sharpness, st.integers(1, 11))
def test_expected_acceptance_is_bounded_from_both_sides(seed: int, sharp: float, top: int) -> None:
    draft, log_p = draw(seed, sharp)
    ids, values, tail = record(log_p, top)
    lower, upper = expected_acceptance(draft, ids, values, tail)
    torch.testing.assert_close(recorded_acceptance(draft, ids, values), lower)
    exact = torch.minimum(draft.softmax(-1), log_p.exp()).sum(-1)
    assert (lower <= exact + 1e-5).all()
    assert (exact <= upper + 1e-5).all()
    assert (lower >= 0.0).all()
    assert (upper <= 1.0 + 1e-4).all()


def test_a_perfect_draft_has_no_loss_and_full_acceptance() -> None:
    _, log_p = draw(0, 2.0)
    ids, values, tail = record(log_p, 6)
    torch.testing.assert_close(
        forward_kl(log_p, ids, values, tail), torch.zeros(5), atol=1e-5, rtol=0.0
    )
    lower, upper = expected_acceptance(log_p, ids, values, tail)
    torch.testing.assert_close(upper, torch.ones(5))
    torch.testing.assert_close(lower, 1.0 - tail)


def test_extreme_logits_stay_finite_with_finite_gradients() -> None:
    draft = torch.full((3, 11), -1e4)
    draft[:, 0] = 1e4
    draft.requires_grad_(True)
    _, log_p = draw(1, 3.0, rows=3)
    loss = forward_kl(draft, *record(log_p, 4))
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert draft.grad is not None
    assert torch.isfinite(draft.grad).all()
