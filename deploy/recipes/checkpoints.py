"""Schedule and checkpoints that the recipes share.

A checkpoint is a folder of safetensors and JSON, never a pickle: reading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

STATE_FILE = "state.json"


def linear_to_zero(step: int, total: int, warmup: int) -> float:
    """Learning rate factor: linear warm-up, then a line that reaches zero at the end."""
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total - step) / max(1, total - warmup))


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    """The state of some optimizers as tensors named ``{optimizer}.{parameter}.{field}``."""
    tensors = {}
    for number, optimizer in enumerate(optimizers):
        for parameter, fields in optimizer.state_dict()["state"].items():
            for field, value in fields.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{number}.{parameter}.{field}"] = value.detach().clone()
    return tensors


def load_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put tensors of `optimizer_tensors` back into optimizers over the same parameters."""
    states: list[dict[int, dict[str, torch.Tensor]]] = [{} for _ in optimizers]
    for name, value in tensors.items():
        number, parameter, field = name.split(".", 2)
        states[int(number)].setdefault(int(parameter), {})[field] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    state: Mapping[str, Any],
) -> None:
    """Write a checkpoint beside the old one, then put it in its place."""
    new = folder.with_name(folder.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    # Tied tensors share storage, which safetensors refuses: parameters() names each one once.
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    save_file(weights, new / "weights.safetensors")
    save_file(optimizer_tensors(optimizers), new / "optimizers.safetensors")
    (new / STATE_FILE).write_text(json.dumps(dict(state), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    new.rename(folder)


def read_state(folder: Path) -> dict[str, Any] | None:
    """The JSON state of a checkpoint, or None where there is none."""
    path = folder / STATE_FILE
    return dict(json.loads(path.read_text())) if path.is_file() else None


def load_weights(folder: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into a model.

    Raises:
        KeyError: the checkpoint lacks a parameter of the model.
    """
    weights = load_file(folder / "weights.safetensors")
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(weights[name])


def load_optimizer_state(folder: Path, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Put a checkpoint's optimizer state into optimizers over the same parameters."""
    load_optimizers(optimizers, load_file(folder / "optimizers.safetensors"))
