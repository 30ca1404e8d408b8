"""Sampling of draft tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.actors.engine.gumbel import gumbel_max, stream_key
from paceline.actors.engine.logits_processors import DraftLogitsProcessors
from paceline.actors.engine.sampling import SamplingBatch, draw, keep_mask
from paceline.actors.engine.top_tokens import top_logits
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal


def draft_support(logits: Tensor, batch: SamplingBatch, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """The truncated distribution that a draft samples from.

    Args:
        logits: float ``[B, V]``, processed.
        batch: sampling parameters of the B rows.
        size: S, most tokens of the distribution.

    Returns:
        ids int64 ``[B, S]`` in descending order of probability, probabilities float32 ``[B, S]``
        that sum to 1, and those of the same tokens at T = 1 without truncation, nan in rows that
        have no distribution. A greedy row takes the first token, whatever its probability.
    """
    top, ids, total = top_logits(logits, size)
    probs = torch.softmax((top - top[:, :1]) / batch.temperature[:, None], dim=-1)
    if batch.any_filter:
        probs = probs * keep_mask(probs, batch.top_p, batch.top_k, batch.min_p)
        probs = probs / probs.sum(-1, keepdim=True)
    sure = (top - total[:, None]).exp()
    # Beside an infinite logit the others' probabilities are 0, as if there were a distribution.
    return ids, probs, sure.where(top[:, :1].isfinite(), math.nan)


def pick_tokens(
    ids: Tensor,
    probs: Tensor,
    batch: SamplingBatch,
    output_positions: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """Column of the token that each row drafts, int64 ``[B]``.

    Greedy rows take the first; seeded rows add the same Gumbel noise as rejection sampling;
    unseeded rows draw.
    """
    columns = torch.zeros(ids.shape[0], dtype=torch.int64, device=ids.device)
    if batch.any_unseeded:
        if batch.all_unseeded:
            return draw(probs, generator)
        rows = batch.unseeded_rows
        columns[rows] = draw(probs[rows], generator)
    if batch.any_seeded:
        rows = batch.seeded_rows
        keys = stream_key(batch.seeds[rows], output_positions[rows], batch.choices[rows])
        columns[rows] = gumbel_max(probs[rows], keys, ids[rows])
    return columns


def takes_most_probable(batch: SamplingBatch, rows: Sequence[DraftRow], support: int) -> bool:
    """Whether every row drafts the most probable token of its unprocessed logits."""
    unprocessed = batch.logits_processors is None and all(row.grammar is None for row in rows)
    return unprocessed and (batch.all_greedy or support == 1)


def draw_drafts(
    forward: Callable[[Tensor | None], Tensor],
    steps: int,
    rows: Sequence[DraftRow],
    batch: SamplingBatch,
    support: int,
    generator: torch.Generator,
) -> Proposal:
    """Draft k tokens for B rows with their sampling parameters, one after the other.

    Args:
        forward: one call per step: int64 ``[B, 1]`` drafted before it (None at first) to float
            ``[B, 1, V]``.
        steps: k.
        rows: B.
        batch: their sampling parameters.
        support: S, most tokens of a draft distribution.
        generator: randomness of the unseeded rows.
    """
    device = batch.temperature.device
    outputs = device_tensor([row.num_output for row in rows], device)
    histories = [(row.tokens, row.num_output) for row in rows]
    grammars = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
    processors = DraftLogitsProcessors(batch.logits_processors, histories, outputs, grammars)
    tokens: Tensor | None = None
    drafted: list[tuple[Tensor, ...]] = []
    for step in range(steps):
        logits = processors.apply(forward(tokens)[:, -1])
        ids, probs, sure = draft_support(logits, batch, support)
        column = pick_tokens(ids, probs, batch, outputs + step, generator)[:, None]
        tokens = ids.gather(1, column)
        processors.append(tokens[:, 0])
        drafted.append((tokens[:, 0], sure.gather(1, column)[:, 0], ids, probs))
    ids, sure, support_ids, support_probs = (
        torch.stack(parts, dim=1) for parts in zip(*drafted, strict=True)
    )
    counts = [
        min(row.num_draft_tokens, processors.ended.get(i, steps)) for i, row in enumerate(rows)
    ]
    return Proposal(ids, device_tensor(counts, device), sure, support_ids, support_probs)
