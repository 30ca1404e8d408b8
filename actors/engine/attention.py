"""The attention function that transformers' models call when the engine runs them.

The model computes queries, keys and values of the new tokens; this writes the keys and
values into the engine's blocks and attends over them, so that one forward serves a ragged
batch. It is registered under :data:`ATTENTION_NAME` in transformers' attention interface.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from paceline.actors.engine import paged_attention as paged
from paceline.actors.engine.kv_cache import KVCache

ATTENTION_NAME = "paceline"

# Arguments that change the result and that are not computed here: relative positions, sparse reads.
_LACKING = ("position_bias", "indices", "block_indices", "sinks")


@dataclass(slots=True)
class StepContext:
    """What one forward needs beside the tokens.

    Tensors live on the models' device, and their shapes follow from the batch, its tokens and
    ``columns`` alone.

    Attributes:
        kv: where keys and values are kept.
        rows: int64 ``[B]``, row of every sequence.
        positions: int64 ``[B, T]``, position of every token.
        columns: of the rows' tables, those that are read.
        asked: the positions before padding beyond the capacity was brought inside.
        windows: of the layers that have attended in this step, None for no window.
        angles: what a model's rotary tables hold for the positions, once it has looked.
    """

    kv: KVCache
    rows: Tensor
    positions: Tensor
    columns: int
    asked: Tensor
    windows: set[int | None] = field(default_factory=set)
    angles: tuple[Tensor, Tensor] | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _unwritten: Tensor | None = None
    _table: Tensor | None = None
    _slots: Tensor | None = None

    @classmethod
    def at(cls, kv: KVCache, rows: Tensor, positions: Tensor, span: int) -> StepContext:
        """The step of tokens at these positions, padding beyond the capacity brought inside.

        Args:
            kv: where keys and values are kept.
            rows: int64 ``[B]``.
            positions: int64 ``[B, T]``.
            span: 1 + the largest position that any row reads, padding included.
        """
        columns = min(-(-span // kv.block_size), kv.block_tables.shape[1])
        # Padding behind a short row may overhang the context. Nobody reads its last position
        # before the request has ended, so that is where the padding goes.
        return cls(kv, rows, positions.clamp(0, kv.capacity - 1), columns, positions)

    @property
    def span(self) -> int:
        """Positions 0..span-1 are read, whole blocks."""
        return self.columns * self.kv.block_size

    @property
    def lengths(self) -> Tensor:
        """int32 ``[B]``: 1 + the position of the last token, padding within the table included."""
        return (self.asked[:, -1] + 1).clamp(max=self.span).int()

    @property
    def table(self) -> Tensor:
        """int32 ``[B, columns]``: the blocks of every sequence."""
        if self._table is None:
            self._table = self.kv.block_tables[self.rows, : self.columns]
        return self._table

    @property
    def slots(self) -> Tensor:
        """int64 ``[B, T]``: where every token is, counted in positions over all blocks."""
        if self._slots is None:
            size = self.kv.block_size
            column = (self.positions // size).clamp(max=self.columns - 1)
            self._slots = self.table.long().gather(1, column) * size + self.positions % size
        return self._slots

    @property
    def unwritten(self) -> Tensor:
        """bool ``[B, span, 1, 1]``: positions behind every sequence's last token."""
        if self._unwritten is None:
            reads = torch.arange(self.span, device=self.positions.device)
            self._unwritten = (reads >= self.lengths[:, None])[..., None, None]
        return self._unwritten

    def mask(self, window: int | None) -> Tensor:
        """``[B, 1, T, span]`` in the attended dtype: 0 where a token may look, else -inf.

        Causal, own row only. Not a bool: every layer would turn it into this again.
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
        """The same for some of the sequences; ``index`` is int64 ``[R]``."""
        rows, positions, asked = self.rows[index], self.positions[index], self.asked[index]
        return StepContext(self.kv, rows, positions, self.columns, asked)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store the new tokens' keys and values, ``[B, kv_heads, T, head_dim]`` each."""
        slots = self.slots.flatten()
        for stored, new in ((self.kv.keys[layer], key), (self.kv.values[layer], value)):
            stored.view(-1, *stored.shape[2:])[slots] = new.transpose(1, 2).flatten(0, 1)

    def read(self, stored: Tensor) -> Tensor:
        """What the sequences read of a layer, ``[B, kv_heads, span, head_dim]``: a copy.

        One copy gathers the blocks; where the stored dtype is not the attended one, a second
        widens them. Positions behind a sequence's last token are zeros: an earlier owner of the
        block may have left a NaN there, and a mask does not help, 0 x NaN is NaN.
        """
        gathered = stored.index_select(0, self.table.flatten())
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
    """Attention over the engine's rows; shapes as transformers' own functions have them.

    Args:
        module: the attention module; its ``layer_idx`` picks the rows' layer.
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``.
        value: like ``key``.
        attention_mask: unused; the context knows what is visible.
        scaling: softmax scale.
        dropout: unused; the engine only infers.
        sliding_window: how far back this layer looks, None for all.
        softcap: bound on the scores, by tanh; None for no bound.
        s_aux: ``[heads]``, scores of sinks that nothing is read from; None for none.
        paceline_step: the forward's context; it comes through all modules.
        more: what else models pass; most of it says nothing new.

    Returns:
        ``[B, T, heads, head_dim]`` and None (no attention weights).

    Raises:
        ValueError: for a model whose attention has a part that this one lacks.
    """
    lacking = [name for name in _LACKING if more.get(name) is not None]
    if lacking:
        raise ValueError(f"{type(module).__name__} needs {', '.join(lacking)} in its attention")
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

    The blocks are gathered into one tensor first (a copy), except where torch's paged attention
    can read them in place (GPUs, half precision, no bound on the scores, no sinks).

    Args:
        step: the forward's context.
        layer: layer index.
        query: ``[B, heads, T, head_dim]``.
        key: ``[B, kv_heads, T, head_dim]``.
        value: like ``key``.
        scaling: softmax scale.
        window: how far back the layer looks, None for all.
        softcap: bound on the scores, by tanh; None for no bound.
        sinks: ``[heads]``, scores of sinks that nothing is read from; None for none.

    Returns:
        ``[B, T, heads, head_dim]`` in the queries' dtype.
    """
    dtype, own = query.dtype, step.kv.attention_dtype
    step.windows.add(window)
    step.write(layer, key.to(step.kv.dtype), value.to(step.kv.dtype))
    stored = step.kv.keys[layer], step.kv.values[layer]
    if softcap is None and sinks is None and paged.usable(query, *stored):
        tokens = query.transpose(1, 2)
        return paged.attend(tokens, stored, step.table, step.lengths, scaling, window)
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
        output = _by_products(query * scale, keys, values, step.mask(window), softcap, sinks)
    return output.transpose(1, 2).to(dtype)


def _by_products(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with what torch's own lacks.

    Args:
        query: ``[B, heads, T, head_dim]``, scaled.
        keys: ``[B, kv_heads, span, head_dim]``.
        values: like ``keys``.
        mask: ``[B, 1, T, span]``, added to the scores.
        softcap: bound on the scores, by tanh; None for no bound.
        sinks: ``[heads]``, scores of sinks; None for none.

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
