"""Positions behind a draft's rejected tokens, computed in the same forward as their record.

Each rejection has a branch: the text up to it, and then the draft's own tokens instead of the
emitted ones. A row per branch would compute the text once per rejection. Instead the tokens of all
branches follow the record's text in one row, and under the attention mask each sees only the text
before its rejection and its own branch, at the positions that it would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import ReplayRecord


@dataclass(frozen=True, slots=True)
class Packed:
    """Tokens of the branches of one record, in the order of its row.

    Attributes:
        token_ids: int64 ``[M]``, the draft's tokens.
        position_ids: int64 ``[M]``, of each.
        starts: int64 ``[M]``, tokens of the record's text that each sees.
        firsts: int64 ``[M]``, index among the M at which its branch begins.
        sources: int64 ``[M]``, row of the record's ``branch_*`` arrays with its label.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sources: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.token_ids)


def pack(record: ReplayRecord, prompt: int, outputs: int, max_length: int) -> Packed:
    """The branches of a record that is truncated to ``prompt`` and ``outputs`` tokens.

    Args:
        record: with or without branches.
        prompt: last tokens of the prompt that are kept.
        outputs: first emitted positions that are kept.
        max_length: upper bound of positions; others are left out.
    """
    starts, firsts, sources, positions = [], [], [], []
    taken = 0
    for at, rows in record.branches():
        begin = prompt + at
        length = min(rows.stop - rows.start, max_length - begin)
        if at >= outputs or length <= 0:
            continue
        starts.append(np.full(length, begin))
        firsts.append(np.full(length, taken))
        positions.append(np.arange(begin, begin + length))
        sources.append(np.arange(rows.start, rows.start + length))
        taken += length
    kept = _joined(sources)
    tokens = np.zeros(0) if record.branch_token_ids is None else record.branch_token_ids[kept]
    return Packed(
        token_ids=tokens.astype(np.int64),
        position_ids=_joined(positions),
        starts=_joined(starts),
        firsts=_joined(firsts),
        sources=kept,
    )


def layout(
    lengths: Sequence[int], packed: Sequence[Packed], width: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Positions and mask of rows of a record's text, its branches and padding.

    Args:
        lengths: tokens of each record's text.
        packed: branches of each.
        width: T, of a row.

    Returns:
        position ids int64 ``[B, T]``, and the mask, bool ``[B, T, T]``: whether a token (second
        axis) sees another one (third).
    """
    positions = np.tile(np.arange(width), (len(lengths), 1))
    mask = np.tile(np.tri(width, dtype=bool), (len(lengths), 1, 1))
    for row, (text, branches) in enumerate(zip(lengths, packed, strict=True)):
        end = text + len(branches)
        positions[row, text:end] = branches.position_ids
        positions[row, end:] = 0  # padding may be beyond the draft's positions
        columns = np.arange(width)
        seen = columns < branches.starts[:, None]
        own = columns >= text + branches.firsts[:, None]
        mask[row, text:end] &= seen | own
    return positions, mask


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
