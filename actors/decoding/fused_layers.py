"""The layers of Llama-like models, of several experts of one architecture at once.

Query, key and value are one projection, gate and up are one, rotary tables are made once. The
arithmetic is transformers' own, rounding included (torch products of a fused matrix give each
column the same bits).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.decoding.attention import StepContext, attend
from paceline.actors.decoding.grid import Grid
from paceline.actors.decoding.linear import fuse, stack
from paceline.actors.decoding.native.library import Kernels


class Norm:
    """RMS norm of E experts, weight ``[E, 1, size]``."""

    def __init__(self, norms: Sequence[Any]) -> None:
        self.weight = stack([norm.weight for norm in norms])[:, None]
        self.size = int(self.weight.shape[-1])
        self.eps = float(norms[0].variance_epsilon)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """``[E', N, size]`` or ``[E', N, heads, size]`` to the same."""
        weight = grid.select(self.weight)
        if x.dim() > weight.dim():
            weight = weight[:, None]
        # Not rms_norm's own weight: transformers rounds before it multiplies by it.
        return functional.rms_norm(x, (x.shape[-1],), None, self.eps) * weight

    def after(
        self, x: Tensor, delta: Tensor | None, grid: Grid, kernels: Kernels | None
    ) -> tuple[Tensor, Tensor]:
        """``x + delta`` and its norm, ``[E', N, size]`` each; ``x`` may be changed in place."""
        if kernels is None:
            x = x if delta is None else x + delta
            return x, self(x, grid)
        parts = [
            kernels.add_norm(
                x[i], None if delta is None else delta[i], self.weight[expert], self.eps
            )
            for i, expert in enumerate(grid.experts)
        ]
        return x, parts[0][None] if len(parts) == 1 else torch.stack(parts)


class _Attention:
    """Self-attention of one layer of E experts."""

    def __init__(self, modules: Sequence[Any], window: int | None) -> None:
        first = modules[0]
        self._qkv = fuse([(m.q_proj, m.k_proj, m.v_proj) for m in modules])
        self._output = fuse([(m.o_proj,) for m in modules])
        self.linears = (self._qkv, self._output)
        self._norms = None
        if hasattr(first, "q_norm"):
            self._norms = Norm([m.q_norm for m in modules]), Norm([m.k_norm for m in modules])
        self._layer = int(first.layer_idx)
        self._head_dim = int(first.head_dim)
        self._scaling = float(first.scaling)
        self._window = window
        queries = first.q_proj.weight.shape[0] // self._head_dim
        keys = first.k_proj.weight.shape[0] // self._head_dim
        self._heads = (queries, keys)

    def __call__(
        self, x: Tensor, step: StepContext, grid: Grid, rotary: Rotary, kernels: Kernels | None
    ) -> Tensor:
        """``[E', N, H]`` to the same; stores the new tokens' keys and values.

        What lies behind a grid's tokens is filling.
        """
        qkv = self._qkv(x, grid)
        if self._norms is not None:
            q, k, v = self._split(qkv.view(*qkv.shape[:2], -1, self._head_dim))
            parts = (self._norms[0](q, grid), self._norms[1](k, grid), v)
            qkv = torch.cat(parts, dim=2).flatten(2)
        tokens = grid.tokens(step.positions)
        qkv = grid.to_rows(qkv[:, :tokens])
        if kernels is not None:
            mixed = kernels.attend(
                qkv,
                (rotary.cos, rotary.sin),
                step.rows,
                step.positions,
                step.kv.tables,
                step.span,
                (step.kv.keys[self._layer], step.kv.values[self._layer]),
                self._heads,
                self._scaling,
                self._window,
            )
        else:
            mixed = self._attend(qkv, step, rotary)
        return self._output(fill(grid.from_rows(mixed), x.shape[1]), grid)

    def _attend(self, qkv: Tensor, step: StepContext, rotary: Rotary) -> Tensor:
        """``[B, T, (heads + 2 * kv_heads) * dim]`` to ``[B, T, heads * dim]``."""
        heads = qkv.view(*qkv.shape[:2], -1, self._head_dim)
        turned = rotary.turn(heads[:, :, : sum(self._heads)], step)
        q, k = (part.transpose(1, 2) for part in torch.split(turned, [*self._heads], dim=2))
        v = heads[:, :, sum(self._heads) :].transpose(1, 2)
        return attend(step, self._layer, q, k, v, self._scaling, self._window).flatten(2)

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self._heads
        q, k, v = torch.split(heads, [queries, keys, keys], dim=2)
        return q, k, v


class Layer:
    """One decoder layer of E experts."""

    def __init__(self, layers: Sequence[Any], window: int | None) -> None:
        self._attention = _Attention([layer.self_attn for layer in layers], window)
        self._before_attention = Norm([layer.input_layernorm for layer in layers])
        self._before_mlp = Norm([layer.post_attention_layernorm for layer in layers])
        self._gate_up = fuse([(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers])
        self._down = fuse([(layer.mlp.down_proj,) for layer in layers])
        self._activation = layers[0].mlp.act_fn
        self._window = window
        self.linears = (*self._attention.linears, self._gate_up, self._down)

    def grown(self, layers: Sequence[Any], count: int) -> Layer:
        """The layer of these experts, of which the first ``count`` are this one's."""
        grown = Layer(layers, self._window)
        for linear, earlier in zip(grown.linears, self.linears, strict=True):
            linear.follow(earlier, count)
        return grown

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        step: StepContext,
        grid: Grid,
        rotary: Rotary,
        kernels: Kernels | None,
    ) -> tuple[Tensor, Tensor]:
        """The stream ``[E', N, H]`` after attention, and what the MLP adds to it.

        Args:
            x: the stream; may be changed in place.
            delta: what the layer before adds to it.
            step: rows and positions.
            grid: which expert runs which row.
            rotary: its tables.
            kernels: the CPU's, where there are any.
        """
        x, normed = self._before_attention.after(x, delta, grid, kernels)
        mixed = self._attention(normed, step, grid, rotary, kernels)
        x, normed = self._before_mlp.after(x, mixed, grid, kernels)
        gate_up = self._gate_up(normed, grid)
        if kernels is not None:
            return x, self._down(kernels.silu_mul(gate_up), grid)
        gate, up = gate_up.chunk(2, dim=-1)
        return x, self._down(self._activation(gate) * up, grid)


class Rotary:
    """Rotary tables of the positions 0..capacity-1, ``[capacity, dim]`` in the models' dtype."""

    def __init__(self, module: Any, like: Tensor, capacity: int) -> None:
        positions = torch.arange(capacity, device=like.device)[None]
        cos: Tensor
        sin: Tensor
        cos, sin = module(like, positions)
        # The sign of the rotated half goes into the table.
        half = sin.shape[-1] // 2
        self.cos = cos[0].contiguous()
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()

    def turn(self, x: Tensor, step: StepContext) -> Tensor:
        """``[B, T, heads, dim]`` at the step's positions."""
        if step.angles is None:
            at = step.positions
            step.angles = self.cos[at][:, :, None], self.sin[at][:, :, None]
        cos, sin = step.angles
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


def fill(x: Tensor, size: int) -> Tensor:
    """``[E', N, H]`` with rows of zeros behind, ``size`` in all."""
    return x if x.shape[1] == size else functional.pad(x, (0, 0, 0, size - x.shape[1]))
