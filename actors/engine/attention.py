"""Attention over the paged KV cache, registered in transformers' attention interface.

The model computes queries, keys and values of the new tokens; :func:`paceline_attention` writes
keys and values into the cache and attends over its blocks, so that one forward serves rows
of any lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from paceline.actors.engine import paged_attention as paged
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.native.kernels import kernels_for

ATTENTION_NAME = "paceline"

# Arguments that change the result and are not supported: relative positions, sparse reads.
_UNSUPPORTED = ("position_bias", "indices", "block_indices", "sinks")


@dataclass(slots=True)
class StepContext:
    """Inputs of one forward other than its tokens.

    Tensors are on the models' device; their shapes follow from the batch, its tokens and
    ``columns`` alone.

    Attributes:
        kv: the cache.
        rows: int64 ``[B]``, row of every sequence.
        positions: int64 ``[B, T]``, position of every token.
        columns: of the block tables, those that are read.
        unclamped: ``positions`` before padding was clamped to the capacity.
        windows: of the layers that have attended in this step, None for no window.
        angles: of the positions, cached from a model's rotary tables.
    """

    kv: KVCache
    rows: Tensor
    positions: Tensor
    columns: int
    unclamped: Tensor
    windows: set[int | None] = field(default_factory=set)
    angles: tuple[Tensor, Tensor] | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _unwritten: Tensor | None = None
    _block_table: Tensor | None = None
    _slots: Tensor | None = None

    @classmethod
    def at(cls, kv: KVCache, rows: Tensor, positions: Tensor, span: int) -> StepContext:
        """Make the context of tokens at these positions, clamped to the capacity.

        Args:
            kv: the cache.
            rows: int64 ``[B]``.
            positions: int64 ``[B, T]``.
            span: 1 + the largest position that any row reads, padding included.
        """
        columns = min(-(-span // kv.block_size), kv.block_tables.shape[1])
        # Padding behind a short row may exceed the capacity. It goes to the last position, which
        # is not read before the request has ended.
        return cls(kv, rows, positions.clamp(0, kv.capacity - 1), columns, positions)

    @property
    def span(self) -> int:
        """Number of positions that are read, in whole blocks."""
        return self.columns * self.kv.block_size

    @property
    def lengths(self) -> Tensor:
        """int32 ``[B]``, 1 + the position of the last token, padding within the table included."""
        return (self.unclamped[:, -1] + 1).clamp(max=self.span).int()

    @property
    def block_table(self) -> Tensor:
        """int32 ``[B, columns]``, the blocks of every sequence."""
        if self._block_table is None:
            self._block_table = self.kv.block_tables[self.rows, : self.columns]
        return self._block_table

    @property
    def slots(self) -> Tensor:
        """int64 ``[B, T]``, index of every token's position over all blocks."""
        if self._slots is None:
            size = self.kv.block_size
            column = (self.positions // size).clamp(max=self.columns - 1)
            self._slots = self.block_table.long().gather(1, column) * size + self.positions % size
        return self._slots

    @property
    def unwritten(self) -> Tensor:
        """bool ``[B, span, 1, 1]``, positions behind every sequence's last token."""
        if self._unwritten is None:
            reads = torch.arange(self.span, device=self.positions.device)
            self._unwritten = (reads >= self.lengths[:, None])[..., None, None]
        return self._unwritten

    def mask(self, window: int | None) -> Tensor:
        """Return ``[B, 1, T, span]`` in the attention dtype: 0 if visible to a token, else -inf.

        Not a bool, which every layer would convert again.
        """
        if window not in self._masks:
            reads = torch.arange(self.span, device=self.positions.device)
            at = self.positions[:, None, :, None]
            allowed = reads <= at
            if window is not None:
                allowed &= reads > at - window
            dtype = self.kv.attention_dtype
            closed = torch.full((), -torch.inf, dtype=dtype, device=reads.device)
            self._masks[window] = torch.where(allowed, torch.zeros_like(closed), closed)
        return self._masks[window]

    def subset(self, index: Tensor) -> StepContext:
        """Return the context of some of the sequences; ``index`` is int64 ``[R]``."""
        rows, positions, unclamped = self.rows[index], self.positions[index], self.unclamped[index]
        return StepContext(self.kv, rows, positions, self.columns, unclamped)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new tokens' keys and values, ``[B, kv_heads, T, head_dim]`` each."""
        slots = self.slots.flatten()
        for stored, new in ((self.kv.keys[layer], key), (self.kv.values[layer], value)):
            stored.view(-1, *stored.shape[2:])[slots] = new.transpose(1, 2).flatten(0, 1)

    def write_hidden(self, hidden: Tensor) -> None:
        """Store the new tokens' hidden states, ``[B, T, H]``."""
        assert self.kv.hidden is not None
        kernels = kernels_for(hidden.device, hidden.dtype)
        if kernels is not None:
            at = self.kv.block_tables, self.rows, self.positions
            kernels.write_states(self.kv.hidden, *at, hidden)
            return
        self.kv.hidden.view(-1, hidden.shape[-1])[self.slots.flatten()] = hidden.flatten(0, 1)

    def read(self, stored: Tensor) -> Tensor:
        """Return a copy of what the sequences read of a layer, ``[B, kv_heads, span, head_dim]``.

        One copy gathers the blocks, a second converts to the attention dtype if needed. Positions
        behind a sequence's last token are zeroed, since an earlier owner of the block may have
        left a NaN there, and a mask does not help (0 x NaN is NaN).
        """
        gathered = stored.index_select(0, self.block_table.flatten())
        gathered = gathered.view(len(self.rows), self.span, *stored.shape[2:])
        gathered.masked_fill_(self.unwritten, 0)
        return gathered.transpose(1, 2).to(self.kv.attention_dtype)


def paceline_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 (transformers' signature)
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    paceline_step: StepContext | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend over the KV cache, with the signature of transformers' attention functions.

    Args:
        module: the attention module; its ``layer_idx`` selects the layer of the cache.
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``.
        value: like ``key``.
        attention_mask: unused; the context has its own.
        scaling: softmax scale.
        dropout: unused.
        sliding_window: of this layer, None for none.
        softcap: bound on the scores, by tanh; None for no bound.
        s_aux: ``[heads]``, scores of attention sinks; None for none.
        paceline_step: context of the forward, passed through all modules.
        more: further arguments of models, most of them redundant.

    Returns:
        ``[B, T, heads, head_dim]`` and None (no attention weights).

    Raises:
        ValueError: the model's attention has a part that is not supported.
    """
    unsupported = [name for name in _UNSUPPORTED if more.get(name) is not None]
    if unsupported:
        raise ValueError(f"{type(module).__name__} needs {', '.join(unsupported)} in its attention")
    if paceline_step is None:
        raise ValueError("its layers do not hand a forward's arguments on to their attention")
    layer: int = module.layer_idx  # type: ignore[assignment]
    arguments = (paceline_step, layer, query, key, value, scaling, sliding_window)
    return attend(*arguments, softcap, s_aux), None


def attend(
    step: StepContext,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Store the new keys and values and attend over the rows' blocks.

    Blocks are gathered into one tensor first, unless torch's paged attention can read them in
    place (GPUs, half precision, no bound on the scores, no sinks).

    Args:
        step: the forward's context.
        layer: layer index.
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``.
        value: like ``key``.
        scaling: softmax scale.
        window: sliding window of the layer, None for none.
        softcap: bound on the scores, by tanh; None for no bound.
        sinks: ``[heads]``, scores of attention sinks; None for none.

    Returns:
        ``[B, T, heads, head_dim]`` in the queries' dtype.
    """
    dtype, own = query.dtype, step.kv.attention_dtype
    step.windows.add(window)
    step.write(layer, key.to(step.kv.dtype), value.to(step.kv.dtype))
    stored = step.kv.keys[layer], step.kv.values[layer]
    if softcap is None and sinks is None and paged.is_supported(query, *stored):
        tokens = query.transpose(1, 2)
        return paged.attend(tokens, stored, step.block_table, step.lengths, scaling, window)
    query, keys, values = query.to(own), step.read(stored[0]), step.read(stored[1])
    if softcap is None and sinks is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=step.mask(window),
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = _attend_eager(query * scale, keys, values, step.mask(window), softcap, sinks)
    return output.transpose(1, 2).to(dtype)


def _attend_eager(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with a bound on the scores or sinks, which torch's own lacks.

    Args:
        query: ``[B, heads, T, head_dim]``, scaled.
        keys: ``[B, kv_heads, span, head_dim]``.
        values: like ``keys``.
        mask: ``[B, 1, T, span]``, added to the scores.
        softcap: bound on the scores, by tanh; None for no bound.
        sinks: ``[heads]``, scores of attention sinks; None for none.

    Returns:
        ``[B, heads, T, head_dim]``.
    """
    (batch, kv_heads, span), (_, heads, count, dim) = keys.shape[:3], query.shape
    grouped = query.reshape(batch, kv_heads, -1, count, dim)
    scores = (grouped @ keys[:, :, None].transpose(-1, -2)).flatten(1, 2).float()
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, column.expand(*scores.shape[:3], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., :span].to(values.dtype)
    weights = weights.reshape(batch, kv_heads, -1, count, span)
    return (weights @ values[:, :, None]).reshape(batch, heads, count, dim)


AttentionInterface.register(ATTENTION_NAME, paceline_attention)
