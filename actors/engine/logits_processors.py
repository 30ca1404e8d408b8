"""What changes a row's logits before temperature: bias, penalties, endings that come too early.

The order is vLLM's: bias, then repetition, frequency and presence penalty, then the ban.
Penalties depend on the tokens before a position, the draft tokens of the block among them:
position i of a block counts the first i. The rules of a row that has none are no operation, so
that its logits keep their very bits in every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of C rows: ``rows`` int64, the others float32, all ``[C]``.

    ``indices`` are the same rows as Python integers.
    """

    indices: tuple[int, ...]
    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class TokenBias:
    """M terms that are added: row and token int64 ``[M]``, value float32 ``[M]``."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class EarlyEnds:
    """M tokens that may not come before output position ``until``; int64 ``[M]`` each."""

    rows: Tensor
    token_ids: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class LogitRules:
    """The rules of a batch; a part that no row has is None."""

    bias: TokenBias | None
    penalties: Penalties | None
    early_ends: EarlyEnds | None


def make_rules(params: Sequence[SamplingParams], device: torch.device) -> LogitRules | None:
    """The rules of B rows, None where no row has any."""
    bias = [
        (row, token, value)
        for row, p in enumerate(params)
        for token, value in p.logit_bias
        if value
    ]
    ends = [
        (row, token, p.min_tokens)
        for row, p in enumerate(params)
        if p.min_tokens
        for token in p.all_stop_token_ids
    ]
    penalised = [row for row, p in enumerate(params) if p.has_penalties]
    if not (bias or ends or penalised):
        return None

    def tensor(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def added() -> TokenBias:
        rows, token_ids, values = zip(*bias, strict=True)
        return TokenBias(tensor(rows), tensor(token_ids), tensor(values, torch.float32))

    def penalties() -> Penalties:
        rows = [params[row] for row in penalised]
        return Penalties(
            indices=tuple(penalised),
            rows=tensor(penalised),
            repetition=tensor([p.repetition_penalty for p in rows], torch.float32),
            frequency=tensor([p.frequency_penalty for p in rows], torch.float32),
            presence=tensor([p.presence_penalty for p in rows], torch.float32),
        )

    return LogitRules(
        bias=added() if bias else None,
        penalties=penalties() if penalised else None,
        early_ends=EarlyEnds(*map(tensor, zip(*ends, strict=True))) if ends else None,
    )


class TokenCounts:
    """How often each token stands in the prompts and the outputs of the C penalised rows."""

    def __init__(self, in_prompt: Tensor, in_output: Tensor) -> None:
        """Take bool ``[C, V]`` and float32 counts ``[C, V]``, which :meth:`add` changes."""
        self.in_prompt = in_prompt
        self.in_output = in_output

    def add(self, token_ids: Tensor) -> None:
        """One more output token per row, int64 ``[C]``."""
        ones = torch.ones_like(token_ids, dtype=self.in_output.dtype)
        self.in_output.scatter_add_(1, token_ids[:, None], ones[:, None])

    def along(self, drafts: Tensor) -> Tensor:
        """Output counts at every position of a block.

        Args:
            drafts: int64 ``[C, k]``; position i comes after the first i of them.

        Returns:
            float32 ``[C, k + 1, V]``.
        """
        drafted = drafts.shape[1]
        counts = self.in_output[:, None].repeat(1, drafted + 1, 1)
        before = torch.ones(drafted + 1, drafted, dtype=counts.dtype, device=counts.device).tril(-1)
        ids = drafts[:, None].expand(-1, drafted + 1, -1)
        return counts.scatter_add_(-1, ids, before.expand(len(drafts), -1, -1))


def count_tokens(
    rules: LogitRules | None,
    histories: Sequence[tuple[Sequence[int], int]],
    vocab_size: int,
    device: torch.device,
) -> TokenCounts | None:
    """Count the tokens of the penalised rows; None where there are none.

    Args:
        rules: of the batch.
        histories: per row of the batch all its tokens, and how many of them, the last ones, are
            output.
        vocab_size: V.
        device: where the counts are wanted.
    """
    if rules is None or rules.penalties is None:
        return None
    rows = rules.penalties.indices
    in_prompt = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
    in_output = torch.zeros(len(rows), vocab_size, device=device)
    for at, row in enumerate(rows):
        tokens, num_output = histories[row]
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        prompt, output = ids[: len(tokens) - num_output], ids[len(tokens) - num_output :]
        in_prompt[at, prompt] = True
        in_output[at].scatter_add_(0, output, torch.ones_like(output, dtype=in_output.dtype))
    return TokenCounts(in_prompt, in_output)


def ruled_logits(
    logits: Tensor,
    rules: LogitRules | None,
    output_positions: Tensor,
    counts: TokenCounts | None,
    drafts: Tensor,
) -> Tensor:
    """The logits that temperature is applied to; ``logits`` itself where there are no rules.

    Args:
        logits: float ``[B, k + 1, V]``; ``logits[:, i]`` follows the i-th draft token. They are
            not changed.
        rules: of the B rows.
        output_positions: int64 ``[B]``, index of the next output token of each row.
        counts: of the penalised rows, before the drafts.
        drafts: int64 ``[B, k]``.

    Returns:
        float ``[B, k + 1, V]``, float32 where there are rules.
    """
    if rules is None:
        return logits
    scores = logits.to(torch.float32, copy=True)
    if rules.bias is not None:
        bias = rules.bias
        scores[bias.rows, :, bias.token_ids] += bias.values[:, None]
    if rules.penalties is not None:
        if counts is None:
            raise ValueError("penalties need the counts of the tokens before")
        rows = rules.penalties.rows
        scores[rows] = _penalised(scores[rows], rules.penalties, counts, drafts[rows])
    if rules.early_ends is not None:
        ends = rules.early_ends
        steps = torch.arange(scores.shape[1], device=scores.device)
        early = output_positions[ends.rows, None] + steps < ends.until[:, None]
        kept = scores[ends.rows, :, ends.token_ids]
        scores[ends.rows, :, ends.token_ids] = kept.masked_fill(early, -torch.inf)
    return scores


def _penalised(scores: Tensor, penalties: Penalties, counts: TokenCounts, drafts: Tensor) -> Tensor:
    """Penalise float32 ``[C, k + 1, V]``.

    Repetition as in Keskar et al. 1909.05858 and transformers, over prompt and output; frequency
    and presence as OpenAI defines them, over the output.
    """
    in_output = counts.along(drafts)
    seen = counts.in_prompt[:, None] | (in_output > 0)
    repetition = penalties.repetition[:, None, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    scores = scores - penalties.frequency[:, None, None] * in_output
    return scores - penalties.presence[:, None, None] * (in_output > 0)


class RulesAhead:
    """The rules of a batch along a draft that grows by one token a step."""

    def __init__(
        self,
        rules: LogitRules | None,
        histories: Sequence[tuple[Sequence[int], int]],
        output_positions: Tensor,
    ) -> None:
        """Start before the first step; the arguments are those of the two functions above."""
        self._rules = rules
        self._histories = histories
        self._positions = output_positions
        self._counts: TokenCounts | None = None
        self._started = False

    def apply(self, logits: Tensor) -> Tensor:
        """The logits ``[B, V]`` of the next step, as verification will see them."""
        if self._rules is None:
            return logits
        if not self._started:
            self._started = True
            self._counts = count_tokens(
                self._rules, self._histories, logits.shape[-1], logits.device
            )
        none = self._positions.new_zeros(len(logits), 0)
        return ruled_logits(logits[:, None], self._rules, self._positions, self._counts, none)[:, 0]

    def took(self, token_ids: Tensor) -> None:
        """Go on by one token per row, int64 ``[B]``."""
        if self._rules is None:
            return
        self._positions = self._positions + 1
        if self._rules.penalties is not None and self._counts is not None:
            self._counts.add(token_ids[self._rules.penalties.rows])
