"""Llama-like models as a few large operations: the fast path of the decoding loop.

At batch 1 transformers' modules spend most of a small model's forward in Python. Here several
experts of one architecture run together, in fused layers (``fused_layers.py``); on CPUs, C++
kernels do what lies between the products. The arithmetic is transformers' own: ``decoders.py``
checks it at every start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor
from torch.nn import functional

from paceline.actors.decoding.attention import StepContext
from paceline.actors.decoding.fused_layers import Layer, Norm, Rotary, fill
from paceline.actors.decoding.grid import Grid
from paceline.actors.decoding.linear import StackedLinear, filled, fuse, moving, stack
from paceline.actors.decoding.native.library import kernels_for
from paceline.actors.decoding.vocabulary import known_ids, resize_logits

_FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


def can_fuse(config: Any) -> bool:
    """Whether a transformers config names an architecture that this module computes."""
    rope = getattr(config, "rope_parameters", None) or {}
    return config.model_type in _FAMILIES and rope.get("rope_type", "default") in _STATIC_ROPE


class FusedDecoder:
    """E models of one architecture, run together over the engine's rows.

    Attributes:
        vocab_size: V, logits per token: the models' own number unless set to the target's.
    """

    def __init__(self, models: Sequence[Any], capacity: int, *, invariant: bool = False) -> None:
        """Fuse the weights; the models' parameters become views into the fused ones.

        Args:
            models: causal LMs of one config for which :func:`can_fuse` holds.
            capacity: positions per row.
            invariant: float32 products on CPUs shall not depend on how many rows there are.
        """
        bodies = [model.model for model in models]
        self._count = len(models)
        self._vocab, hidden = bodies[0].embed_tokens.weight.shape
        self.vocab_size = self._vocab
        self._tied = models[0].lm_head.weight is bodies[0].embed_tokens.weight
        embeddings = stack([body.embed_tokens.weight for body in bodies])
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
            linear.invariant = invariant
        self.refresh()

    @property
    def count(self) -> int:
        """Models, E."""
        return self._count

    def nbytes(self) -> int:
        """Bytes of all their weights."""
        linears = sum(linear.weight.nbytes for linear in self._linears())
        return linears + (0 if self._tied else self._embeddings.nbytes)

    @property
    def packed(self) -> bool:
        """Whether products are oneDNN's, which makes code for every size, see ``filled``."""
        return self._head.packed

    def _make_head(self, models: Sequence[Any], embeddings: Tensor) -> StackedLinear:
        return StackedLinear(embeddings) if self._tied else fuse([(m.lm_head,) for m in models])

    def _linears(self) -> Iterator[StackedLinear]:
        yield self._head
        for layer in self._layers:
            yield from layer.linears

    def refresh(self, expert: int | None = None) -> None:
        """Take note that the parameters (of one expert, or all) have changed."""
        for linear in self._linears():
            linear.pack(expert)

    def grow(self, models: Sequence[Any]) -> Iterator[None]:
        """Take further models in, a layer at a time.

        Between two parts the present models may run, which keep their places; the further ones
        may when all is done. At most one layer's weights are there twice. Where that is too much
        for the memory, all is as before: the layers that have grown are made smaller again.

        Args:
            models: the present ones, then the further ones.
        """
        try:
            for i in range(len(self._layers)):
                self._resize(i, models)
                yield
            with moving(models):
                embeddings = stack([model.model.embed_tokens.weight for model in models])
                head = self._make_head(models, embeddings)
                head.follow(self._head, self._count)
                norm = Norm([model.model.norm for model in models])
        except Exception:
            self._shrink(models[: self._count])
            raise
        self._embeddings, self._head, self._norm = embeddings.view(-1, norm.size), head, norm
        self._count = len(models)

    def _resize(self, i: int, models: Sequence[Any]) -> None:
        layers = [model.model.layers[i] for model in models]
        with moving(layers):
            self._layers[i] = self._layers[i].grown(layers, self._count)

    def _shrink(self, models: Sequence[Any]) -> None:
        """Give back what further models took; a layer that cannot be made anew keeps it."""
        for i in range(len(self._layers)):
            with suppress(RuntimeError, MemoryError):
                self._resize(i, models)

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
        return self._logits(self._hidden(token_ids, step, grid, keep), grid)

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int
    ) -> tuple[Tensor, Tensor]:
        """The same logits, and the normed hidden states ``[B, T or keep, H]`` they come from."""
        hidden = self._hidden(token_ids, step, grid, keep)
        return self._logits(hidden, grid), grid.to_rows(hidden)

    def _logits(self, hidden: Tensor, grid: Grid) -> Tensor:
        """``[E', R*T, H]`` to ``[B, T, V]``."""
        tokens = hidden.shape[1]
        logits = self._head(fill(hidden, self._size(tokens)), grid)[:, :tokens]
        return resize_logits(grid.to_rows(logits), self.vocab_size)

    def _size(self, tokens: int) -> int:
        return filled(tokens) if self.packed else tokens

    def _hidden(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """What the head reads, ``[E', R*(T or keep), H]``."""
        if self.vocab_size > self._vocab:
            token_ids = known_ids(token_ids, self._vocab)
        ids = grid.offset(token_ids, self._vocab)
        tokens = ids.shape[1]
        size = self._size(tokens)
        if size > tokens:
            ids = functional.pad(ids, (0, size - tokens))
        x = functional.embedding(ids, self._embeddings)
        delta: Tensor | None = None
        for layer in self._layers:
            x, delta = layer(x, delta, step, grid, self._rotary, self._kernels)
        if delta is not None:
            delta = grid.last(delta[:, :tokens], keep)
        x = grid.last(x[:, :tokens], keep)
        return self._norm.after(x, delta, grid, self._kernels)[1]


def layer_window(config: Any, layer: int) -> int | None:
    """How far back a layer looks, None for everything."""
    if config.model_type == "llama":  # a stray key means nothing to it
        return None
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return window
