"""Verification leaves the target's distribution as it is: closed form, then a seeded chi-square."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from paceline.actors.engine.gumbel import gumbel, gumbel_max, stream_key
from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import (
    TargetProbs,
    draw,
    make_sampling_batch,
    processed_probs,
)
from paceline.actors.speculation.rejection_sampler import (
    Proposal,
    _sample_unseeded,
    acceptance_probability,
    rejection_sample,
    residual,
    speculative_sample,
)

WEIGHTS = st.one_of(st.just(0.0), st.floats(1e-30, 1e-6), st.floats(0.01, 1.0))


@st.composite
def distributions(draw: st.DrawFn, size: int) -> Tensor:
    """A distribution over ``size`` tokens, with zeros and tiny masses."""
    weights = draw(st.lists(WEIGHTS, min_size=size, max_size=size).filter(lambda w: sum(w) > 0.01))
    distribution = torch.tensor(weights, dtype=torch.float64)
    return distribution / distribution.sum()


def one_position_distribution(p: Tensor, q: Tensor) -> Tensor:
    """The distribution of the emitted token when one token is drafted from q, in closed form."""
    accept = q * acceptance_probability(p, q)
    rest = residual(p[None], torch.arange(len(p))[None], q[None])[0]
    return accept + (1.0 - accept.sum()) * rest / rest.sum()


@given(st.integers(2, 6).flatmap(lambda n: st.tuples(distributions(n), distributions(n))))
def test_one_draft_token_keeps_the_distribution(pair: tuple[Tensor, Tensor]) -> None:
    p, q = pair
    torch.testing.assert_close(one_position_distribution(p, q), p, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize(
    ("p", "q"),
    [
        ([0.5, 0.5, 0.0], [0.5, 0.5, 0.0]),
        ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]),
        ([0.2, 0.3, 0.5], [0.0, 1.0, 0.0]),
        ([1e-12, 1.0 - 1e-12, 0.0], [1.0 - 1e-12, 1e-12, 0.0]),
    ],
    ids=["equal", "disjoint", "point-draft", "tiny"],
)
def test_corner_distributions(p: list[float], q: list[float]) -> None:
    distribution = torch.tensor(p, dtype=torch.float64)
    other = torch.tensor(q, dtype=torch.float64)
    torch.testing.assert_close(
        one_position_distribution(distribution, other), distribution, atol=1e-12, rtol=1e-9
    )


@given(st.data())
@settings(max_examples=50)
def test_a_block_of_drafts_keeps_the_joint_distribution(data: st.DataObject) -> None:
    """k = 2, V = 3, distributions that depend on the prefix: all outcomes enumerated."""
    vocab, k = 3, 2
    prefixes = [t for n in range(k + 1) for t in itertools.product(range(vocab), repeat=n)]
    p = {prefix: data.draw(distributions(vocab)) for prefix in prefixes}
    q = {prefix: data.draw(distributions(vocab)) for prefix in prefixes}

    def emitted(prefix: tuple[int, ...], left: int) -> dict[tuple[int, ...], float]:
        """Law of the tokens that one round emits after ``prefix``."""
        if left == 0:
            return {(v,): float(p[prefix][v]) for v in range(vocab)}
        distribution: dict[tuple[int, ...], float] = {}
        accept = q[prefix] * acceptance_probability(p[prefix], q[prefix])
        rest = residual(p[prefix][None], torch.arange(vocab)[None], q[prefix][None])[0]
        rest = (1.0 - accept.sum()) * rest / rest.sum()
        for v in range(vocab):
            distribution[(v,)] = distribution.get((v,), 0.0) + float(rest[v])
            for tail, mass in emitted((*prefix, v), left - 1).items():
                key = (v, *tail)
                distribution[key] = distribution.get(key, 0.0) + float(accept[v]) * mass
        return distribution

    round_distribution = emitted((), k)
    # Continue short rounds with p itself: the joint distribution of k + 1 tokens must be p's.
    for target in itertools.product(range(vocab), repeat=k + 1):
        total = 0.0
        for tokens, mass in round_distribution.items():
            if target[: len(tokens)] == tokens:
                for n in range(len(tokens), k + 1):
                    mass *= float(p[target[:n]][target[n]])
                total += mass
        expected = 1.0
        for n in range(k + 1):
            expected *= float(p[target[:n]][target[n]])
        assert total == pytest.approx(expected, abs=1e-9)


def _chi_square(counts: Tensor, distribution: Tensor) -> float:
    expected = distribution.double() * counts.sum()
    keep = expected > 0
    assert counts[~keep].sum() == 0, "a token of probability 0 was emitted"
    return float(
        stats.chisquare(counts[keep].numpy(), expected[keep].numpy(), sum_check=False).pvalue
    )


@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_vectorised_rejection_sampling_keeps_the_distribution(
    seeded: bool, temperature: float
) -> None:
    """50,000 rows of one round: the first emitted token, and the second given the first."""
    rows, vocab, k = 50_000, 8, 2
    generator = torch.Generator().manual_seed(7)
    target = torch.randn(vocab, generator=generator) * 2
    draft = torch.randn(vocab, generator=generator) * 2
    params = [
        SamplingParams(max_tokens=8, temperature=temperature, seed=i if seeded else None)
        for i in range(rows)
    ]
    batch = make_sampling_batch(params, "cpu")
    q = torch.softmax(draft / temperature, -1)
    ids = torch.arange(vocab).expand(rows, k, vocab)
    probs = q.expand(rows, k, vocab)
    positions = torch.arange(k)
    if seeded:
        keys = stream_key(batch.seeds[:, None], positions)
        tokens = (probs.double().log() + gumbel(keys, torch.arange(vocab))).argmax(-1)
    else:
        tokens = draw(probs.contiguous(), generator)
    proposal = Proposal(tokens, torch.full((rows,), k), q[tokens], ids, probs)
    logits = target.expand(rows, k + 1, vocab)
    sampled = rejection_sample(
        logits, proposal, batch, torch.zeros(rows, dtype=torch.int64), generator
    )
    distribution = torch.softmax(target / temperature, -1)
    first = torch.where(sampled.num_accepted > 0, tokens[:, 0], sampled.final_tokens)
    assert _chi_square(torch.bincount(first, minlength=vocab), distribution) > 1e-3
    more = sampled.num_accepted >= 1
    second = torch.where(sampled.num_accepted > 1, tokens[:, 1], sampled.final_tokens)[more]
    assert _chi_square(torch.bincount(second, minlength=vocab), distribution) > 1e-3
    acceptance = float((sampled.num_accepted > 0).double().mean())
    alpha = float(torch.minimum(distribution, q).sum())
    if seeded:  # arXiv 2408.07978: at least alpha / (2 - alpha)
        assert acceptance > alpha / (2 - alpha) - 0.01
    else:
        assert acceptance == pytest.approx(alpha, abs=0.01)


FILTERS = st.sampled_from(
    [
        {"top_p": 0.9, "temperature": 0.2},
        {"top_k": 5},
        {"top_k": 3, "top_p": 0.5},
        {"min_p": 0.3},
        {"top_k": 300},
        {"top_p": 0.95},
        {"top_p": 0.0},
    ]
)


def _drafted(logits: Tensor, size: int, seed: int) -> Proposal:
    """Tokens of a draft that is somewhat like the target, some of them outside what it keeps."""
    generator = torch.Generator().manual_seed(seed)
    rows, steps, _ = logits.shape
    other = logits + torch.randn(logits.shape, generator=generator)
    probs, ids = torch.softmax(other[:, :-1], -1).topk(size)
    probs = probs / probs.sum(-1, keepdim=True)
    tokens = ids.gather(-1, draw(probs, generator)[..., None]).squeeze(-1)
    counts = torch.randint(0, steps, (rows,), generator=generator)
    own = probs * (ids == tokens[..., None])
    return Proposal(tokens, counts, own.sum(-1), ids, probs)


@given(st.lists(FILTERS, min_size=1, max_size=6), st.integers(0, 2**31), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_candidates_are_accepted_and_drawn_as_if_all_tokens_were(
    filters: list[dict[str, Any]], seed: int, k: int
) -> None:
    """To the last bit: the same random numbers give the same tokens, and rows keep their width."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = 4 * len(filters), 1500
    spread = torch.tensor([0.0, 1.0, 3.0, 8.0]).repeat(len(filters))[:, None, None]
    logits = (torch.randn(rows, k + 1, vocab, generator=generator) * spread * 4).round() / 4
    params = [SamplingParams(9, **own) for own in filters for _ in range(4)]
    batch = make_sampling_batch(params, "cpu")
    proposal = _drafted(logits, 6, seed) if k else Proposal.empty(rows, logits.device)
    kept = processed_probs(logits, batch)
    before = kept.dense(vocab)
    whole = TargetProbs(before.clone())
    found, expected = (
        _sample_unseeded(probs, proposal, torch.Generator().manual_seed(seed))
        for probs in (kept, whole)
    )
    uniform = torch.rand(
        (rows, k + 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    for other in (expected, speculative_sample(kept, proposal, uniform)):
        assert torch.equal(found[0], other[0])
        assert torch.equal(found[1], other[1])
    assert torch.equal(kept.dense(vocab), before)

    seeded = [replace(own, seed=seed + i) for i, own in enumerate(params)]
    positions = torch.arange(rows)
    crowd = rejection_sample(
        logits, proposal, make_sampling_batch(seeded, "cpu"), positions, generator
    )
    free = [SamplingParams(9), *seeded]  # beside it all tokens are candidates
    sampled = rejection_sample(
        torch.cat([logits[:1], logits]),
        proposal.scatter(range(1, rows + 1), rows + 1),
        make_sampling_batch(free, "cpu"),
        torch.cat([positions[:1], positions]),
        generator,
    )
    assert torch.equal(sampled.num_accepted[1:], crowd.num_accepted)
    assert torch.equal(sampled.final_tokens[1:], crowd.final_tokens)
    for i in range(rows):
        alone = rejection_sample(
            logits[i : i + 1],
            Proposal.empty(1, logits.device),
            make_sampling_batch(seeded[i : i + 1], "cpu"),
            positions[i : i + 1],
            generator,
        )
        first = proposal.token_ids[i, 0] if crowd.num_accepted[i] else crowd.final_tokens[i]
        assert int(alone.final_tokens[0]) == int(first)


@pytest.mark.parametrize("size", [1, 3, 64, 511, 512, 513, 5000])
def test_kernels_draw_by_the_cumulative_sum(size: int) -> None:
    weights = torch.rand(200, 1, size, generator=torch.Generator().manual_seed(size)) ** 8
    weights[:, :, 1::3] = 0.0
    weights[:50, :, : size // 2] = 0.0
    probs, nothing = TargetProbs(weights), Proposal.empty(200, weights.device)
    _, drawn = _sample_unseeded(probs, nothing, torch.Generator().manual_seed(5))
    uniform = torch.rand((200, 1), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert torch.equal(drawn, speculative_sample(probs, nothing, uniform)[1])


def test_kernels_draw_what_a_draft_leaves() -> None:
    """Of p = q nothing is left; a token of the support is there twice, as padding is."""
    p = torch.tensor([0.25, 0.25, 0.0, 0.5]).repeat(400, 2, 1)
    p[200:, 0] = torch.tensor([0.1, 0.2, 0.3, 0.4])
    support = torch.tensor([0, 1, 3, 0]).expand(400, 1, 4)
    q = torch.tensor([0.25, 0.25, 0.5, 0.0]).expand(400, 1, 4)
    # What p = q leaves is a draw of p: the token that it rejects has to be one that p has not.
    tokens = torch.tensor([2] * 200 + [0] * 200)[:, None]
    proposal = Proposal(tokens, torch.ones(400, dtype=torch.int64), q[..., 0], support, q)
    before = p.clone()
    taken, final = _sample_unseeded(TargetProbs(p), proposal, torch.Generator().manual_seed(3))
    assert torch.equal(p, before)
    assert taken[:200].tolist() == [0] * 200
    assert set(final[:200].tolist()) == {0, 1, 3}
    rejected = final[200:][taken[200:] == 0]
    assert len(rejected) > 50
    assert set(rejected.tolist()) == {2}
    uniform = torch.rand((400, 2), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    expected = speculative_sample(TargetProbs(p), proposal, uniform)
    assert torch.equal(taken, expected[0])
    assert torch.equal(final, expected[1])


def test_what_is_no_number_draws_a_token_all_the_same() -> None:
    probs = TargetProbs(torch.full((2, 1, 700), torch.nan))
    nothing = Proposal.empty(2, probs.probs.device)
    assert _sample_unseeded(probs, nothing, torch.Generator())[1].tolist() == [699, 699]


@pytest.mark.parametrize("seeded", [False, True], ids=["unseeded", "seeded"])
def test_few_candidates_of_many_tokens_keep_the_distribution(seeded: bool) -> None:
    """5 of 200 tokens, the last two kept of four equal ones; the draft also draws others."""
    rows, vocab = 20_000, 200
    target = torch.full((vocab,), -2.0)
    target[[150, 20, 90, 3, 120, 60, 199]] = torch.tensor([3.0, 2.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    params = [SamplingParams(9, top_k=5, seed=i if seeded else None) for i in range(rows)]
    kept = [150, 20, 90, 3, 60]
    distribution = torch.zeros(vocab)
    distribution[kept] = torch.softmax(target[kept], -1)
    generator = torch.Generator().manual_seed(11)
    ids = torch.tensor([199, 150, 20, 0])
    q = torch.tensor([0.3, 0.2, 0.4, 0.1])
    tokens = ids[draw(q.expand(rows, 1, 4), generator)]
    proposal = Proposal(
        tokens,
        torch.ones(rows, dtype=torch.int64),
        torch.ones(rows, 1),
        ids.expand(rows, 1, 4),
        q.expand(rows, 1, 4),
    )
    sampled = rejection_sample(
        target.expand(rows, 2, vocab),
        proposal,
        make_sampling_batch(params, "cpu"),
        torch.zeros(rows, dtype=torch.int64),
        generator,
    )
    assert sampled.probs is not None
    assert sampled.probs.probs.shape == (rows, 2, 64)
    first = torch.where(sampled.num_accepted > 0, tokens[:, 0], sampled.final_tokens)
    assert _chi_square(torch.bincount(first, minlength=vocab), distribution) > 1e-3
    bonus = sampled.final_tokens[sampled.num_accepted > 0]
    assert _chi_square(torch.bincount(bonus, minlength=vocab), distribution) > 1e-3


@given(st.integers(-(2**70), 2**70), st.integers(0, 5000))
def test_noise_depends_on_seed_position_and_token_alone(seed: int, position: int) -> None:
    batch = make_sampling_batch([SamplingParams(max_tokens=1, seed=seed)], "cpu")
    key = stream_key(batch.seeds, torch.tensor([position]))
    whole = gumbel(key, torch.arange(64))
    some = gumbel(key, torch.tensor([[3, 63, 17]]))
    assert torch.isfinite(whole).all()
    assert torch.equal(whole[:, [3, 63, 17]], some)


def test_noise_is_gumbel() -> None:
    keys = stream_key(torch.arange(2000), torch.tensor(5))
    values = gumbel(keys, torch.arange(50)).flatten()
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3


@given(st.integers(1, 300), st.integers(0, 2**32), st.booleans())
def test_a_seeded_draw_is_of_the_largest_noisy_log_probability(
    size: int, seed: int, known: bool
) -> None:
    """The kernel, which takes few logarithms, against all of them."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(5, size, generator=generator) * 9, dim=-1)
    probs[torch.rand(5, size, generator=generator) < 0.3] = 0.0
    probs[:, 0] += 1e-30
    ids = torch.randint(50_000, (5, size), generator=generator).sort(dim=-1).values
    keys = stream_key(torch.arange(seed, seed + 5), torch.arange(5))
    noise = gumbel(keys, ids if known else torch.arange(size))
    columns = gumbel_max(probs, keys, ids if known else None)
    scores = probs.double().log() + noise
    assert torch.equal(scores.gather(-1, columns[:, None])[:, 0], scores.amax(dim=-1))


def test_a_greedy_row_accepts_the_argmax_alone() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 0.0], [0.0, 0.0, 1.0]]]).repeat(3, 1, 1)
    batch = make_sampling_batch([SamplingParams(max_tokens=9, temperature=0.0)] * 3, "cpu")
    tokens = torch.tensor([[1, 0], [1, 2], [2, 0]])
    proposal = Proposal(
        tokens,
        torch.tensor([2, 2, 2]),
        torch.ones(3, 2),
        tokens[..., None],
        torch.ones(3, 2, 1),
    )
    generator = torch.Generator().manual_seed(0)
    sampled = rejection_sample(
        logits, proposal, batch, torch.zeros(3, dtype=torch.int64), generator
    )
    assert sampled.num_accepted.tolist() == [2, 1, 0]
    assert sampled.final_tokens.tolist() == [2, 0, 1]


def test_padding_is_never_accepted() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[..., 0] = 5.0
    batch = make_sampling_batch([SamplingParams(max_tokens=9, temperature=0.0)], "cpu")
    zeros = torch.zeros(1, 2, dtype=torch.int64)
    proposal = Proposal(
        zeros, torch.tensor([1]), torch.ones(1, 2), zeros[..., None], torch.ones(1, 2, 1)
    )
    generator = torch.Generator().manual_seed(0)
    sampled = rejection_sample(
        logits, proposal, batch, torch.zeros(1, dtype=torch.int64), generator
    )
    assert sampled.num_accepted.tolist() == [1]


def test_what_lies_behind_the_drafts_of_a_row_changes_nothing() -> None:
    """Greedy, seeded and unseeded rows, with filters and without, of 0 to 3 drafted tokens."""
    rows, vocab, k = 12, 200, 3
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(rows, k + 1, vocab, generator=generator)
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {}, {"top_k": 9}]
    params = [SamplingParams(8, **{"temperature": 1.0} | kinds[i % 4]) for i in range(rows)]
    lengths = torch.tensor([i // 3 for i in range(rows)])
    tokens = logits[:, :k].argmax(-1)
    certain = torch.ones(rows, k, 1)
    proposal = Proposal(tokens, lengths, certain[..., 0], tokens[..., None], certain)

    def sampled(scores: Tensor) -> tuple[list[int], list[int]]:
        own = torch.Generator().manual_seed(6)
        batch = make_sampling_batch(params, "cpu")
        found = rejection_sample(scores, proposal, batch, torch.arange(rows), own)
        return found.num_accepted.tolist(), found.final_tokens.tolist()

    inside = torch.arange(k + 1) <= lengths[:, None]
    accepted, final = sampled(logits)
    assert any(accepted)
    for other in (0.0, torch.nan, torch.inf):
        assert sampled(logits.masked_fill(~inside[..., None], other)) == (accepted, final)
