"""Logits processors before temperature: bias, penalties, minimum tokens and grammars.

The order is vLLM's: bias, repetition, frequency and presence penalty, minimum tokens; then the
grammar's mask. Penalties and masks depend on the tokens before a position: position i of a block
counts its first i draft tokens. The logits of a row without processors keep their bits in every
batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.actors.engine.grammar import GrammarError, GrammarState, Mask
from paceline.actors.engine.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of C rows.

    Attributes:
        indices: the rows.
        rows: the same as int64 ``[C]``.
        repetition: float32 ``[C]``.
        frequency: float32 ``[C]``.
        presence: float32 ``[C]``.
    """

    indices: tuple[int, ...]
    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """M added terms: row and token int64 ``[M]``, value float32 ``[M]``."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class MinTokens:
    """M tokens that are banned before output position ``until``; int64 ``[M]`` each."""

    rows: Tensor
    token_ids: Tensor
    until: Tensor


@dataclass(frozen=True, slots=True)
class LogitsProcessors:
    """Logits processors of a batch; None for those that no row has."""

    bias: LogitBias | None
    penalties: Penalties | None
    min_tokens: MinTokens | None


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Tokens that grammars allow at M positions of a block; at others all are.

    Attributes:
        rows: int64 ``[M]``.
        steps: int64 ``[M]``.
        allowed: bool ``[M, V]``.
    """

    rows: Tensor
    steps: Tensor
    allowed: Tensor

    def apply(self, scores: Tensor, logits: Tensor) -> None:
        """Mask ``scores`` in place.

        A position without an allowed token is masked ``logits``: a grammar goes before the minimum
        of tokens.

        Args:
            scores: float32 ``[B, T, V]``, processed.
            logits: float ``[B, T, V]``, unprocessed.
        """
        at = self.rows, self.steps
        masked = scores[at].masked_fill(~self.allowed, -torch.inf)
        raw = logits[at].float().masked_fill(~self.allowed, -torch.inf)
        empty = masked.amax(dim=-1, keepdim=True) == -torch.inf
        scores[at] = torch.where(empty, raw, masked)


def make_token_masks(
    masks: Sequence[tuple[int, int, Mask]], vocab_size: int, device: torch.device
) -> TokenMasks | None:
    """Make the masks of positions ``(row, step, mask)``, each once; None if there are none.

    Args:
        masks: of equal length.
        vocab_size: V; tokens beyond a mask are not allowed.
        device: of the tensors.
    """
    if not masks:
        return None
    rows, steps, words = zip(*masks, strict=True)
    bits = np.unpackbits(np.stack(words).view(np.uint8), axis=-1, bitorder="little")
    allowed = torch.zeros(len(masks), vocab_size, dtype=torch.bool)
    known = min(vocab_size, bits.shape[1])
    allowed[:, :known] = torch.from_numpy(bits.view(np.bool_)[:, :known])
    at = torch.tensor([rows, steps], device=device)
    return TokenMasks(at[0], at[1], allowed.to(device))


