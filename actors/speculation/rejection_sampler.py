"""Rejection sampling: accept a prefix of the draft tokens and add one token of the target.

Greedy and seeded rows have one target token at every position (argmax, or argmax under Gumbel
noise): a draft token is accepted if it equals that token. Unseeded rows use speculative sampling
(Leviathan et al. 2211.17192, Chen et al. 2302.01318): accept with probability min(1, p/q); after
a rejection draw the recovered token from norm(max(0, p - q)); after full acceptance draw the bonus
token from p. All three keep the target's output distribution, for any draft.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import torch
from torch import Tensor

from paceline.actors.engine.gumbel import gumbel_max, stream_key
from paceline.actors.engine.logits_processors import TokenCounts, TokenMasks, process_logits
from paceline.actors.engine.native import kernels
from paceline.actors.engine.sampling import (
    SamplingBatch,
    TargetProbs,
    invert,
    own_positions,
    processed_probs,
)
from paceline.actors.engine.top_tokens import (
    accept_greedy,
    have_distributions,
    leading_true,
    most_probable,
)
from paceline.actors.engine.transfer import device_tensor


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of B rows, k positions, support of S tokens.

    Attributes:
        token_ids: int64 ``[B, k]``.
        num_drafted: int64 ``[B]``; positions at and after it are padding.
        token_probs: float32 ``[B, k]``, of the draft for its tokens at T = 1, without filters.
        support_ids: int64 ``[B, k, S]``; the tokens with q > 0, under the request's sampling.
        support_probs: float32 ``[B, k, S]``, q: sums to 1 where drafted.
        num_forced: per row, how many of the last drafted tokens a grammar forced; empty if none.
        num_suffix: per row, how many of the first drafted tokens are suffixes'; empty if none.
    """

    token_ids: Tensor
    num_drafted: Tensor
    token_probs: Tensor
    support_ids: Tensor
    support_probs: Tensor
    num_forced: tuple[int, ...] = ()
    num_suffix: tuple[int, ...] = ()

    @property
    def draft_probs(self) -> Tensor:
        """q of the draft tokens, float32 ``[B, k]``."""
        own = self.support_ids == self.token_ids[..., None]
        return (self.support_probs * own).sum(-1)

    @property
    def num_by_model(self) -> list[int]:
        """Per row, how many tokens a draft model proposed."""
        drafted: list[int] = self.num_drafted.tolist()
        for others in (self.num_forced, self.num_suffix):
            if others:
                drafted = [n - other for n, other in zip(drafted, others, strict=True)]
        return drafted

    @staticmethod
    @lru_cache(maxsize=64)
    def empty(rows: int, device: torch.device) -> Proposal:
        """No draft tokens: the round is plain decoding. Shared, never changed."""
        integers = torch.zeros(rows, 0, dtype=torch.int64, device=device)
        floats = torch.zeros(rows, 0, dtype=torch.float32, device=device)
        return Proposal(
            token_ids=integers,
            num_drafted=torch.zeros(rows, dtype=torch.int64, device=device),
            token_probs=floats,
            support_ids=integers.unsqueeze(-1),
            support_probs=floats.unsqueeze(-1),
        )

    @staticmethod
    def of_most_probable(token_ids: Tensor, num_drafted: Tensor, token_probs: Tensor) -> Proposal:
        """A draft's most probable tokens: q is 1."""
        certain = torch.ones_like(token_probs)[..., None]
        return Proposal(token_ids, num_drafted, token_probs, token_ids[..., None], certain)

    def scatter(self, indices: Sequence[int], rows: int) -> Proposal:
        """Widen to ``rows`` rows; the rows that are not in ``indices`` draft nothing.

        Args:
            indices: the new index of each present row.
            rows: B.
        """
        if list(indices) == list(range(rows)):
            return self
        at = torch.tensor(indices, device=self.token_ids.device)

        def widen(part: Tensor) -> Tensor:
            return part.new_zeros(rows, *part.shape[1:]).index_copy_(0, at, part)

        return Proposal(
            token_ids=widen(self.token_ids),
            num_drafted=widen(self.num_drafted),
            token_probs=widen(self.token_probs),
            support_ids=widen(self.support_ids),
            support_probs=widen(self.support_probs),
        )

    def truncate(self, lengths: Tensor) -> Proposal:
        """Keep at most int64 ``[B]`` ``lengths`` tokens per row; the rest becomes zeros."""
        kept = torch.minimum(self.num_drafted, lengths)
        behind = torch.arange(self.token_ids.shape[1], device=kept.device) >= kept[:, None]
        return Proposal(
            token_ids=self.token_ids.masked_fill(behind, 0),
            num_drafted=kept,
            token_probs=self.token_probs.masked_fill(behind, 0.0),
            support_ids=self.support_ids.masked_fill(behind[..., None], 0),
            support_probs=self.support_probs.masked_fill(behind[..., None], 0.0),
        )

    def with_suffixes(self, tokens: Mapping[int, Sequence[int]]) -> Proposal:
        """Draft these tokens, with probability 1, in rows without others."""
        if not tokens:
            return self
        proposal = self.with_forced(dict.fromkeys(tokens, 0), tokens)
        return replace(proposal, num_forced=(), num_suffix=proposal.num_forced)

    def with_forced(self, kept: Mapping[int, int], forced: Mapping[int, Sequence[int]]) -> Proposal:
        """Keep the first tokens of rows, and append forced ones, whose probability is 1.

        Args:
            kept: number of tokens per row; rows that are not in it stay.
            forced: tokens per row of ``kept``.
        """
        counts = self.num_drafted.tolist()
        lengths = [kept[i] + len(forced[i]) if i in kept else n for i, n in enumerate(counts)]
        steps, more = max(lengths), max(lengths) - self.token_ids.shape[1]
        at = [(i, kept[i] + j, token) for i, row in forced.items() for j, token in enumerate(row)]
        if lengths == counts and not at:
            return self
        if not self.token_ids.shape[1]:  # as in most rounds, in a sixth of the time
            return self._of_known([forced.get(i, ()) for i in range(len(counts))])

        def widen(part: Tensor) -> Tensor:
            filled = part.new_zeros(len(part), max(more, 0), *part.shape[2:])
            return torch.cat([part[:, :steps], filled], dim=1)

        device = self.token_ids.device
        rows, places, tokens = torch.tensor(at, dtype=torch.int64, device=device).view(-1, 3).T
        token_ids, token_probs = widen(self.token_ids), widen(self.token_probs)
        support_ids, support_probs = widen(self.support_ids), widen(self.support_probs)
        support_ids[rows, places], support_probs[rows, places] = 0, 0.0
        for part in (token_ids, support_ids[..., 0]):
            part[rows, places] = tokens
        for part in (token_probs, support_probs[..., 0]):
            part[rows, places] = 1.0
        return Proposal(
            token_ids=token_ids,
            num_drafted=torch.tensor(lengths, device=device),
            token_probs=token_probs,
            support_ids=support_ids,
            support_probs=support_probs,
            num_forced=tuple(len(forced.get(i, ())) for i in range(len(counts))),
            num_suffix=tuple(min(n, kept.get(i, n)) for i, n in enumerate(self.num_suffix)),
        )

    def _of_known(self, tokens: Sequence[Sequence[int]]) -> Proposal:
        """Draft these tokens of each row, which all count as forced, where there are no others."""
        lengths, device = [len(row) for row in tokens], self.token_ids.device
        steps = max(lengths)
        token_ids = device_tensor([[*row, *[0] * (steps - len(row))] for row in tokens], device)
        probs = device_tensor([[1.0] * n + [0.0] * (steps - n) for n in lengths], device)
        count = device_tensor(lengths, device)
        support = token_ids[..., None], probs[..., None]
        return Proposal(token_ids, count, probs, *support, num_forced=tuple(lengths))


