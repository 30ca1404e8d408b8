"""Fused decoder of Llama-like models: the fast path of decoding.

At batch 1 transformers' modules spend most of a small model's forward in Python. Here several
experts of one architecture run together in fused layers, and on CPUs C++ kernels compute what is
between the products. The arithmetic is transformers'; ``decoders.py`` checks it at every start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from paceline.actors.engine.attention import StepContext, attend
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.linear import StackedLinear, fuse, restore_on_error, stack
from paceline.actors.engine.native.library import Kernels, kernels_for
from paceline.actors.engine.vocabulary import known_ids, resize_logits
from paceline.actors.weights.target_ends import SharedEmbedding


class Norm:
    """RMS norm of E experts, weight ``[E, 1, size]``."""

    def __init__(self, norms: Sequence[Any]) -> None:
        self.weight = stack([norm.weight for norm in norms])[:, None]
        self.size = int(self.weight.shape[-1])
        self.eps = float(norms[0].variance_epsilon)

    def __call__(self, x: Tensor, layout: ExpertLayout) -> Tensor:
        """Normalise ``[E', N, size]`` or ``[E', N, heads, size]``."""
        weight = layout.select(self.weight)
        if x.dim() > weight.dim():
            weight = weight[:, None]
        # Not rms_norm's weight: transformers rounds before it multiplies by it.
        return functional.rms_norm(x, (x.shape[-1],), None, self.eps) * weight

    def add_and_norm(
        self, x: Tensor, delta: Tensor | None, layout: ExpertLayout, kernels: Kernels | None
    ) -> tuple[Tensor, Tensor]:
        """Return ``x + delta`` and its norm, ``[E', N, size]`` each; ``x`` may be modified."""
        if kernels is None:
            x = x if delta is None else x + delta
            return x, self(x, layout)
        parts = [
            kernels.add_norm(
                x[i], None if delta is None else delta[i], self.weight[expert], self.eps
            )
            for i, expert in enumerate(layout.experts)
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
        self,
        x: Tensor,
        step: StepContext,
        layout: ExpertLayout,
        rotary: Rotary,
        kernels: Kernels | None,
    ) -> Tensor:
        """Attend for ``[E', N, H]`` and store the new tokens' keys and values."""
        qkv = self._qkv(x, layout)
        if self._norms is not None:
            q, k, v = self._split(qkv.view(*qkv.shape[:2], -1, self._head_dim))
            parts = (self._norms[0](q, layout), self._norms[1](k, layout), v)
            qkv = torch.cat(parts, dim=2).flatten(2)
        qkv = layout.to_rows(qkv)
        if kernels is not None:
            mixed = kernels.attend(
                qkv,
                (rotary.cos, rotary.sin),
                step.rows,
                step.positions,
                step.kv.block_tables,
                step.span,
                (step.kv.keys[self._layer], step.kv.values[self._layer]),
                self._heads,
                self._scaling,
                self._window,
            )
        else:
            mixed = self._attend(qkv, step, rotary)
        return self._output(layout.to_experts(mixed), layout)

    def _attend(self, qkv: Tensor, step: StepContext, rotary: Rotary) -> Tensor:
        """Attend for ``[B, T, (heads + 2 * kv_heads) * dim]``; returns ``[B, T, heads * dim]``."""
        heads = qkv.view(*qkv.shape[:2], -1, self._head_dim)
        rotated = rotary.rotate(heads[:, :, : sum(self._heads)], step)
        q, k = (part.transpose(1, 2) for part in torch.split(rotated, [*self._heads], dim=2))
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

    def extended(self, layers: Sequence[Any], count: int) -> Layer:
        """Return the layer of these experts, of which the first ``count`` are this layer's."""
        extended = Layer(layers, self._window)
        for linear, own in zip(extended.linears, self.linears, strict=True):
            linear.copy_packed(own, count)
        return extended

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        step: StepContext,
        layout: ExpertLayout,
        rotary: Rotary,
        kernels: Kernels | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream ``[E', N, H]`` after attention, and the MLP's output.

        Args:
            x: the residual stream; may be modified.
            delta: output of the previous layer's MLP, not yet added.
            step: rows and positions.
            layout: experts of the rows.
            rotary: rotary tables.
            kernels: of the CPU, if there are any.
        """
        x, normed = self._before_attention.add_and_norm(x, delta, layout, kernels)
        mixed = self._attention(normed, step, layout, rotary, kernels)
        x, normed = self._before_mlp.add_and_norm(x, mixed, layout, kernels)
        gate_up = self._gate_up(normed, layout)
        if kernels is not None:
            return x, self._down(kernels.silu_mul(gate_up), layout)
        gate, up = gate_up.chunk(2, dim=-1)
        return x, self._down(self._activation(gate) * up, layout)


class Rotary:
    """Rotary tables ``[capacity, dim]`` in the models' dtype."""

    def __init__(self, module: Any, like: Tensor, capacity: int) -> None:
        positions = torch.arange(capacity, device=like.device)[None]
        cos: Tensor
        sin: Tensor
        cos, sin = module(like, positions)
        # The table includes the sign of the rotated half.
        half = sin.shape[-1] // 2
        self.cos = cos[0].contiguous()
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()

    def rotate(self, x: Tensor, step: StepContext) -> Tensor:
        """Rotate ``[B, T, heads, dim]`` to the step's positions."""
        if step.angles is None:
            at = step.positions
            step.angles = self.cos[at][:, :, None], self.sin[at][:, :, None]
        cos, sin = step.angles
        return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class FusedDecoder:
    """E models of one architecture that run together.

    Attributes:
        vocab_size: V, logits per token: the models' own unless set to the target's.
    """

    def __init__(self, models: Sequence[Any], capacity: int) -> None:
        """Fuse the weights; the models' parameters become views into the fused ones.

        Args:
            models: causal LMs of one config for which ``is_llama_like`` holds.
            capacity: positions per row.
        """
        bodies = [model.model for model in models]
        self._count = len(models)
        self._vocab, hidden = bodies[0].embed_tokens.weight.shape
        self.vocab_size = self._vocab
        self._tied = models[0].lm_head.weight is bodies[0].embed_tokens.weight
        # All models have the target's embedding and head, once.
        self._shared = isinstance(bodies[0].embed_tokens, SharedEmbedding)
        self._one = ExpertLayout([0], models[0].device)
        embeddings = self._stack_embeddings(models)
        self._embeddings = embeddings.view(-1, hidden)
        self._head = self._make_head(models, embeddings)
        self._norm = Norm([body.norm for body in bodies])
        self._layers = [
            Layer(layers, layer_window(models[0].config, i))
            for i, layers in enumerate(zip(*(body.layers for body in bodies), strict=True))
        ]
        self._rotary = Rotary(bodies[0].rotary_emb, embeddings, capacity)
        silu = models[0].config.hidden_act in ("silu", "swish")
        self._kernels = kernels_for(embeddings.device, embeddings.dtype) if silu else None
        for linear in self._linears():
            linear.pack()

    @property
    def count(self) -> int:
        """Number of models, E."""
        return self._count

    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        linears = sum(linear.weight.nbytes for linear in self._linears())
        return linears + (0 if self._tied else self._embeddings.nbytes)

    def _stack_embeddings(self, models: Sequence[Any]) -> Tensor:
        tables = [model.model.embed_tokens.weight for model in models]
        return tables[0][None] if self._shared else stack(tables)

    def _make_head(self, models: Sequence[Any], embeddings: Tensor) -> StackedLinear:
        if self._tied:
            return StackedLinear(embeddings)
        if self._shared:
            return StackedLinear(models[0].lm_head.weight[None])
        return fuse([(m.lm_head,) for m in models])

    def _linears(self) -> Iterator[StackedLinear]:
        yield self._head
        for layer in self._layers:
            yield from layer.linears

    def refresh(self, expert: int | None = None) -> None:
        """Update packed weights after the parameters of one expert, or all, have changed."""
        for linear in self._linears():
            if not (self._shared and linear is self._head):
                linear.pack(expert)

    def grow(self, models: Sequence[Any]) -> Iterator[None]:
        """Add models, one layer per iteration.

        The present models may run in between; the new ones may when all is done. At most one
        layer's weights exist twice. If memory runs out, the layers are restored and the error is
        raised.

        Args:
            models: the present ones, then the new ones.
        """
        try:
            for i in range(len(self._layers)):
                self._resize(i, models)
                yield
            with restore_on_error(models):
                embeddings, head = self._embeddings, self._head
                if not self._shared:
                    embeddings = self._stack_embeddings(models)
                    head = self._make_head(models, embeddings)
                    head.copy_packed(self._head, self._count)
                norm = Norm([model.model.norm for model in models])
        except Exception:
            self._shrink(models[: self._count])
            raise
        self._embeddings, self._head, self._norm = embeddings.view(-1, norm.size), head, norm
        self._count = len(models)

    def _resize(self, i: int, models: Sequence[Any]) -> None:
        layers = [model.model.layers[i] for model in models]
        with restore_on_error(layers):
            self._layers[i] = self._layers[i].extended(layers, self._count)

    def _shrink(self, models: Sequence[Any]) -> None:
        """Restore the layers of the present models, as far as the memory allows."""
        for i in range(len(self._layers)):
            with suppress(RuntimeError, MemoryError):
                self._resize(i, models)

    def __call__(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """Compute T new tokens of B rows and store their keys and values.

        Args:
            token_ids: int64 ``[B, T]``.
            step: rows and positions.
            layout: experts of the rows.
            keep: return logits of the last ``keep`` tokens only; 0 is all.

        Returns:
            ``[B, T or keep, V]`` in the models' dtype.
        """
        return self._logits(self._hidden(token_ids, step, layout, keep), layout)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        hidden = self._hidden(token_ids, step, layout, 0)
        return self._logits(layout.last_tokens(hidden, keep), layout), layout.to_rows(hidden)

    def _logits(self, hidden: Tensor, layout: ExpertLayout) -> Tensor:
        """Compute ``[B, T, V]`` from ``[E', R*T, H]``."""
        logits = self._head(hidden, self._one if self._shared else layout)
        return resize_logits(layout.to_rows(logits), self.vocab_size)

    def _hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """Return the input of the head, ``[E', R*(T or keep), H]``."""
        if self.vocab_size > self._vocab:
            token_ids = known_ids(token_ids, self._vocab)
        ids = layout.embedding_ids(token_ids, 0 if self._shared else self._vocab)
        x = functional.embedding(ids, self._embeddings)
        delta: Tensor | None = None
        for layer in self._layers:
            x, delta = layer(x, delta, step, layout, self._rotary, self._kernels)
        if delta is not None:
            delta = layout.last_tokens(delta, keep)
        x = layout.last_tokens(x, keep)
        return self._norm.add_and_norm(x, delta, layout, self._kernels)[1]


def layer_window(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer, None for none."""
    if config.model_type == "llama":  # it ignores the key
        return None
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return window
