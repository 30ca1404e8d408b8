"""Positions behind a draft's rejected tokens, computed in the same forward as their record.

Each rejection leaves a branch: the text up to it, and then the draft's own tokens instead of the
emitted ones. A row of its own per branch would compute the text once for every rejection. Instead
the tokens of all branches stand behind the record's text in one row, and an attention mask has
each see the text before its rejection and its own branch alone, at the positions that they would
have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.actors.replay.record import ReplayRecord


@dataclass(frozen=True, slots=True)
class Packed:
    """What the branches of one record add to its row, in the order of their tokens.

    Attributes:
        token_ids: int64 ``[M]``, the draft's tokens.
        position_ids: int64 ``[M]``, of each.
        starts: int64 ``[M]``, tokens of the record's text that a token may see.
        firsts: int64 ``[M]``, the place among the M where a token's branch begins.
        sources: int64 ``[M]``, the row of the record's ``branch_*`` arrays with the label of
            what follows a token.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    starts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sources: NDArray[np.int64]

    def __len__(self) -> int:
        """M."""
        return len(self.token_ids)


def pack(record: ReplayRecord, prompt: int, outputs: int, max_length: int) -> Packed:
    """The branches of a record that was cut to ``prompt`` and ``outputs`` tokens.

    Args:
        record: with or without branches.
        prompt: tokens of the prompt that are left, its last ones.
        outputs: emitted positions that are left, the first ones.
        max_length: positions are below it; what is further out is left out.
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
    """Positions and mask of rows that hold a record's text, then its branches, then padding.

    Args:
        lengths: tokens of each record's text.
        packed: its branches.
        width: T, of a row.

    Returns:
        position ids int64 ``[B, T]``, and bool ``[B, T, T]``, whether a token (second axis) sees
        another one (third).
    """
    positions = np.tile(np.arange(width), (len(lengths), 1))
    mask = np.tile(np.tri(width, dtype=bool), (len(lengths), 1, 1))
    for row, (text, branches) in enumerate(zip(lengths, packed, strict=True)):
        end = text + len(branches)
        positions[row, text:end] = branches.position_ids
        positions[row, end:] = 0  # padding lies beyond what the draft has positions for
        columns = np.arange(width)
        seen = columns < branches.starts[:, None]
        own = columns >= text + branches.firsts[:, None]
        mask[row, text:end] &= seen | own
    return positions, mask


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