def drop_non_finite(proposal: Proposal) -> tuple[Proposal, Tensor | None]:
    """Truncate each row before its first draft token without a finite probability.

    The tokens before it stay: whether a position has probabilities depends on the tokens before
    it, not on the token drawn there. Dropping the whole row would reject a first token because of
    its value, and bias the output distribution.

    Returns:
        the proposal, and bool ``[B]`` of the truncated rows, None if there are none.
    """
    # One copy to the host, and no arithmetic: a small tensor's sum costs more than its list.
    if all(map(math.isfinite, chain.from_iterable(proposal.token_probs.tolist()))):
        return proposal, None
    lengths = proposal.token_probs.isfinite().cumprod(dim=1).sum(dim=1)
    truncated = lengths < proposal.num_drafted
    return proposal.truncate(lengths), truncated if bool(truncated.any()) else None


def non_finite_positions(logits: Tensor, drafted: Sequence[int]) -> list[list[bool]] | None:
    """Flag positions whose logits give no distribution: a NaN, +inf, or nothing but -inf.

    Args:
        logits: float ``[B, k + 1, V]``.
        drafted: tokens per row; on CPUs positions behind them are not read.

    Returns:
        flags of the positions per row; None if there is no such one, which is much cheaper.
    """
    parts: Iterable[Tensor] = (logits,)
    if logits.shape[1] > 1 and logits.device.type == "cpu":
        parts = (row[: n + 1] for row, n in zip(logits, drafted, strict=True))
    if all(map(have_distributions, parts)):
        return None
    broken = ~logits.amax(dim=-1).isfinite()  # amax propagates NaN
    return broken.tolist() if bool(broken.any()) else None


