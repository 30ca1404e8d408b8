"""In which dtype training and router compute on which processor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from paceline.actors import processor
from paceline.actors.engine import model_loader
from paceline.actors.engine.model_loader import resolve_dtype, target_dtype
from paceline.actors.training.deepspeed_config import training_dtype

_CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("vendor", "dots", "tiles", "target", "training"),
    [
        ("AuthenticAMD", True, False, torch.bfloat16, torch.bfloat16),
        ("GenuineIntel", True, False, torch.bfloat16, torch.float32),
        ("GenuineIntel", True, True, torch.bfloat16, torch.bfloat16),
        ("GenuineIntel", False, False, torch.float32, torch.float32),
        ("", False, False, torch.float32, torch.float32),
    ],
)
def test_training_is_in_the_dtype_that_the_processor_is_fast_in(
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    dots: bool,
    tiles: bool,
    target: torch.dtype,
    training: torch.dtype,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: dots)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: True)
    monkeypatch.setattr(processor, "cpuinfo", {"vendor_id": vendor}.get)
    assert resolve_dtype("auto", _CPU) == target
    assert training_dtype("auto", _CPU) == training
    assert training_dtype("bfloat16", _CPU) == torch.bfloat16


@pytest.mark.parametrize(("major", "dtype"), [(7, torch.float32), (8, torch.bfloat16)])
def test_a_gpu_that_only_emulates_bfloat16_computes_in_floats(
    monkeypatch: pytest.MonkeyPatch, major: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    assert resolve_dtype("auto", torch.device("cuda")) == dtype
    assert training_dtype("auto", torch.device("cuda")) == dtype


@pytest.mark.parametrize("has_kernels", [True, False])
def test_targets_of_the_kernels_are_served_in_bfloat16_on_every_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_kernels: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(model_loader, "load_library", lambda: object() if has_kernels else None)
    fused, by_module, gelu = (tmp_path / name for name in ("fused", "by-module", "gelu"))
    LlamaConfig().save_pretrained(fused)
    GPT2Config().save_pretrained(by_module)
    LlamaConfig(hidden_act="gelu").save_pretrained(gelu)
    served = torch.bfloat16 if has_kernels else torch.float32
    assert target_dtype("auto", _CPU, fused) == served
    assert target_dtype("auto", _CPU, by_module) == torch.float32
    assert target_dtype("auto", _CPU, gelu) == torch.float32
    assert target_dtype("float32", _CPU, fused) == torch.float32


def test_tiles_need_the_systems_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    for permitted in (True, False):
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda permitted=permitted: permitted)
        assert processor.has_tiles() == permitted