def make_logits_processors(
    params: Sequence[SamplingParams], device: torch.device
) -> LogitsProcessors | None:
    """Make the processors of B rows; None if no row has any."""
    bias = [
        (row, token, value)
        for row, p in enumerate(params)
        for token, value in p.logit_bias
        if value
    ]
    stop_tokens = [
        (row, token, p.min_tokens)
        for row, p in enumerate(params)
        if p.min_tokens
        for token in p.all_stop_token_ids
    ]
    penalised = [row for row, p in enumerate(params) if p.has_penalties]
    if not (bias or stop_tokens or penalised):
        return None

    def tensor(values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def logit_bias() -> LogitBias:
        rows, token_ids, values = zip(*bias, strict=True)
        return LogitBias(tensor(rows), tensor(token_ids), tensor(values, torch.float32))

    def penalties() -> Penalties:
        rows = [params[row] for row in penalised]
        return Penalties(
            indices=tuple(penalised),
            rows=tensor(penalised),
            repetition=tensor([p.repetition_penalty for p in rows], torch.float32),
            frequency=tensor([p.frequency_penalty for p in rows], torch.float32),
            presence=tensor([p.presence_penalty for p in rows], torch.float32),
        )

    return LogitsProcessors(
        bias=logit_bias() if bias else None,
        penalties=penalties() if penalised else None,
        min_tokens=MinTokens(*map(tensor, zip(*stop_tokens, strict=True))) if stop_tokens else None,
    )


class TokenCounts:
    """Tokens in the prompts and the outputs of the C rows with penalties.

    Attributes:
        in_prompt: bool ``[C, V]``.
        in_output: float32 counts ``[C, V]``.
    """

    def __init__(self, in_prompt: Tensor, in_output: Tensor) -> None:
        self.in_prompt = in_prompt
        self.in_output = in_output

    def add(self, token_ids: Tensor) -> None:
        """Count an output token per row, int64 ``[C]``, in place."""
        ones = torch.ones_like(token_ids, dtype=self.in_output.dtype)
        self.in_output.scatter_add_(1, token_ids[:, None], ones[:, None])

    def at_positions(self, drafts: Tensor) -> Tensor:
        """Return the output counts at every position of a block.

        Args:
            drafts: int64 ``[C, k]``; position i follows the first i of them.

        Returns:
            float32 ``[C, k + 1, V]``.
        """
        drafted = drafts.shape[1]
        counts = self.in_output[:, None].repeat(1, drafted + 1, 1)
        before = torch.ones(drafted + 1, drafted, dtype=counts.dtype, device=counts.device).tril(-1)
        ids = drafts[:, None].expand(-1, drafted + 1, -1)
        return counts.scatter_add_(-1, ids, before.expand(len(drafts), -1, -1))


def count_tokens(
    processors: LogitsProcessors | None,
    histories: Sequence[tuple[Sequence[int], int]],
    vocab_size: int,
    device: torch.device,
) -> TokenCounts | None:
    """Count the tokens of the rows with penalties; None if there are none.

    Args:
        processors: of the batch.
        histories: per row of the batch its tokens, and how many of the last ones are output.
        vocab_size: V.
        device: of the counts.
    """
    if processors is None or processors.penalties is None:
        return None
    rows = processors.penalties.indices
    in_prompt = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
    in_output = torch.zeros(len(rows), vocab_size, device=device)
    for at, row in enumerate(rows):
        tokens, num_output = histories[row]
        ids = torch.tensor(tokens, dtype=torch.int64, device=device)
        prompt, output = ids[: len(tokens) - num_output], ids[len(tokens) - num_output :]
        in_prompt[at, prompt] = True
        in_output[at].scatter_add_(0, output, torch.ones_like(output, dtype=in_output.dtype))
    return TokenCounts(in_prompt, in_output)


def process_logits(
    logits: Tensor,
    processors: LogitsProcessors | None,
    output_positions: Tensor,
    counts: TokenCounts | None,
    drafts: Tensor,
    masks: TokenMasks | None = None,
) -> Tensor:
    """Apply a batch's processors; returns ``logits`` itself if there are none.

    Args:
        logits: float ``[B, k + 1, V]``; ``logits[:, i]`` follows the i-th draft token. Not
            modified.
        processors: of the B rows.
        output_positions: int64 ``[B]``, index of each row's next output token.
        counts: of the rows with penalties, before the drafts.
        drafts: int64 ``[B, k]``.
        masks: of the rows with a grammar.

    Returns:
        float ``[B, k + 1, V]``, float32 if processed.

    Raises:
        ValueError: ``counts`` are missing.
    """
    if processors is None and masks is None:
        return logits
    scores = logits.to(torch.float32, copy=True)
    if processors is not None:
        _apply(processors, scores, output_positions, counts, drafts)
    if masks is not None:
        masks.apply(scores, logits)
    return scores


def _apply(
    processors: LogitsProcessors,
    scores: Tensor,
    output_positions: Tensor,
    counts: TokenCounts | None,
    drafts: Tensor,
) -> None:
    """Apply processors to float32 ``[B, k + 1, V]`` in place; see :func:`process_logits`."""
    if processors.bias is not None:
        bias = processors.bias
        scores[bias.rows, :, bias.token_ids] += bias.values[:, None]
    if processors.penalties is not None:
        if counts is None:
            raise ValueError("penalties need the counts of the tokens before")
        rows = processors.penalties.rows
        scores[rows] = _apply_penalties(scores[rows], processors.penalties, counts, drafts[rows])
    if processors.min_tokens is not None:
        ends = processors.min_tokens
        steps = torch.arange(scores.shape[1], device=scores.device)
        early = output_positions[ends.rows, None] + steps < ends.until[:, None]
        kept = scores[ends.rows, :, ends.token_ids]
        scores[ends.rows, :, ends.token_ids] = kept.masked_fill(early, -torch.inf)


def _apply_penalties(
    scores: Tensor, penalties: Penalties, counts: TokenCounts, drafts: Tensor
) -> Tensor:
    """Penalise float32 ``[C, k + 1, V]``.

    Repetition as in Keskar et al. 1909.05858 and transformers, over prompt and output; frequency
    and presence as OpenAI defines them, over the output.
    """
    in_output = counts.at_positions(drafts)
    seen = counts.in_prompt[:, None] | (in_output > 0)
    repetition = penalties.repetition[:, None, None]
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    scores = scores - penalties.frequency[:, None, None] * in_output
    return scores - penalties.presence[:, None, None] * (in_output > 0)


class DraftLogitsProcessors:
    """Logits processors of a draft, which grows by one token per step.

    Attributes:
        ended: draft tokens of the rows whose grammar lets them draft no more, by row.
    """

    def __init__(
        self,
        processors: LogitsProcessors | None,
        histories: Sequence[tuple[Sequence[int], int]],
        output_positions: Tensor,
        grammars: Mapping[int, GrammarState],
    ) -> None:
        """Start before the first step.

        Args:
            processors: of the B rows.
            histories: see :func:`count_tokens`.
            output_positions: see :func:`process_logits`.
            grammars: by row, of those that have one.
        """
        self._processors = processors
        self._histories = histories
        self._positions = output_positions
        self._counts: TokenCounts | None = None
        self._started = False
        self._grammars = dict(grammars)
        self._path: dict[int, list[int]] = {row: [] for row in grammars}
        self.ended: dict[int, int] = {}

    def apply(self, logits: Tensor) -> Tensor:
        """Process the logits ``[B, V]`` of the next step, as for verification.

        A row that has ended, or knows no allowed token and so ends here, is without a mask.
        """
        if self._processors is None and not self._grammars:
            return logits
        if not self._started:
            self._started = True
            self._counts = count_tokens(
                self._processors, self._histories, logits.shape[-1], logits.device
            )
        masks = self._token_masks(logits)
        none = self._positions.new_zeros(len(logits), 0)
        parts = (self._processors, self._positions, self._counts, none)
        return process_logits(logits[:, None], *parts, masks)[:, 0]

    def append(self, token_ids: Tensor) -> None:
        """Append a token per row, int64 ``[B]``."""
        if self._processors is not None:
            self._positions = self._positions + 1
            if self._processors.penalties is not None and self._counts is not None:
                self._counts.add(token_ids[self._processors.penalties.rows])
        tokens = token_ids.tolist() if self._grammars else []
        for row, grammar in list(self._grammars.items()):
            self._path[row].append(tokens[row])
            if tokens[row] in grammar.eos_token_ids:
                self._end(row, len(self._path[row]))

    def _token_masks(self, logits: Tensor) -> TokenMasks | None:
        masks = []
        for row, grammar in list(self._grammars.items()):
            try:
                masks.append((row, 0, grammar.mask(self._path[row])))
            except GrammarError:
                self._end(row, len(self._path[row]))
        made = make_token_masks(masks, logits.shape[-1], logits.device)
        if made is None:
            return None
        known = (made.allowed & (logits[made.rows] != -torch.inf)).any(dim=-1)
        for (row, _, _), some in zip(masks, known.tolist(), strict=True):
            if not some:
                self._end(row, len(self._path[row]))
        return TokenMasks(made.rows[known], made.steps[known], made.allowed[known])

    def _end(self, row: int, length: int) -> None:
        del self._grammars[row]
        self.ended[row] = length
