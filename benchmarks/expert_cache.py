"""Trained experts as model folders, kept while all that decides their weights is the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_MODELS = Path(__file__).parents[1] / "tests" / "fixtures"
TARGET, DRAFT, ROUTER = _MODELS / "target", _MODELS / "draft-general", _MODELS / "router"
# Keys of the configuration.
SMALL_MODELS = {
    "target.path": str(TARGET),
    "drafts.general": str(DRAFT),
    "router.path": str(ROUTER),
}
_FACTS = "recipe.json"
_WEIGHTS = "model.safetensors"
_BASE_FILES = ("config.json", "tokenizer.json")


def experts_dir(out: Path, data: Path | None) -> Path:
    """Folder of the experts trained on generated prompts or on rows."""
    return out / ("experts" if data is None else "experts-rows")


def base_hashes() -> dict[str, str]:
    """sha256 of the files that every expert starts from."""
    paths = [
        path
        for folder in (TARGET, DRAFT)
        for path in [*(folder / n for n in _BASE_FILES), *sorted(folder.glob("*.safetensors"))]
    ]
    return {f"{path.parent.name}/{path.name}": _sha256(path) for path in paths}


def recipe_of(texts: list[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides an expert: base weights, prompts, settings."""
    prompts = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return {"base": base_hashes(), "prompts": prompts, "settings": dict(settings)}


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Facts that :func:`note_facts` wrote; None if there is no whole expert."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        whole = facts["weights"] == _sha256(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(facts) if whole else None


def is_current(folder: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether the folder holds a whole expert of this recipe."""
    facts = facts_of(folder)
    return facts is not None and facts.get("recipe") == recipe


def save_expert(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    recipe: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> None:
    """Write a model folder, its facts last: half an expert is never taken for a whole one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in DRAFT.iterdir():
        if path.suffix in {".json", ".jinja"}:
            shutil.copyfile(path, folder / path.name)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    note_facts(folder, recipe, figures)


def note_facts(folder: Path, recipe: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write recipe, figures and the weights' hash into a folder of whole weights."""
    facts = {"recipe": recipe, "figures": figures, "weights": _sha256(folder / _WEIGHTS)}
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