@dataclass(frozen=True, slots=True)
class RejectionSampleOutput:
    """Accepted counts and added tokens of B rows.

    Attributes:
        num_accepted: int64 ``[B]``.
        final_tokens: int64 ``[B]``: the recovered token, or the bonus token if every draft token
            was accepted.
        probs: ``[B, k + 1, K]``, the processed target distribution; None if every row is greedy.
    """

    num_accepted: Tensor
    final_tokens: Tensor
    probs: TargetProbs | None


def up_to_finite(
    sampled: RejectionSampleOutput,
    drafts: Sequence[Sequence[int]],
    not_finite: Sequence[Sequence[bool]],
) -> RejectionSampleOutput:
    """The round without what comes behind a position whose logits are not finite.

    Its last token is the draft token that was read at that position. The finite logits before it
    accepted that token, and plain decoding would have emitted it too; it may end the answer.

    Args:
        sampled: of B rows.
        drafts: draft tokens by row.
        not_finite: see :func:`non_finite_positions`. Rows of which the first position is not finite
            have no token at all, and stay.
    """
    accepted, final = sampled.num_accepted.tolist(), sampled.final_tokens.tolist()
    for i, flags in enumerate(not_finite):
        reached = flags[: accepted[i] + 1]
        if any(reached) and not flags[0]:
            accepted[i] = reached.index(True) - 1
            final[i] = drafts[i][accepted[i]]
    return replace(
        sampled,
        num_accepted=sampled.num_accepted.new_tensor(accepted),
        final_tokens=sampled.final_tokens.new_tensor(final),
    )


