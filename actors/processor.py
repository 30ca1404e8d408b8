"""What this machine's processor computes in bfloat16, and how fast."""

from __future__ import annotations

import functools
from pathlib import Path

import torch


@functools.cache
def cpuinfo(field: str) -> str:
    """Return what ``/proc/cpuinfo`` says of the first core, or nothing."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line for line in lines if line.startswith(field)), "").partition(":")[2].strip()


def has_tiles() -> bool:
    """Whether it multiplies tiles of bfloat16 (AMX) and the system lets this process do so."""
    return bool(torch.cpu._is_amx_tile_supported()) and bool(torch.cpu._init_amx())


def has_bfloat16() -> bool:
    """Whether it has instructions for bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported()) or has_tiles()


def multiplies_floats_faster() -> bool:
    """Whether torch's products are faster in float32 than in bfloat16.

    Dot products of bfloat16 take Intel's processors twice as long as those of floats, see
    products.h: a training step 1.7 times. Tiles are faster than both.
    """
    return not has_bfloat16() or (cpuinfo("vendor_id") == "GenuineIntel" and not has_tiles())
