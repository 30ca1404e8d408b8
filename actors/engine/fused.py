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
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.actors.engine.attention import StepContext, attend
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.linear import StackedLinear, fuse, restore_on_error, stack
from paceline.actors.engine.native.kernels import ACTIVATIONS, Kernels, kernels_for
from paceline.actors.engine.native.plans import CachePlan, ForwardPlan, LayerPlan
from paceline.actors.engine.vocabulary import known_ids, resize_logits
from paceline.actors.weights.codes import codes_of
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

    def of_sum(
        self, x: Tensor, delta: Tensor | None, layout: ExpertLayout, kernels: Kernels | None
    ) -> Tensor:
        """Return the norm of ``x + delta``, ``[E', N, size]`` each; ``x`` may be modified."""
        if kernels is None:
            return self(x if delta is None else x + delta, layout)
        parts = [
            kernels.add_norm(
                x[i], None if delta is None else delta[i], self.weight[expert], self.eps
            )
            for i, expert in enumerate(layout.experts)
        ]
        return parts[0][None] if len(parts) == 1 else torch.stack(parts)


class Layer:
    """One decoder layer of E experts; ``rounds`` as StackedLinear's."""

    def __init__(self, layers: Sequence[Any], window: int | None, *, rounds: bool = False) -> None:
        attentions = [layer.self_attn for layer in layers]
        first = attentions[0]
        self.index = int(first.layer_idx)
        self.window = window
        self.head_dim, self.scaling = int(first.head_dim), float(first.scaling)
        queries = first.q_proj.weight.shape[0] // self.head_dim
        self.heads = (queries, first.k_proj.weight.shape[0] // self.head_dim)
        self.before_attention = Norm([layer.input_layernorm for layer in layers])
        self.before_mlp = Norm([layer.post_attention_layernorm for layer in layers])
        self.head_norms: tuple[Norm, Norm] | None = None
        if hasattr(first, "q_norm"):
            self.head_norms = (
                Norm([m.q_norm for m in attentions]),
                Norm([m.k_norm for m in attentions]),
            )
        self._activation = layers[0].mlp.act_fn
        self.linears = (
            fuse([(m.q_proj, m.k_proj, m.v_proj) for m in attentions], rounds=rounds),
            fuse([(m.o_proj,) for m in attentions], rounds=rounds),
            fuse([(layer.mlp.gate_proj, layer.mlp.up_proj) for layer in layers], rounds=rounds),
            fuse([(layer.mlp.down_proj,) for layer in layers], rounds=rounds),
        )

    def extended(self, layers: Sequence[Any], count: int) -> Layer:
        """Return the layer of these experts, of which the first ``count`` are this layer's."""
        extended = Layer(layers, self.window)
        for linear, own in zip(extended.linears, self.linears, strict=True):
            linear.copy_packed(own, count)
        return extended

    def norms(self, expert: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Weights of an expert's norms: before attention, before the MLP, of queries, of keys."""
        before = self.before_attention.weight[expert], self.before_mlp.weight[expert]
        if not self.head_norms:
            return *before, None, None
        return *before, self.head_norms[0].weight[expert], self.head_norms[1].weight[expert]

    def __call__(
        self,
        x: Tensor,
        delta: Tensor | None,
        step: StepContext,
        layout: ExpertLayout,
        rotary: Rotary,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream ``[E', N, H]`` after attention, and the MLP's output.

        Args:
            x: the residual stream.
            delta: output of the previous layer's MLP, not yet added.
            step: rows and positions.
            layout: experts of the rows.
            rotary: rotary tables.
        """
        to_qkv, output, gate_up, down = self.linears
        x = x if delta is None else x + delta
        qkv = to_qkv(self.before_attention(x, layout), layout)
        if self.head_norms:
            q, k, v = self._split(qkv.view(*qkv.shape[:2], -1, self.head_dim))
            parts = (self.head_norms[0](q, layout), self.head_norms[1](k, layout), v)
            qkv = torch.cat(parts, dim=2).flatten(2)
        mixed = layout.to_experts(self._attend(layout.to_rows(qkv), step, rotary))
        x = x + output(mixed, layout)
        gate, up = gate_up(self.before_mlp(x, layout), layout).chunk(2, dim=-1)
        return x, down(self._activation(gate) * up, layout)

    def _attend(self, qkv: Tensor, step: StepContext, rotary: Rotary) -> Tensor:
        """Attend for ``[B, T, (heads + 2 * kv_heads) * dim]``; returns ``[B, T, heads * dim]``."""
        heads = qkv.view(*qkv.shape[:2], -1, self.head_dim)
        rotated = rotary.rotate(heads[:, :, : sum(self.heads)], step)
        q, k = (part.transpose(1, 2) for part in torch.split(rotated, [*self.heads], dim=2))
        v = heads[:, :, sum(self.heads) :].transpose(1, 2)
        return attend(step, self.index, q, k, v, self.scaling, self.window).flatten(2)

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self.heads
        q, k, v = torch.split(heads, [queries, keys, keys], dim=2)
        return q, k, v


class LayerStack:
    """Decoder layers of E experts; on CPUs one call of the C++ kernels runs them all.

    Attributes:
        layers: see :meth:`replace`.
        kernels: of the CPU, if there are any.
    """

    def __init__(self, layers: Sequence[Layer], rotary: Rotary, activation: str) -> None:
        """Take the layers; ``activation`` is the config's name of the MLP's."""
        self.layers, self._rotary = list(layers), rotary
        weight = layers[0].linears[0].weight
        native = activation in ACTIVATIONS
        self.kernels = kernels_for(weight.device, weight.dtype) if native else None
        self._plans: dict[int, LayerPlan] = {}
        self._caches: tuple[KVCache, CachePlan] | None = None

    def refresh(self, expert: int | None = None) -> None:
        """Note that the weights of one expert, or all, have changed."""
        for layer in self.layers:
            for linear in layer.linears:
                linear.pack(expert)
        self._plans.clear()

    def replace(self, index: int, layer: Layer) -> None:
        """Replace a layer by one whose weights are packed."""
        self.layers[index] = layer
        self._plans.clear()

    def __call__(self, x: Tensor, step: StepContext, layout: ExpertLayout) -> tuple[Tensor, Tensor]:
        """Return the residual stream ``[E', N, H]``, and the last MLP's output, not yet added.

        Args:
            x: the residual stream; may be modified.
            step: rows and positions.
            layout: experts of the rows.
        """
        if self.kernels is not None:
            return x, self.kernels.forward(x, self.plan(step, layout))
        delta: Tensor | None = None
        for layer in self.layers:
            x, delta = layer(x, delta, step, layout, self._rotary)
        assert delta is not None
        return x, delta

    def plan(self, step: StepContext, layout: ExpertLayout) -> ForwardPlan:
        """What the kernels compute for these rows."""
        kv, first = step.kv, self.layers[0]
        if self._caches is None or self._caches[0] is not kv:
            index = [layer.index for layer in self.layers]
            keys, values = ([plane[i] for i in index] for plane in (kv.keys, kv.values))
            self._caches = kv, CachePlan(keys, values, [layer.window for layer in self.layers])
        return ForwardPlan(
            [self._layer_plan(expert) for expert in layout.experts],
            layout.rows_per_expert,
            self._caches[1],
            (self._rotary.cos, self._rotary.sin),
            step.rows,
            step.positions,
            layout.result_index if layout.single is None else None,
            kv.block_tables,
            step.span,
            first.heads,
            first.scaling,
        )

    def _layer_plan(self, expert: int) -> LayerPlan:
        if expert not in self._plans:
            self._plans[expert] = LayerPlan(
                [tuple(linear.packed(expert) for linear in layer.linears) for layer in self.layers],
                [layer.norms(expert) for layer in self.layers],
                self.layers[0].before_attention.eps,
            )
        return self._plans[expert]


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

    def __init__(self, models: Sequence[PreTrainedModel], capacity: int) -> None:
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
        layers = [
            Layer(layers, layer_window(models[0].config, i))
            for i, layers in enumerate(zip(*(body.layers for body in bodies), strict=True))
        ]
        rotary = Rotary(bodies[0].rotary_emb, embeddings, capacity)
        self._stack = LayerStack(layers, rotary, models[0].config.hidden_act)
        self._head.pack()
        self._stack.refresh()

    @property
    def count(self) -> int:
        """Number of models, E."""
        return self._count

    def nbytes(self) -> int:
        """Return the bytes of all weights."""
        linears = sum(linear.weight.nbytes for linear in self.linears())
        return linears + (0 if self._tied else self._embeddings.nbytes)

    def _stack_embeddings(self, models: Sequence[PreTrainedModel]) -> Tensor:
        tables = [model.model.embed_tokens.weight for model in models]
        return tables[0][None] if self._shared else stack(tables)

    def _make_head(self, models: Sequence[PreTrainedModel], embeddings: Tensor) -> StackedLinear:
        if not self._tied and not self._shared:
            return fuse([(model.lm_head,) for model in models])
        heads = [model.get_output_embeddings().weight for model in models]
        if self._shared:
            return StackedLinear(heads[0][None], codes=[codes_of(heads[0])])
        return StackedLinear(embeddings, codes=[codes_of(head) for head in heads])

    @property
    def has_kernels(self) -> bool:
        """Whether the CPU's kernels run the layers, which read every token's row by itself."""
        return self._stack.kernels is not None

    def linears(self) -> Iterator[StackedLinear]:
        """The head, and all of the layers."""
        yield self._head
        for layer in self._stack.layers:
            yield from layer.linears

    def refresh(self, expert: int | None = None) -> None:
        """Update packed weights after the parameters of one expert, or all, have changed."""
        if not self._shared:
            self._head.pack(expert)
        self._stack.refresh(expert)

    def grow(self, models: Sequence[PreTrainedModel]) -> Iterator[None]:
        """Add models, one layer per iteration.

        The present models may run in between; the new ones may when all is done. At most one
        layer's weights exist twice. If memory runs out, the layers are restored and the error is
        raised.

        Args:
            models: the present ones, then the new ones.
        """
        try:
            for i in range(len(self._stack.layers)):
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

    def _resize(self, i: int, models: Sequence[PreTrainedModel]) -> None:
        layers = [model.model.layers[i] for model in models]
        with restore_on_error(layers):
            self._stack.replace(i, self._stack.layers[i].extended(layers, self._count))

    def _shrink(self, models: Sequence[PreTrainedModel]) -> None:
        """Restore the layers of the present models, as far as the memory allows."""
        for i in range(len(self._stack.layers)):
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
        if self._stack.kernels is not None and layout.single is not None:
            return self._run(self._stack.kernels, token_ids, step, layout, keep)[0]
        return self._logits(self._hidden(token_ids, step, layout, keep), layout)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder."""
        if self._stack.kernels is not None and layout.single is not None:
            return self._run(self._stack.kernels, token_ids, step, layout, keep)
        hidden = self._hidden(token_ids, step, layout, 0)
        return self._logits(layout.last_tokens(hidden, keep), layout), layout.to_rows(hidden)

    def first_logits(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, count: int
    ) -> tuple[Tensor, Tensor]:
        """Compute a token of each of B rows by the kernels, see :meth:`with_hidden`.

        The layout must be of one expert.

        Args:
            token_ids: int64 ``[B, 1]``.
            step: rows and positions.
            layout: expert of the rows.
            count: return logits of the first ``count`` rows only.

        Returns:
            logits ``[count, 1, V]``; hidden states ``[B, 1, H]``.
        """
        assert self._stack.kernels is not None
        return self._run(self._stack.kernels, token_ids, step, layout, 1, count)

    def _run(
        self,
        kernels: Kernels,
        token_ids: Tensor,
        step: StepContext,
        layout: ExpertLayout,
        keep: int,
        logit_rows: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All of a single expert's forward in one call: what is between two takes its time."""
        expert = layout.experts[0]
        ends, embedding = (0 if self._shared else expert), self._embeddings
        if len(embedding) > self._vocab:
            embedding = embedding[ends * self._vocab : (ends + 1) * self._vocab]
        logits, states = kernels.model(
            self._stack.plan(step, layout),
            embedding,
            self._norm.weight[expert],
            self._norm.eps,
            self._head.packed(ends),
            self._known(token_ids),
            keep,
            logit_rows,
        )
        return resize_logits(logits, self.vocab_size), states

    def _known(self, token_ids: Tensor) -> Tensor:
        return known_ids(token_ids, self._vocab) if self.vocab_size > self._vocab else token_ids

    def _logits(self, hidden: Tensor, layout: ExpertLayout) -> Tensor:
        """Compute ``[B, T, V]`` from ``[E', R*T, H]``."""
        logits = self._head(hidden, self._one if self._shared else layout)
        return resize_logits(layout.to_rows(logits), self.vocab_size)

    def _hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """Return the input of the head, ``[E', R*(T or keep), H]``."""
        ids = layout.embedding_ids(self._known(token_ids), 0 if self._shared else self._vocab)
        x, delta = self._stack(functional.embedding(ids, self._embeddings), step, layout)
        x, delta = layout.last_tokens(x, keep), layout.last_tokens(delta, keep)
        return self._norm.of_sum(x, delta, layout, self._stack.kernels)


def layer_window(config: PreTrainedConfig, layer: int) -> int | None:
    """Return the sliding window of a layer, None for none."""
    if config.model_type == "llama":  # it ignores the key
        return None
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return window
