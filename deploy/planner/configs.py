"""Read a shape from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.shapes import Experts, ModelShape

# Their feed-forward layers have two matrices instead of three, or their cache another form.
_OTHER_ARCHITECTURES = frozenset(
    {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "llama4"}
    | {"llama4_text", "mpt", "opt", "phi", "starcoder2"}
)
_LINEAR = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


def read_shape(path: Path) -> ModelShape:
    """The shape of a model by its config file, or by the folder that holds it.

    Raises:
        ConfigError: where the file is missing or describes a model that is not Llama-like.
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
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def parse_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that a config's entries describe.

    Raises:
        ConfigError: for an entry that is missing or wrong, or an architecture of another kind.
    """
    inner = config.get("text_config")
    if isinstance(inner, Mapping):  # a model of text and images
        config = {"tie_word_embeddings": config.get("tie_word_embeddings"), **inner}
    _check_kind(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    layers = _size(config, "num_hidden_layers")
    tied = config.get("tie_word_embeddings")
    if tied is None:  # left out where it is the architecture's default
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
    every = config.get("sliding_window_pattern", default)  # every such layer looks at everything
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
