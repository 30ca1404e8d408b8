"""Sizes of a model, read from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.deploy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward experts of a mixture-of-experts model.

    Attributes:
        count: experts per layer.
        per_token: active experts per token.
        intermediate: width of one expert.
        shared_intermediate: width of the shared expert; 0 without one.
        layers: number of layers with experts; the others are dense.
    """

    count: int
    per_token: int
    intermediate: int
    shared_intermediate: int
    layers: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder with grouped-query attention and gated feed-forward layers.

    Parameters include norms of the residual stream, not biases and norms per head (a few ppm).

    Attributes:
        name: for display.
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        intermediate: width of the dense feed-forward layers.
        vocab: rows of the embedding.
        tied: head and embedding are one matrix.
        experts: None if every layer is dense.
        window: positions of sliding-window attention; None without.
        window_layers: number of layers with it.
        fuse_parameters: of an EAGLE draft, which joins a token's embedding and the target's hidden
            state; 0 for others. Its embedding is the target's, its head some rows of that one's.
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
    fuse_parameters: int = 0

    @property
    def attention_parameters(self) -> int:
        """Query, key, value and output projections of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down of one expert; 0 without experts."""
        return 3 * self.hidden * self.experts.intermediate if self.experts else 0

    @property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return self.experts.layers if self.experts else 0

    @property
    def head_parameters(self) -> int:
        """The output head."""
        return self.hidden * self.vocab

    @property
    def common_parameters(self) -> int:
        """Parameters read in every step: all but experts and embedding."""
        dense = (self.layers - self.sparse_layers) * 3 * self.hidden * self.intermediate
        sparse = 0
        if self.experts:
            routing = self.hidden * self.experts.count
            shared = 3 * self.hidden * self.experts.shared_intermediate
            sparse = self.experts.layers * (routing + shared)
        norms = (2 * self.layers + 1) * self.hidden
        attention = self.layers * self.attention_parameters
        return attention + dense + sparse + norms + self.head_parameters + self.fuse_parameters

    @property
    def parameters(self) -> int:
        """All parameters."""
        experts = self.experts.count * self.expert_parameters if self.experts else 0
        embedding = 0 if self.tied else self.head_parameters
        return self.common_parameters + self.sparse_layers * experts + embedding

    @property
    def active_parameters(self) -> int:
        """Parameters used by one token."""
        visited = self.experts.per_token * self.expert_parameters if self.experts else 0
        return self.common_parameters + self.sparse_layers * visited

    @property
    def kv_values_per_token(self) -> int:
        """Numbers per position in the KV cache, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def cached_positions(self, context: int) -> int:
        """Cached positions that a token attends to, summed over the layers."""
        seen = context if self.window is None else min(context, self.window)
        return (self.layers - self.window_layers) * context + self.window_layers * seen


# Feed-forward layers with two matrices instead of three, or another form of KV cache.
_OTHER_ARCHITECTURES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama4"}
    | {"llama4_text", "mpt", "opt", "phi", "starcoder2"}
)
_ENCODERS = frozenset(
    {"albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra"}
    | {"modernbert", "mpnet", "roberta", "xlm-roberta"}
)
_LINEAR = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


def read_shape(path: Path) -> ModelShape:
    """Read a model's shape from its config file or its folder.

    Raises:
        ConfigError: the file is missing, or its model is not Llama-like.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except ValueError:  # not JSON, or not text
        raise ConfigError(f"{file}: not a JSON file") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{file}: not a JSON object")
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    try:
        return parse_shape(config, name)
    except (TypeError, ValueError) as error:  # a ConfigError, or an entry of another type
        raise ConfigError(f"{file}: {error}") from None


def parse_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Shape of a model from its config.

    Raises:
        ConfigError: an entry is missing or wrong, or the architecture is not Llama-like.
    """
    if config.get("model_type") == "eagle":
        own = {"vocab_size": config.get("draft_vocab_size"), "tie_word_embeddings": True}
        trunk = parse_shape({**(config.get("trunk") or {}), **own}, name)
        return replace(trunk, fuse_parameters=2 * trunk.hidden**2)
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # multimodal
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner}
    _check_kind(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers = _size(config, "num_hidden_layers")
    tied = config.get("tie_word_embeddings")
    if tied is None:  # the architecture's default
        tied = str(config.get("model_type", "")).startswith("gemma")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_key_value_heads: {kv_heads} does not divide {heads} heads")
    window_layers = _window_layers(config, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        tied=bool(tied),
        experts=_experts(config, layers),
        window=_size(config, "sliding_window") if window_layers else None,
        window_layers=window_layers,
    )


def _check_kind(config: Mapping[str, Any]) -> None:
    kind = str(config.get("model_type", "unknown"))
    if kind in _OTHER_ARCHITECTURES:
        raise ConfigError(f"model_type: {kind} is not Llama-like; its costs are not modelled")
    if kind in _ENCODERS:
        raise ConfigError(f"model_type: {kind} is an encoder, which generates no text")
    if config.get("kv_lora_rank"):
        raise ConfigError("kv_lora_rank: latent attention is not modelled")
    if any(str(layer) in _LINEAR for layer in config.get("layer_types") or ()):
        raise ConfigError("layer_types: layers without a key/value cache are not modelled")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{key}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}: must be a positive whole number, not {value!r}")
    return value


def _window_layers(config: Mapping[str, Any], layers: int) -> int:
    if config.get("sliding_window") is None or config.get("use_sliding_window") is False:
        return 0
    if config.get("layer_types"):
        return sum(str(kind) == "sliding_attention" for kind in config["layer_types"][:layers])
    default = 2 if config.get("model_type") == "gemma2" else None
    every = config.get("sliding_window_pattern", default)  # every n-th layer has full attention
    if every:
        return layers - layers // int(every)
    return layers - min(layers, int(config.get("max_window_layers") or 0))


def _experts(config: Mapping[str, Any], layers: int) -> Experts | None:
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    name = next((key for key in names if config.get(key)), None)
    if name is None:
        return None
    count, visited = _size(config, name), _size(config, "num_experts_per_tok")
    if visited > count:
        raise ConfigError(f"num_experts_per_tok: {visited} of {count} experts")
    width = _size(config, "moe_intermediate_size", config.get("intermediate_size"))
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    shared += int(config.get("n_shared_experts") or 0) * width
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    dense |= set(range(int(config.get("first_k_dense_replace") or 0)))
    sparse = sum((i + 1) % step == 0 and i not in dense for i in range(layers))
    return Experts(count, visited, width, shared, sparse) if sparse else None
