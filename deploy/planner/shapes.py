"""What a model's config.json says of its size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward experts of a mixture.

    Attributes:
        count: experts of a layer.
        per_token: experts that a token visits.
        intermediate: width of one expert.
        shared_intermediate: width of what every token visits besides; 0 where there is none.
        layers: how many layers have experts; the others are dense.
    """

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    layers: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated feed-forward layers.

    Norms of the residual stream are counted; biases and norms per head are not (a few millionths).

    Attributes:
        name: for people.
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        intermediate: width of the dense feed-forward layers.
        vocab: rows of the embedding.
        tied: whether head and embedding are one matrix.
        experts: of a mixture; None where every layer is dense.
        window: positions that the windowed layers look back; None where no layer is windowed.
        window_layers: how many layers are.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    experts: Experts | None = None
    window: int | None = None
    window_layers: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one layer: query, key, value and output projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert: gate, up and down; 0 without experts."""
        return 3 * self.hidden * self.experts.intermediate if self.experts else 0

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.experts.layers if self.experts else 0

    @property
    def head_parameters(self) -> int:
        """The matrix that makes the logits."""
        return self.hidden * self.vocab

    @property
    def common_parameters(self) -> int:
        """What every step reads, whatever its tokens are: all but experts and embedding."""
        dense = (self.layers - self.sparse_layers) * 3 * self.hidden * self.intermediate
        sparse = 0
        if self.experts:
            routing = self.hidden * self.experts.count
            shared = 3 * self.hidden * self.experts.shared_intermediate
            sparse = self.experts.layers * (routing + shared)
        norms = (2 * self.layers + 1) * self.hidden
        attention = self.layers * self.attention_parameters
        return attention + dense + sparse + norms + self.head_parameters

    @property
    def parameters(self) -> int:
        """All of them."""
        experts = self.experts.count * self.expert_parameters if self.experts else 0
        embedding = 0 if self.tied else self.head_parameters
        return self.common_parameters + self.sparse_layers * experts + embedding

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with."""
        visited = self.experts.per_token * self.expert_parameters if self.experts else 0
        return self.common_parameters + self.sparse_layers * visited

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one position keeps in the cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def cached_positions(self, context: int) -> int:
        """Positions that a token attends to, summed over the layers."""
        seen = context if self.window is None else min(context, self.window)
        return (self.layers - self.window_layers) * context + self.window_layers * seen
