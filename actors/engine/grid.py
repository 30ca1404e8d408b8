"""Which expert of a stack runs which row of a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class Grid:
    """B rows laid out as E' experts times R rows each, so that one batched product does all.

    Experts with fewer rows than R repeat one of theirs; what padding computes is dropped before
    it is stored. A batch of a single expert needs no layout at all.

    Attributes:
        experts: indices into the stack, ascending, E' of them.
        single: the expert where there is only one, else None.
        run: the experts as a slice where they follow each other, else None.
        members: the rows of each of these experts.
        expert_of_row: index into the stack, of every row.
        device: of the index tensors.
        place: int64 ``[B]``, where each row's result is among all; empty for a single expert.
    """

    def __init__(self, expert_of_row: Sequence[int], device: torch.device | str) -> None:
        """Lay out.

        Args:
            expert_of_row: index into the stack, of every one of B rows.
            device: of the index tensors.
        """
        self.expert_of_row, self.device = tuple(expert_of_row), torch.device(device)
        self.experts = sorted(set(expert_of_row))
        first, last = self.experts[0], self.experts[-1]
        self.single = first if first == last else None
        self.run = slice(first, last + 1) if last - first + 1 == len(self.experts) else None
        self._width = len(expert_of_row)
        if self.single is not None:
            self.members = [list(range(self._width))]
            self.place = torch.empty(0, dtype=torch.int64, device=device)
            return
        self.members = [
            [i for i, own in enumerate(expert_of_row) if own == expert] for expert in self.experts
        ]
        self._width = max(len(rows) for rows in self.members)
        gather: list[int] = []
        place = [0] * len(expert_of_row)
        for rows in self.members:
            for i, row in enumerate(rows):
                place[row] = len(gather) + i
            gather += rows + rows[:1] * (self._width - len(rows))
        self._gather = torch.tensor(gather, device=device)
        self.place = torch.tensor(place, device=device)
        self._chosen = torch.tensor(self.experts, device=device)

    def placed(self, place: Tensor) -> Grid:
        """The same layout with other rows' places, see :func:`whole_grid`."""
        other = copy.copy(self)
        other.place = place
        return other

    def of_rows(self, rows: int) -> Grid:
        """A single expert's, for so many rows."""
        if rows == self._width:
            return self
        return Grid([self.experts[0]] * rows, self.device)

    def select(self, stacked: Tensor) -> Tensor:
        """The grid's experts of a stack: ``[E, ...]`` to ``[E', ...]``, a view where possible."""
        return stacked[self._chosen] if self.run is None else stacked[self.run]

    def from_rows(self, x: Tensor) -> Tensor:
        """``[B, T, ...]`` to ``[E', R*T, ...]``."""
        if self.single is None:
            x = x[self._gather]
        return x.reshape(len(self.experts), self._width * x.shape[1], *x.shape[2:])

    def tokens(self, positions: Tensor) -> int:
        """How many tokens of ``[B, T]`` every expert computes, R*T."""
        return self._width * positions.shape[1]

    def to_rows(self, x: Tensor) -> Tensor:
        """``[E', R*T, ...]`` to ``[B, T, ...]``."""
        steps = x.shape[1] // self._width
        x = x.reshape(len(self.experts) * self._width, steps, *x.shape[2:])
        return x if self.single is not None else x[self.place]

    def last(self, x: Tensor, keep: int) -> Tensor:
        """The last ``keep`` of T tokens, ``[E', R*T, H]`` to contiguous ``[E', R*keep, H]``.

        0 keeps all.
        """
        steps = x.shape[1] // self._width
        if keep in (0, steps):
            return x
        tail = x.view(x.shape[0], self._width, steps, -1)[:, :, -keep:]
        return tail.reshape(x.shape[0], self._width * keep, -1).contiguous()

    def offset(self, token_ids: Tensor, vocab: int) -> Tensor:
        """Indices into the experts' joined embeddings: ``[B, T]`` tokens to ``[E', R*T]``."""
        if self.single is not None:
            return token_ids.reshape(1, -1) + self.single * vocab
        return self.from_rows(token_ids) + (self._chosen * vocab)[:, None]


@lru_cache(maxsize=256)
def whole_grid(expert_of_row: tuple[int, ...], count: int, device: torch.device) -> Grid:
    """Every expert of a stack computes every row, and each row takes its own expert's result.

    More arithmetic than :class:`Grid` needs, but all that depends on whose the rows are is
    ``place``: what is recorded for one batch serves every other of its size.

    Args:
        expert_of_row: index into the stack, of every one of B rows.
        count: experts of the stack, E.
        device: of the index tensors.
    """
    rows = len(expert_of_row)
    grid = Grid([expert for expert in range(count) for _ in range(rows)], device)
    grid.expert_of_row = expert_of_row
    grid._gather = torch.arange(rows, device=device).repeat(count)
    places = [expert * rows + row for row, expert in enumerate(expert_of_row)]
    return grid.placed(torch.tensor(places, device=device))
