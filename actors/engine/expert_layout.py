"""Layout of a batch whose rows are computed by different experts of a stack."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


class ExpertLayout:
    """B rows laid out as E' experts with R rows each, for one batched product.

    Experts with fewer than R rows repeat one of theirs; the results of padding are dropped before
    they are stored. A batch of a single expert needs no index.

    Attributes:
        expert_of_row: index into the stack, per row.
        device: of the index tensors.
        experts: the E' indices into the stack, ascending.
        single: the expert if there is only one, else None.
        as_slice: the experts as a slice if they are consecutive, else None.
        rows_by_expert: the rows of each of ``experts``.
        rows_per_expert: R.
        result_index: int64 ``[B]``, position of each row's result among the ``E' * R``; empty for
            a single expert.
    """

    def __init__(self, expert_of_row: Sequence[int], device: torch.device | str) -> None:
        self.expert_of_row, self.device = tuple(expert_of_row), torch.device(device)
        self.experts = sorted(set(expert_of_row))
        first, last = self.experts[0], self.experts[-1]
        self.single = first if first == last else None
        self.as_slice = slice(first, last + 1) if last - first + 1 == len(self.experts) else None
        self.rows_per_expert = len(expert_of_row)
        if self.single is not None:
            self.rows_by_expert = [list(range(self.rows_per_expert))]
            self.result_index = torch.empty(0, dtype=torch.int64, device=device)
            return
        self.rows_by_expert = [
            [i for i, own in enumerate(expert_of_row) if own == expert] for expert in self.experts
        ]
        self.rows_per_expert = max(len(rows) for rows in self.rows_by_expert)
        gather: list[int] = []
        result = [0] * len(expert_of_row)
        for rows in self.rows_by_expert:
            for i, row in enumerate(rows):
                result[row] = len(gather) + i
            gather += rows + rows[:1] * (self.rows_per_expert - len(rows))
        self._gather_index = torch.tensor(gather, device=device)
        self.result_index = torch.tensor(result, device=device)
        self._experts = torch.tensor(self.experts, device=device)

    def with_result_index(self, result_index: Tensor) -> ExpertLayout:
        """Return a copy with another ``result_index``, see :func:`dense_layout`."""
        other = copy.copy(self)
        other.result_index = result_index
        return other

    def resized(self, rows: int) -> ExpertLayout:
        """Return the layout of a single expert for another number of rows."""
        if rows == self.rows_per_expert:
            return self
        return ExpertLayout([self.experts[0]] * rows, self.device)

    def select(self, stacked: Tensor) -> Tensor:
        """Select the layout's experts, ``[E, ...]`` to ``[E', ...]``, as a view if possible."""
        return stacked[self._experts] if self.as_slice is None else stacked[self.as_slice]

    def to_experts(self, x: Tensor) -> Tensor:
        """Arrange rows by expert, ``[B, T, ...]`` to ``[E', R*T, ...]``."""
        if self.single is None:
            x = x[self._gather_index]
        return x.reshape(len(self.experts), self.rows_per_expert * x.shape[1], *x.shape[2:])

    def to_rows(self, x: Tensor) -> Tensor:
        """Undo :meth:`to_experts`, ``[E', R*T, ...]`` to ``[B, T, ...]``."""
        steps = x.shape[1] // self.rows_per_expert
        x = x.reshape(len(self.experts) * self.rows_per_expert, steps, *x.shape[2:])
        return x if self.single is not None else x[self.result_index]

    def last_tokens(self, x: Tensor, keep: int) -> Tensor:
        """Return the last ``keep`` of T tokens, ``[E', R*T, H]`` to contiguous ``[E', R*keep, H]``.

        0 keeps all.
        """
        steps = x.shape[1] // self.rows_per_expert
        if keep in (0, steps):
            return x
        tail = x.view(x.shape[0], self.rows_per_expert, steps, -1)[:, :, -keep:]
        return tail.reshape(x.shape[0], self.rows_per_expert * keep, -1).contiguous()

    def embedding_ids(self, token_ids: Tensor, vocab: int) -> Tensor:
        """Return indices into the concatenated embeddings, ``[B, T]`` to ``[E', R*T]``."""
        if self.single is not None:
            return token_ids.reshape(1, -1) + self.single * vocab
        return self.to_experts(token_ids) + (self._experts * vocab)[:, None]


@lru_cache(maxsize=256)
def dense_layout(expert_of_row: tuple[int, ...], count: int, device: torch.device) -> ExpertLayout:
    """Return the layout in which every expert computes every row.

    More arithmetic than :class:`ExpertLayout` needs, but only ``result_index`` depends on the
    experts of the rows, so one CUDA graph serves all batches of a size.

    Args:
        expert_of_row: index into the stack, per row.
        count: experts of the stack, E.
        device: of the index tensors.
    """
    rows = len(expert_of_row)
    layout = ExpertLayout([expert for expert in range(count) for _ in range(rows)], device)
    layout.expert_of_row = expert_of_row
    layout._gather_index = torch.arange(rows, device=device).repeat(count)
    result = [expert * rows + row for row, expert in enumerate(expert_of_row)]
    return layout.with_result_index(torch.tensor(result, device=device))
