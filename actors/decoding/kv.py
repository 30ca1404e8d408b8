"""Key/value rows of a model's running requests, and which request sits in which row."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class KVRows:
    """One row of keys and values per running request, for every layer.

    ``keys[layer]`` and ``values[layer]`` are ``[rows, heads, capacity, head_dim]``. A forward
    over rows 0..B-1 reads views of them, so nothing is copied in the decoding loop.
    """

    def __init__(
        self,
        shapes: list[tuple[int, int]],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """Allocate.

        Args:
            shapes: per layer (key/value heads, head dimension).
            rows: most requests at once.
            capacity: positions per row.
            dtype: of keys and values.
            device: where they live.
        """
        self.rows = rows
        self.capacity = capacity
        self.dtype = dtype
        # Zeros, not empty: a masked position must not hold a NaN (0 x NaN is NaN).
        self.keys = [
            torch.zeros(rows, heads, capacity, dim, dtype=dtype, device=device)
            for heads, dim in shapes
        ]
        self.values = [torch.zeros_like(layer) for layer in self.keys]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first ``length`` positions of a row over another."""
        for layer in (*self.keys, *self.values):
            layer[destination, :, :length] = layer[source, :, :length]

    def write(
        self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Store new keys and values.

        Args:
            layer: layer index.
            rows: int64 ``[B, 1]``.
            positions: int64 ``[B, T]``.
            key: ``[B, heads, T, head_dim]``.
            value: like ``key``.
        """
        self.keys[layer][rows, :, positions] = key.transpose(1, 2)
        self.values[layer][rows, :, positions] = value.transpose(1, 2)


def kv_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype a model's keys and values are kept.

    CPUs attend in float32 several times faster than in bfloat16 (measured: 4 times for one token
    of 8 rows), and lose nothing: what is stored are the model's own values, widened.
    """
    return torch.float32 if device.type == "cpu" else dtype


class RowTable:
    """Dense assignment of requests to rows: n requests sit in rows 0..n-1.

    Releasing a row moves the last request into the hole, so that a batch of all of them is
    always a contiguous view.
    """

    def __init__(self, rows: int) -> None:
        self.limit = rows
        self._order: list[Hashable] = []
        self._row_of: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: Hashable) -> bool:
        return request in self._row_of

    @property
    def full(self) -> bool:
        """True where no further request fits."""
        return len(self._order) >= self.limit

    def row(self, request: Hashable) -> int:
        """The row of a request; KeyError if it has none."""
        return self._row_of[request]

    def add(self, request: Hashable) -> int:
        """Give a request the next row; RuntimeError where none is free or it has one."""
        if self.full:
            raise RuntimeError(f"all {self.limit} rows are taken")
        if request in self._row_of:
            raise RuntimeError(f"request {request!r} already has a row")
        self._row_of[request] = len(self._order)
        self._order.append(request)
        return len(self._order) - 1

    def release(self, request: Hashable) -> tuple[Hashable, int, int] | None:
        """Free a request's row.

        Returns:
            (request that moves, its old row, its new row), or None where nothing moves.
        """
        hole = self._row_of.pop(request)
        last = self._order.pop()
        if last == request:
            return None
        source = len(self._order)
        self._order[hole] = last
        self._row_of[last] = hole
        return last, source, hole
