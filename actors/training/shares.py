"""A micro-batch in parts, one per rank, whose summed gradients are those of the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.actors.training.batches import Batch
from paceline.actors.training.objective import position_weights
from paceline.actors.training.objective_settings import ObjectiveSettings

_PER_RECORD = ("input_ids", "mask", "position_ids")  # of a batch; all else is per position


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of a micro-batch.

    Attributes:
        batch: the rank's records.
        weights: float32 ``[N]``, what each of its positions counts in the whole's loss; all 0 in
            a share that only keeps a rank without a record in step.
        places: int64, each record's place in the whole; none in such a share.
        total_records: of the whole.
        total_positions: of the whole.
    """

    batch: Batch
    weights: Tensor
    places: Tensor
    total_records: int
    total_positions: int


def the_whole(batch: Batch, settings: ObjectiveSettings) -> Share:
    """A micro-batch as the only share.

    Args:
        batch: at least one record.
        settings: weigh its positions.
    """
    weights = position_weights(batch, settings)
    places = torch.arange(batch.num_records)
    return Share(batch, weights, places, batch.num_records, batch.num_positions)


def split(whole: Share, ranks: int) -> list[Share]:
    """Deal the records out like cards; a rank that gets none takes the first, with no weight.

    Args:
        whole: see :func:`the_whole`.
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
