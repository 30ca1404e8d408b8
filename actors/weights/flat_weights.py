"""Weights in transport: one flat array per dtype and an index into them.

A few large numpy arrays travel through Ray's object store without a copy; a dictionary of
many small tensors does not. bfloat16, which numpy lacks, travels as uint16.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from paceline.actors.atomic_file import replace_file
from paceline.actors.weights.checkpoint import (
    end_names,
    has_shared_head,
    read_causal_lm,
    tied_names,
)
from paceline.actors.weights.eagle import is_eagle, published_dtype

_CARRIERS: dict[torch.dtype, tuple[str, torch.dtype]] = {
    # dtype: its name, and a dtype of the same width in numpy
    torch.bfloat16: ("bfloat16", torch.uint16),
    torch.float16: ("float16", torch.float16),
    torch.float32: ("float32", torch.float32),
    torch.float64: ("float64", torch.float64),
    torch.int64: ("int64", torch.int64),
    torch.int32: ("int32", torch.int32),
    torch.uint8: ("uint8", torch.uint8),
    torch.bool: ("bool", torch.bool),
}
_DTYPES = {name: dtype for dtype, (name, _) in _CARRIERS.items()}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Place of a tensor: ``shape`` elements from ``offset`` in the array of ``dtype``."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class FlatWeights:
    """A state dict in transport.

    Attributes:
        arrays: dtype name to a one-dimensional array; ``bfloat16`` holds uint16.
        index: tensor name to its place.
    """

    arrays: dict[str, NDArray[Any]]
    index: dict[str, TensorSpec]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.nbytes for array in self.arrays.values())

    def finite(self) -> bool:
        """Whether no weight is nan or infinite."""
        for dtype, array in self.arrays.items():
            if dtype == "bfloat16":  # all exponent bits set
                if bool(((array & 0x7F80) == 0x7F80).any()):
                    return False
            elif array.dtype.kind == "f" and not bool(np.isfinite(array).all()):
                return False
        return True

    def digest(self) -> str:
        """Hex digest of names, dtypes, shapes and values, independent of their places."""
        digest = hashlib.blake2b(digest_size=16)
        for name, spec in sorted(self.index.items()):
            end = spec.offset + int(np.prod(spec.shape, dtype=np.int64))
            digest.update(f"{name} {spec.dtype} {spec.shape}".encode())
            digest.update(self.arrays[spec.dtype][spec.offset : end].tobytes())
        return digest.hexdigest()


def flatten(state: Mapping[str, torch.Tensor]) -> FlatWeights:
    """Copy a state dict into flat arrays.

    Args:
        state: name to tensor, on any device.

    Raises:
        TypeError: for a dtype that cannot travel.
    """
    index: dict[str, TensorSpec] = {}
    parts: dict[str, list[torch.Tensor]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in state.items():
        if tensor.dtype not in _CARRIERS:
            raise TypeError(f"weights: {name} has dtype {tensor.dtype}, which cannot travel")
        dtype, carrier = _CARRIERS[tensor.dtype]
        offset = sizes.get(dtype, 0)
        index[name] = TensorSpec(dtype, tuple(tensor.shape), offset)
        # reshape first: a view to another dtype needs at least one axis
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(carrier)
        parts.setdefault(dtype, []).append(flat)
        sizes[dtype] = offset + flat.numel()
    arrays = {
        dtype: np.concatenate([tensor.numpy() for tensor in tensors])
        for dtype, tensors in parts.items()
    }
    return FlatWeights(arrays=arrays, index=index)


def unflatten(flat: FlatWeights) -> dict[str, torch.Tensor]:
    """A state dict of writable copies, independent of ``flat``.

    Raises:
        ValueError: the index points outside an array.
    """
    state: dict[str, torch.Tensor] = {}
    for name, spec in flat.index.items():
        count = int(np.prod(spec.shape, dtype=np.int64))
        source = flat.arrays[spec.dtype][spec.offset : spec.offset + count]
        if source.size != count:
            raise ValueError(f"weights: {name} lies outside the {spec.dtype} array")
        tensor = torch.from_numpy(source.copy()).view(_DTYPES[spec.dtype])
        state[name] = tensor.reshape(spec.shape)
    return state


def save_safetensors(flat: FlatWeights, path: str | Path) -> None:
    """Write atomically: ``path`` is either the old file or the whole new one."""
    state = unflatten(flat)
    replace_file(Path(path), lambda partial: save_file(state, partial, metadata={"format": "pt"}))


def load_model(folder: str | Path) -> FlatWeights:
    """The weights of a draft's folder, under the names that replicas use.

    Raises:
        OSError: there is no model.
        ModelError: a causal LM lacks a tensor, or has one of another shape; an EAGLE draft is not
            compared with its config here.
        safetensors.SafetensorError: a broken file.
    """
    if is_eagle(folder):
        state = load_file(Path(folder) / "model.safetensors")  # without transformers' models
        return flatten({name: t.to(published_dtype(t)) for name, t in state.items()})
    model = read_causal_lm(folder)
    left_out = end_names(model) if has_shared_head(model.config) else tied_names(model)
    return flatten({name: t for name, t in model.state_dict().items() if name not in left_out})


def load_safetensors(path: str | Path) -> FlatWeights:
    """Read what :func:`save_safetensors` wrote.

    Raises:
        OSError: no such file.
        safetensors.SafetensorError: a broken one.
    """
    return flatten(load_file(path))
