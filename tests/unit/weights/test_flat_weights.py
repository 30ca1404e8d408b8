"""Flat transport format of weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.actors.weights.flat_weights import (
    FlatWeights,
    flatten,
    load_safetensors,
    save_safetensors,
    unflatten,
)


def _state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(3, 4, generator=generator).bfloat16(),
        "b": torch.randn(5, generator=generator),
        "c": torch.randn(2, 2, 2, generator=generator).bfloat16().transpose(0, 2),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 7),
    }


def _equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype
        assert tensor.shape == right[name].shape
        assert torch.equal(tensor, right[name])


def test_round_trip_keeps_dtypes_shapes_and_bits() -> None:
    flat = flatten(_state())
    assert {k: v.dtype.name for k, v in flat.arrays.items()} == {
        "bfloat16": "uint16",
        "float32": "float32",
        "int64": "int64",
    }
    assert all(array.ndim == 1 for array in flat.arrays.values())
    _equal(_state(), unflatten(flat))


def test_unflatten_copies_so_that_training_never_touches_the_received_array() -> None:
    flat = flatten(_state())
    for array in flat.arrays.values():
        array.setflags(write=False)  # as the object store hands it out
    state = unflatten(flat)
    state["b"].add_(1.0)
    _equal(_state(), unflatten(flat))


def test_index_outside_the_array_is_refused() -> None:
    flat = flatten(_state())
    short = {name: array[:1] for name, array in flat.arrays.items()}
    with pytest.raises(ValueError, match="lies outside"):
        unflatten(FlatWeights(arrays=short, index=flat.index))


def test_complex_weights_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="strange"):
        flatten({"strange": torch.zeros(2, dtype=torch.complex64)})


def test_file_round_trip_leaves_no_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    save_safetensors(flatten(_state()), path)
    save_safetensors(flatten(_state()), path)  # replaces
    assert [p.name for p in tmp_path.iterdir()] == ["1.safetensors"]
    _equal(_state(), unflatten(load_safetensors(path)))


def test_nbytes_counts_every_array() -> None:
    flat = flatten({"a": torch.zeros(8, dtype=torch.bfloat16), "b": torch.zeros(2)})
    assert flat.nbytes == 8 * 2 + 2 * 4
    assert np.sum([a.nbytes for a in flat.arrays.values()]) == flat.nbytes
