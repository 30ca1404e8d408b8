"""Shares of an optimizer step: micro-batches, and each rank's part of them.

The gradients of all shares add up to those of the whole step, however it is split; where tokens of
a vocabulary are drawn, in expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.actors.training.batches import Batch
from paceline.actors.training.losses import position_weights
from paceline.actors.training.settings import ObjectiveSettings

# Parts of a batch with one entry per record; all others have one per position.
_PER_RECORD = ("input_ids", "mask", "position_ids", "hidden")


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch, or one rank's part of it.

    Attributes:
        batch: the records.
        weights: float32 ``[N]``, of each position in the loss; all 0 in the share of a rank without
            a record, which only keeps it in step.
        places: int64, index of each record in the micro-batch; empty in such a share.
        total_records: of the micro-batch.
        total_positions: of the micro-batch.
    """

    batch: Batch
    weights: Tensor
    places: Tensor
    total_records: int
    total_positions: int


def make_shares(batches: Sequence[Batch], settings: ObjectiveSettings) -> list[Share]:
    """The micro-batches of one optimizer step, their positions weighed together.

    The optimizer takes the mean of its micro-steps, so the weights are times their number.

    Args:
        batches: at least one record each.
        settings: of the positions' weights.
    """
    whole = position_weights(batches, settings) * len(batches)
    parts = torch.split(whole, [batch.num_positions for batch in batches])
    return [
        Share(batch, weights, torch.arange(batch.num_records), batch.num_records, len(weights))
        for batch, weights in zip(batches, parts, strict=True)
    ]


def split_share(whole: Share, ranks: int) -> list[Share]:
    """Split the records round-robin; a rank without any takes the first one, with weight 0.

    Args:
        whole: a micro-batch of :func:`make_shares`.
        ranks: number of shares.
    """
    batch, shares = whole.batch, []
    for rank in range(ranks):
        places = torch.arange(rank, batch.num_records, ranks) if rank < batch.num_records else None
        records = torch.zeros(1, dtype=torch.int64) if places is None else places
        mine = torch.isin(batch.rows, records)
        own: dict[str, Any] = {name: _part(batch, name, records, mine) for name in Batch.__slots__}
        own["rows"] = torch.searchsorted(records, batch.rows[mine])
        weights = whole.weights[mine]
        if places is None:
            places, weights = records[:0], torch.zeros_like(weights)
        shares.append(Share(Batch(**own), weights, places, batch.num_records, batch.num_positions))
    return shares


def _part(batch: Batch, name: str, records: Tensor, mine: Tensor) -> Tensor | None:
    whole: Tensor | None = getattr(batch, name)
    if whole is None:
        return None
    return whole[records if name in _PER_RECORD else mine]
