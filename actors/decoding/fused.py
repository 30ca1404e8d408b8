"""Llama-like models as a few large operations: the fast path of the decoding loop.

At batch 1 transformers' modules spend most of a small model's forward in Python. Here query, key
and value are one projection, gate and up are one, rotary tables are made once, and several
experts of one architecture run together. The arithmetic is transformers' own, rounding included
(torch products of a fused matrix give each column the same bits); ``decoders.py`` checks it at
every start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.decoding.attention import StepContext, attend
from paceline.actors.decoding.grid import Grid
from paceline.actors.decoding.linear import StackedLinear, fuse, stack

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3"})


def can_fuse(config: Any) -> bool:
    """Whether a transformers config names an architecture that this module computes."""
    rope = getattr(config, "rope_parameters", None) or {}
    return config.model_type in _FAMILIES and rope.get("rope_type", "default") in _STATIC_ROPE


class _Norm:
    """RMS norm of E experts, weight ``[E, 1, size]``."""

    def __init__(self, norms: Sequence[Any]) -> None:
        self._weight = stack([norm.weight for norm in norms])[:, None]
        self._eps = float(norms[0].variance_epsilon)

    def __call__(self, x: Tensor, grid: Grid) -> Tensor:
        """``[E', N, size]`` or ``[E', N, heads, size]`` to the same."""
        weight = grid.select(self._weight)
        if x.dim() > weight.dim():
            weight = weight[:, None]
        # Not rms_norm's own weight: transformers rounds before it multiplies by it.
        return functional.rms_norm(x, (x.shape[-1],), None, self._eps) * weight


class _Attention:
    """Self-attention of one layer of E experts."""

    def __init__(self, modules: Sequence[Any], window: int | None) -> None:
        first = modules[0]
        self._qkv = fuse([(m.q_proj, m.k_proj, m.v_proj) for m in modules])
        self._output = fuse([(m.o_proj,) for m in modules])
        self.linears = (self._qkv, self._output)
        self._norms = None
        if hasattr(first, "q_norm"):
            self._norms = _Norm([m.q_norm for m in modules]), _Norm([m.k_norm for m in modules])
        self._layer = int(first.layer_idx)
        self._head_dim = int(first.head_dim)
        self._scaling = float(first.scaling)
        self._window = window
        queries = first.q_proj.weight.shape[0] // self._head_dim
        keys = first.k_proj.weight.shape[0] // self._head_dim
        self._heads = [queries, keys]

    def __call__(
        self, x: Tensor, step: StepContext, grid: Grid, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """``[E', N, H]`` to the same; stores the new tokens' keys and values."""
        qkv = self._qkv(x, grid)
        qkv = qkv.view(*qkv.shape[:2], -1, self._head_dim)
        queries, keys = self._heads
        qk, v = torch.split(qkv, [queries + keys, keys], dim=2)
        if self._norms is not None:
            q, k = torch.split(qk, self._heads, dim=2)
            qk = torch.cat((self._norms[0](q, grid), self._norms[1](k, grid)), dim=2)
        qk, v = _rotate(grid.to_rows(qk), rotary), grid.to_rows(v)
        q, k = torch.split(qk, self._heads, dim=2)
        mixed = attend(
            step,
            self._layer,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            self._scaling,
            self._window,
        )
        return self._output(grid.from_rows(mixed.flatten(2)), grid)


class _Layer:
    """One decoder layer of E experts."""

    def __init__(self, layers: Sequence[Any], window: int | None) -> None:
        self._attention = _Attention([layer.self_attn for layer in layers], window)
        self._before_attention = _Norm([layer.input_layernorm for layer in layers])
        self._before_mlp = _Norm([layer.post_attention_layernorm for layer in layers])
        self._gate_up = fuse([(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers])
        self._down = fuse([(layer.mlp.down_proj,) for layer in layers])
        self._activation = layers[0].mlp.act_fn
        self.linears = (*self._attention.linears, self._gate_up, self._down)

    def __call__(
        self, x: Tensor, step: StepContext, grid: Grid, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """``[E', N, H]`` to the same."""
        x = x + self._attention(self._before_attention(x, grid), step, grid, rotary)
        gate, up = self._gate_up(self._before_mlp(x, grid), grid).chunk(2, dim=-1)
        return x + self._down(self._activation(gate) * up, grid)


class FusedDecoder:
    """E models of one architecture, run together over the engine's rows."""

    def __init__(self, models: Sequence[Any], capacity: int) -> None:
        """Fuse the weights; the models' parameters become views into the fused ones.

        Args:
            models: causal LMs of one config for which :func:`can_fuse` holds.
            capacity: positions per row.
        """
        bodies = [model.model for model in models]
        self._vocab, hidden = bodies[0].embed_tokens.weight.shape
        tied = models[0].lm_head.weight is bodies[0].embed_tokens.weight
        embeddings = stack([body.embed_tokens.weight for body in bodies])
        self._embeddings = embeddings.view(-1, hidden)
        self._head = StackedLinear(embeddings) if tied else fuse([(m.lm_head,) for m in models])
        self._norm = _Norm([body.norm for body in bodies])
        self._layers = [
            _Layer(layers, _window(models[0].config, i))
            for i, layers in enumerate(zip(*(body.layers for body in bodies), strict=True))
        ]
        positions = torch.arange(capacity, device=embeddings.device)[None]
        cos, sin = bodies[0].rotary_emb(embeddings, positions)
        # The sign of the rotated half goes into the table.
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        self._rotary = (cos[0, :, None].contiguous(), signed[:, None].contiguous())
        self.refresh()

    def refresh(self, expert: int | None = None) -> None:
        """Take note that the parameters (of one expert, or all) have changed."""
        for linear in (self._head, *(part for layer in self._layers for part in layer.linears)):
            linear.pack(expert)

    def __call__(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """Compute T new tokens of B rows and store their keys and values.

        Args:
            token_ids: int64 ``[B, T]``.
            step: rows and positions.
            grid: which expert runs which row.
            keep: logits of the last ``keep`` tokens only; 0 is all.

        Returns:
            ``[B, T or keep, V]`` in the models' dtype.
        """
        x = functional.embedding(grid.offset(token_ids, self._vocab), self._embeddings)
        cos, sin = self._rotary
        rotary = (cos[step.positions], sin[step.positions])
        for layer in self._layers:
            x = layer(x, step, grid, rotary)
        x = self._norm(grid.last(x, keep), grid)
        return grid.to_rows(self._head(x, grid))


def _window(config: Any, layer: int) -> int | None:
    """How far back a layer looks, None for everything."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return window


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding of ``[B, T, heads, D]`` by tables ``[B, T, 1, D]``."""
    cos, signed_sin = rotary
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * signed_sin