def acceptance_probability(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """min(1, p/q) elementwise, 0 where p is 0 (Leviathan et al., algorithm 1)."""
    return torch.where(
        target_probs >= draft_probs,
        (target_probs > 0).to(target_probs.dtype),
        target_probs / draft_probs,
    )


def residual(target_probs: Tensor, support_ids: Tensor, support_probs: Tensor) -> Tensor:
    """Unnormalised max(0, p - q) with q given on its support.

    If p equals q to the last bit the residual is empty. A rejection then has probability 0 in
    exact arithmetic; p is returned so that rounding cannot draw a token outside of it.

    Args:
        target_probs: float32 ``[R, K]``.
        support_ids: int64 ``[R, S]``, indices of the K.
        support_probs: float32 ``[R, S]``.

    Returns:
        float32 ``[R, K]``.
    """
    difference = target_probs.scatter_add(-1, support_ids, -support_probs).clamp_(min=0.0)
    empty = difference.sum(-1, keepdim=True) <= 0.0
    return torch.where(empty, target_probs, difference)


def _deterministic_tokens(
    logits: Tensor,
    probs: TargetProbs,
    batch: SamplingBatch,
    output_positions: Tensor,
    num_drafted: Tensor,
) -> Tensor:
    """The target's token at every position of greedy and seeded rows, int64 ``[B, T]``."""
    tokens = most_probable(logits)
    if not batch.any_seeded:
        return tokens
    steps = logits.shape[1]
    at = own_positions(batch.seeded_rows, steps, num_drafted)
    rows, step = at // steps, at % steps
    keys = stream_key(batch.seeds[rows], output_positions[rows] + step, batch.choices[rows])
    own = probs[rows, step]
    tokens[rows, step] = own.tokens(gumbel_max(own.probs, keys, own.ids))
    return tokens


def _sample_unseeded(
    probs: TargetProbs, proposal: Proposal, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Speculative sampling of R unseeded rows: accepted counts and final tokens, ``[R]`` each."""
    (rows, drafted), device = proposal.token_ids.shape, proposal.token_ids.device
    shape = rows, drafted + 1
    uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float64)
    drafts = proposal.token_ids, proposal.num_drafted, proposal.support_ids, proposal.support_probs
    found = kernels.sample(probs.probs, probs.ids, drafts, uniform)
    return found if found is not None else speculative_sample(probs, proposal, uniform)


def speculative_sample(
    probs: TargetProbs, proposal: Proposal, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept each draft token with probability min(1, p/q), and draw one behind the accepted ones.

    Args:
        probs: p, ``[R, k + 1, K]``.
        proposal: the draft tokens of R rows.
        uniform: float64 ``[R, k + 1]``, in [0, 1): of the draft tokens, and of the last draw.

    Returns:
        accepted counts and final tokens, int64 ``[R]`` each.
    """
    rows, drafted = proposal.token_ids.shape
    device = proposal.token_ids.device
    index = torch.arange(rows, device=device)
    if drafted == 0:
        at = probs[:, 0]
        return torch.zeros_like(index), at.tokens(invert(at.probs, uniform[:, 0]))
    p_draft = probs[:, :drafted].of(proposal.token_ids.unsqueeze(-1)).squeeze(-1)
    inside = torch.arange(drafted, device=device) < proposal.num_drafted[:, None]
    # q = 0 cannot be drafted; padding must not divide by it.
    q_draft = proposal.draft_probs.masked_fill(~inside, 1.0)
    chance = acceptance_probability(p_draft.double(), q_draft.double())
    num_accepted = leading_true(inside & (uniform[:, :-1] < chance))
    at = probs[index, num_accepted]
    rejected = num_accepted < proposal.num_drafted
    last = num_accepted.clamp(max=drafted - 1)
    # A draft token that is no candidate has p = 0, and leaves no residual.
    columns, found = at.find(proposal.support_ids[index, last])
    recovered = residual(at.probs, columns, proposal.support_probs[index, last] * found)
    weights = torch.where(rejected[:, None], recovered, at.probs)
    return num_accepted, at.tokens(invert(weights, uniform[:, -1]))


def rejection_sample(
    logits: Tensor,
    proposal: Proposal,
    batch: SamplingBatch,
    output_positions: Tensor,
    generator: torch.Generator,
    counts: TokenCounts | None = None,
    masks: TokenMasks | None = None,
) -> RejectionSampleOutput:
    """Accept a prefix of every row's draft tokens and add one token.

    Args:
        logits: float ``[B, k + 1, V]``; ``logits[:, i]`` follows the i-th draft token. Not
            changed.
        proposal: the draft tokens, k positions.
        batch: sampling parameters of the B rows.
        output_positions: int64 ``[B]``, index of the next output token of each row.
        generator: randomness of the unseeded rows.
        counts: token counts of the penalised rows; None if there are none.
        masks: of the rows with a grammar; None if there are none.
    """
    logits = process_logits(
        logits, batch.logits_processors, output_positions, counts, proposal.token_ids, masks
    )
    if batch.all_greedy:
        taken, final = accept_greedy(logits, proposal.token_ids, proposal.num_drafted)
        return RejectionSampleOutput(num_accepted=taken, final_tokens=final, probs=None)
    drafted = proposal.token_ids.shape[1]
    probs = processed_probs(logits, batch, proposal.num_drafted)
    if batch.all_unseeded:
        return RejectionSampleOutput(*_sample_unseeded(probs, proposal, generator), probs=probs)
    tokens = _deterministic_tokens(logits, probs, batch, output_positions, proposal.num_drafted)
    inside = torch.arange(drafted, device=logits.device) < proposal.num_drafted[:, None]
    num_accepted = leading_true((tokens[:, :drafted] == proposal.token_ids) & inside)
    final = tokens.gather(-1, num_accepted[:, None]).squeeze(-1)
    if batch.any_unseeded:
        rows = batch.unseeded_rows
        subset = Proposal(
            token_ids=proposal.token_ids[rows],
            num_drafted=proposal.num_drafted[rows],
            token_probs=proposal.token_probs[rows],
            support_ids=proposal.support_ids[rows],
            support_probs=proposal.support_probs[rows],
        )
        num_accepted[rows], final[rows] = _sample_unseeded(probs[rows], subset, generator)
    return RejectionSampleOutput(num_accepted=num_accepted, final_tokens=final, probs=probs)
