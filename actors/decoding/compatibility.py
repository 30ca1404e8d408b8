"""Can this target be served with these drafts? Asked before any actor starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class ModelError(ValueError):
    """A model folder that cannot be served; the message is one line that says why."""


def read_config(path: str | Path, name: str) -> dict[str, Any]:
    """The ``config.json`` of a model folder.

    Raises:
        ModelError: where the folder, its config or its safetensors are missing or broken.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ModelError(f"{name}: no model folder at {folder}")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{name}: {folder} has no config.json")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name}: {folder} has no *.safetensors")
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{name}: {file} is not JSON ({error})") from error
    return config


def _vocabulary(path: str | Path) -> Any:
    """What makes two tokenizers the same: token to id, and the added tokens."""
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    return content.get("model", {}).get("vocab"), content.get("added_tokens")


def check_models(target_path: str | Path, drafts: Mapping[str, str | Path]) -> None:
    """Refuse what cannot work together.

    A draft folder without a tokenizer is taken to use the target's; its vocabulary size
    must then still be equal.

    Raises:
        ModelError: names the model and the reason.
    """
    target = read_config(target_path, "target")
    target_vocabulary = _vocabulary(target_path)
    if target_vocabulary is None:
        raise ModelError(f"target: {target_path} has no tokenizer.json")
    for name, path in drafts.items():
        draft = read_config(path, f"draft {name}")
        if draft.get("vocab_size") != target.get("vocab_size"):
            raise ModelError(
                f"draft {name}: vocabulary of {draft.get('vocab_size')} tokens, "
                f"the target has {target.get('vocab_size')}"
            )
        vocabulary = _vocabulary(path)
        if vocabulary is not None and vocabulary != target_vocabulary:
            raise ModelError(f"draft {name}: its tokenizer differs from the target's")
