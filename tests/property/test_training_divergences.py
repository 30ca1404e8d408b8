"""Every loss against the closed form over the whole vocabulary, and its gradient, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.actors.training.losses import (
    expected_acceptance,
    forward_kl,
    hard_label,
    jsd,
    lk_hybrid,
    reverse_kl,
    total_variation,
)

ROWS, VOCAB = 4, 9
seeds = st.integers(0, 2**31)
sharpness = st.floats(0.1, 4.0)
betas = st.floats(0.05, 0.95)
tops = st.integers(1, VOCAB - 1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def closed_jsd(p: Tensor, q: Tensor, beta: float = 0.5) -> Tensor:
    m = beta * p + (1.0 - beta) * q
    return beta * kl(p, m) + (1.0 - beta) * kl(q, m)


def closed_tv(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p - q).abs().sum(-1)


def closed_hybrid(p: Tensor, q: Tensor) -> Tensor:
    weight = torch.exp(-3.0 * torch.minimum(p, q).sum(-1)).detach()
    return weight * kl(p, q) + (1.0 - weight) * closed_tv(p, q)


LOSSES: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "forward_kl": (forward_kl, kl),
    "reverse_kl": (reverse_kl, lambda p, q: kl(q, p)),
    "jsd": (jsd, closed_jsd),
    "jsd_0.2": (partial(jsd, beta=0.2), partial(closed_jsd, beta=0.2)),
    "total_variation": (total_variation, closed_tv),
    "lk_hybrid": (lk_hybrid, closed_hybrid),
}
every_loss = pytest.mark.parametrize("name", LOSSES)


def draw(seed: int, sharp: float) -> tuple[Tensor, Tensor]:
    """A draft's logits and a target's log-probabilities, float64."""
    generator = torch.Generator().manual_seed(seed)
    draft, target = sharp * torch.randn(2, ROWS, VOCAB, generator=generator, dtype=torch.float64)
    return draft.requires_grad_(True), target.log_softmax(-1)


def record(log_p: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    values, ids = log_p.topk(top, dim=-1)
    tail = log_p.exp().scatter(-1, ids, 0.0).sum(-1)
    return ids, values, tail


def bucketed(logits: Tensor, log_p: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """p and q of the buckets, from whole distributions."""

    def reduce(probs: Tensor) -> Tensor:
        tail = probs.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
        return torch.cat([probs.gather(-1, ids), tail], -1)

    return reduce(log_p.exp()), reduce(logits.softmax(-1))


def gradient(value: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(value.sum(), logits)
    return found


@every_loss
@settings(max_examples=25, deadline=None)
@given(seed=seeds, sharp=sharpness)
def test_value_and_gradient_are_the_closed_forms_where_everything_is_recorded(
    name: str, seed: int, sharp: float
) -> None:
    loss, closed = LOSSES[name]
    logits, log_p = draw(seed, sharp)
    found = loss(logits, *record(log_p, VOCAB))
    expected = closed(log_p.exp(), logits.softmax(-1))
    assert found.dtype == torch.float64
    # the empty tail counts as one of 1e-7
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-9)
    torch.testing.assert_close(
        gradient(found, logits), gradient(expected, logits), atol=1e-6, rtol=1e-9
    )


@every_loss
@settings(max_examples=25, deadline=None)
@given(seed=seeds, sharp=sharpness, top=tops)
def test_the_tail_is_one_bucket_of_the_closed_form(
    name: str, seed: int, sharp: float, top: int
) -> None:
    loss, closed = LOSSES[name]
    logits, log_p = draw(seed, sharp)
    ids, values, tail = record(log_p, top)
    p, q = bucketed(logits, log_p, ids)
    if float(torch.minimum(p, q).min().detach()) < 1e-7:
        return  # below the floor of a tail
    found, expected = loss(logits, ids, values, tail), closed(p, q)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(
        gradient(found, logits), gradient(expected, logits), atol=1e-12, rtol=1e-9
    )
    whole = closed(log_p.exp(), logits.softmax(-1))
    if name != "lk_hybrid":  # whose weight differs: the buckets overlap more
        assert (found <= whole + 1e-12).all()


@every_loss
@settings(max_examples=25, deadline=None)
@given(seed=seeds, sharp=sharpness, top=tops)
def test_never_negative_and_nothing_at_the_target_itself(
    name: str, seed: int, sharp: float, top: int
) -> None:
    loss, _ = LOSSES[name]
    logits, log_p = draw(seed, sharp)
    recorded = record(log_p, top)
    assert (loss(logits, *recorded) >= -1e-12).all()
    same = log_p.clone().requires_grad_(True)
    value = loss(same, *recorded)
    torch.testing.assert_close(value, torch.zeros_like(value), atol=2e-6, rtol=0.0)
    if name in ("total_variation", "lk_hybrid"):
        return  # a kink: any subgradient is one
    pull = gradient(value, same)
    torch.testing.assert_close(pull, torch.zeros_like(pull), atol=2e-6, rtol=0.0)


@settings(max_examples=40, deadline=None)
@given(seeds, sharpness, tops)
def test_total_variation_is_one_minus_the_expected_acceptance(
    seed: int, sharp: float, top: int
) -> None:
    logits, log_p = draw(seed, sharp)
    recorded = record(log_p, top)
    _, upper = expected_acceptance(logits, *recorded)
    torch.testing.assert_close(total_variation(logits, *recorded), 1.0 - upper)
    assert (total_variation(logits, *recorded) <= 1.0).all()


@settings(max_examples=40, deadline=None)
@given(seeds, sharpness, betas)
def test_jsd_is_bounded_and_mirrors(seed: int, sharp: float, beta: float) -> None:
    logits, log_p = draw(seed, sharp)
    log_q = logits.detach().log_softmax(-1)
    there = jsd(log_q, *record(log_p, VOCAB), beta=beta)
    back = jsd(log_p, *record(log_q, VOCAB), beta=1.0 - beta)
    torch.testing.assert_close(there, back, atol=1e-6, rtol=1e-9)
    entropy = -(beta * math.log(beta) + (1.0 - beta) * math.log1p(-beta))
    assert (there <= entropy + 1e-6).all()


def test_jsd_of_disjoint_distributions_is_the_whole_bound() -> None:
    log_p = torch.tensor([[0.0, -torch.inf]], dtype=torch.float64)
    draft = torch.tensor([[-400.0, 400.0]], dtype=torch.float64)
    ids = torch.tensor([[0, 1]])
    found = jsd(draft, ids, log_p, torch.zeros(1, dtype=torch.float64))
    assert float(found) == pytest.approx(math.log(2.0), abs=1e-6)


def test_jsd_tends_to_the_kls_at_its_ends() -> None:
    logits, log_p = draw(3, 1.0)
    recorded = record(log_p, 5)
    near = jsd(logits, *recorded, beta=1e-5) / 1e-5
    torch.testing.assert_close(near, forward_kl(logits, *recorded), rtol=1e-3, atol=1e-4)
    far = jsd(logits, *recorded, beta=1.0 - 1e-5) / 1e-5
    torch.testing.assert_close(far, reverse_kl(logits, *recorded), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, math.nan])
def test_jsd_wants_a_real_mixture(beta: float) -> None:
    logits, log_p = draw(0, 1.0)
    with pytest.raises(ValueError, match="beta"):
        jsd(logits, *record(log_p, 4), beta=beta)


@settings(max_examples=20, deadline=None)
@given(seeds, sharpness)
def test_hard_label_is_the_cross_entropy_of_the_token(seed: int, sharp: float) -> None:
    logits, log_p = draw(seed, sharp)
    tokens = log_p.argmax(-1)
    found = hard_label(logits, tokens)
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient(found, logits), gradient(expected, logits))


@every_loss
@pytest.mark.parametrize("top", [1, 4, VOCAB])
def test_zero_masses_and_extreme_logits_stay_finite(name: str, top: int) -> None:
    loss, _ = LOSSES[name]
    log_p = torch.full((3, VOCAB), -torch.inf)
    log_p[:, 0] = 0.0
    log_p[1, :4] = math.log(0.25)
    draft = torch.full((3, VOCAB), -1e4)
    draft[:, VOCAB - 1] = 1e4  # all its mass where the target has none
    draft[2, 0] = 2e4
    draft.requires_grad_(True)
    values, ids = log_p.topk(top, dim=-1)
    tail = (1.0 - values.exp().sum(-1)).clamp(min=0.0)
    found = loss(draft, ids, values, tail)
    assert torch.isfinite(found).all()
    assert torch.isfinite(gradient(found, draft)).all()


@every_loss
def test_a_draft_in_bfloat16_is_evaluated_in_float32(name: str) -> None:
    loss, _ = LOSSES[name]
    logits, log_p = draw(5, 2.0)
    half = logits.detach().bfloat16()
    ids, values, tail = record(log_p, 4)
    found = loss(half, ids, values.half(), tail.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found.double(), loss(half.double(), ids, values, tail), atol=5e-3, rtol=5e-3
    )
