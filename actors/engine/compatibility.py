"""Compatibility of a target with its drafts, checked before any actor starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.actors.weights.checkpoint import ModelError


def read_config(path: str | Path, name: str) -> dict[str, Any]:
    """Read the ``config.json`` of a model folder.

    Raises:
        ModelError: the folder, its config or its safetensors are missing or broken, or a further
            file that transformers reads at the start is broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{name}: no model folder at {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{name}: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name}: {folder} has no *.safetensors")
    config = _read_object(file, name)
    generation = folder / "generation_config.json"
    if generation.is_file():  # transformers ignores a broken one, with its end-of-sequence tokens
        eos = _read_object(generation, name).get("eos_token_id")
        ids = eos if isinstance(eos, list) else [eos]
        if not all(i is None or type(i) is int for i in ids):
            raise ModelError(
                f"{name}: {generation}: eos_token_id must be a token id or a list of them"
            )
    if (tokenizer := folder / "tokenizer_config.json").is_file():
        _read_object(tokenizer, name)
    if config.get("is_encoder_decoder"):
        kind = config.get("model_type")
        raise ModelError(f"{name}: {folder} is an encoder-decoder ({kind}), no causal LM")
    return config


def _read_object(file: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{name}: {file}: {error.strerror}") from error
    except ValueError as error:  # such as a git-lfs pointer
        raise ModelError(f"{name}: {file} is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{name}: {file} holds no JSON object")
    return content


def _vocabulary(path: str | Path, name: str) -> Any:
    """Return the vocabulary and the added tokens, which identify a tokenizer."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    content = _read_object(file, name)
    model = content.get("model")
    if not isinstance(model, dict):
        raise ModelError(f"{name}: {file} is not a tokenizer's")
    return model.get("vocab"), content.get("added_tokens")


def _largest_id(vocabulary: tuple[Any, Any]) -> int:
    """Return the largest token id of a tokenizer, -1 if it has none."""
    tokens, added = vocabulary
    ids = tokens.values() if isinstance(tokens, dict) else range(len(tokens or ()))
    return max([*ids, *(entry["id"] for entry in added or ())], default=-1)


# Rotary embeddings that extend beyond the config's length.
_EXTENDABLE_ROPE = frozenset({"dynamic", "linear", "yarn"})


def _own_context(config: Mapping[str, Any]) -> int | None:
    """Return a model's context length by its config, if it says."""
    length = config.get("max_position_embeddings") or config.get("n_positions")
    return length if isinstance(length, int) else None


def _check_sizes(name: str, draft: Any, target: Any, vocabulary: tuple[Any, Any]) -> None:
    """Refuse vocabulary sizes that differ by more than padding."""
    if draft == target:
        return
    facts = f"draft {name}: vocabulary of {draft} tokens, the target has {target}"
    if not isinstance(draft, int) or not isinstance(target, int):
        raise ModelError(facts)
    largest = _largest_id(vocabulary)
    if largest >= min(draft, target):
        smaller = "draft" if draft < target else "target"
        raise ModelError(f"{facts}; the {smaller}'s lacks token {largest} of the tokenizer")


def _is_extendable(config: Mapping[str, Any]) -> bool:
    """Return whether a model's positions extend beyond its context length."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    layers = {kind: own for kind, own in rope.items() if isinstance(own, dict)}
    # Sliding-window layers need no positions beyond their window.
    layers.pop("sliding_attention", None)
    kinds = {own.get("rope_type") or own.get("type") for own in layers.values() or (rope,)}
    # With layers of several kinds, one rotary module serves all rows: no length per row.
    return kinds <= (_EXTENDABLE_ROPE - {"dynamic"} if layers else _EXTENDABLE_ROPE)


def context_length(config: Mapping[str, Any], wanted: int | None) -> int:
    """Return the context length that a model is served with, prompt and answer together.

    Args:
        config: its ``config.json``, or transformers' config as a dictionary.
        wanted: ``target.max_model_len``; None for the model's own.

    Raises:
        ModelError: neither gives a length, or the model's positions do not extend to it.
    """
    own = _own_context(config)
    if wanted is None:
        if own is None:
            raise ModelError("target: no context length in config.json, set target.max_model_len")
        return own
    if own is not None and wanted > own and not _is_extendable(config):
        raise ModelError(
            f"target.max_model_len: {wanted} tokens are wanted, the target has {own} tokens "
            f"and its positions do not go on as {', '.join(sorted(_EXTENDABLE_ROPE))} rotary "
            f"embeddings do; set target.max_model_len to {own} or less"
        )
    return wanted


def check_models(
    target_path: str | Path, drafts: Mapping[str, str | Path], max_model_len: int | None = None
) -> None:
    """Check that models can work together.

    A draft folder without a tokenizer uses the target's. Vocabularies may be padded to different
    sizes as long as both hold every token of the tokenizer.

    Args:
        target_path: folder of the target.
        drafts: folder of the draft by expert.
        max_model_len: maximum tokens of prompt and answer, None for the target's own limit.

    Raises:
        ModelError: names the model and the reason.
    """
    target = read_config(target_path, "target")
    target_vocabulary = _vocabulary(target_path, "target")
    if target_vocabulary is None:
        raise ModelError(f"target: {target_path} has no tokenizer.json")
    context = context_length(target, max_model_len)
    for name, path in drafts.items():
        draft = read_config(path, f"draft {name}")
        _check_sizes(name, draft.get("vocab_size"), target.get("vocab_size"), target_vocabulary)
        length = _own_context(draft)
        if length is not None and length < context and not _is_extendable(draft):
            raise ModelError(
                f"draft {name}: made for {length} tokens, the target is served with "
                f"{context}; set target.max_model_len to {length} or less"
            )
        vocabulary = _vocabulary(path, f"draft {name}")
        if vocabulary is not None and vocabulary != target_vocabulary:
            raise ModelError(f"draft {name}: its tokenizer differs from the target's")
