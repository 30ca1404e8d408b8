"""What the drafts beside a target will take of the memory, reckoned before any is loaded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig

from paceline.actors.decoding.kv import position_bytes
from paceline.actors.decoding.runner import kv_shapes
from paceline.actors.decoding.settings import TargetSettings


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of all drafts of an engine.

    Attributes:
        weights: bytes of all copies: every draft, its candidate's slot, a twin of each folder.
        per_position: bytes of keys and values for one position of every architecture. Drafts of
            one share them.
    """

    weights: int = 0
    per_position: int = 0


def draft_memory(settings: TargetSettings, dtype: torch.dtype) -> DraftMemory:
    """Of the drafts that an engine loads beside its target.

    Args:
        settings: names their folders; in a pool they are elsewhere, and take nothing here.
        dtype: that they are loaded in.

    Raises:
        OSError: for a folder that cannot be read.
    """
    if settings.placement == "pool":
        return DraftMemory()
    slots = 2 if settings.canary_share > 0.0 else 1
    weights, shapes = 0, set()
    for path, drafts in Counter(settings.drafts.values()).items():
        weights += (drafts * slots + 1) * _elements(Path(path)) * dtype.itemsize
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        shapes.add(tuple(kv_shapes(config)))
    return DraftMemory(weights, sum(position_bytes(each, dtype) for each in shapes))


def _elements(folder: Path) -> int:
    """Numbers in a folder's safetensors files, of which the headers alone are read."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(n).get_shape()) for n in file.keys())  # noqa: SIM118
    return total
