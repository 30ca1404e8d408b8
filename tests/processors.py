"""The kernels as they are built on other processors than this one."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from paceline.actors.engine.native import library
from paceline.actors.processor import has_tiles

# What each has: vectors of four lanes; of eight; of sixteen; dot products of bfloat16, slower than
# floats (Intel's) and faster (AMD's); tiles too.
PROCESSORS = {
    "x86-64": "-march=x86-64",
    "haswell": "-march=haswell",
    "skylake-avx512": "-march=skylake-avx512",
    "sapphirerapids": "-march=skylake-avx512 -mavx512bf16 -DPACELINE_MULTIPLY_ADDS",
    "znver4": "-march=skylake-avx512 -mavx512bf16",
    "amx": "-march=skylake-avx512 -mavx512bf16 -mamx-tile -mamx-bf16 -DPACELINE_MULTIPLY_ADDS "
    "-DPACELINE_TILES_ALLOWED",
}
# Those that read codes, and keep bfloat16 in pairs in the cache of keys and values.
WIDE = tuple(PROCESSORS)[1:]
# A machine that has one of these tests its own build of it in the fast suite.
_LONG_TO_BUILD = ("skylake-avx512", "sapphirerapids")
_CAN_RUN = {
    "x86-64": lambda: True,
    "haswell": torch.cpu._is_avx2_supported,
    "skylake-avx512": torch.cpu._is_avx512_supported,
    **dict.fromkeys(("sapphirerapids", "znver4"), torch.cpu._is_avx512_bf16_supported),
    "amx": has_tiles,
}


def marked(processors: Iterable[str]) -> list[Any]:
    """Processors as parameters of a test; those that build long are for `make test-full`."""
    full = pytest.mark.full
    return [pytest.param(p, marks=full) if p in _LONG_TO_BUILD else p for p in processors]


@functools.cache
def build(processor: str) -> ctypes.CDLL:
    """Build for a processor, which need not be this one; skips without a compiler for it.

    Little optimised, to be quick, but with sums and products in one, as they are in use.
    """
    if platform.machine() != "x86_64" or library.load_library() is None:
        pytest.skip("no compiler makes the kernels of such processors")
    quick = ("-O1", "-fexpensive-optimizations")
    flags = (*library._FLAGS, *PROCESSORS[processor].split(), *quick)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "_FLAGS", flags)
        patched.setattr(library, "_FLAGS_OF_VENDOR", {})
        patched.setattr(library, "_FLAGS_OF_TILES", ())
        built = library.load_library.__wrapped__()
    assert built is not None
    return built


def use_kernels_of(processor: str, patched: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Let the library be the one for a processor; skips without a compiler or such a processor."""
    if not _CAN_RUN[processor]():
        pytest.skip("this processor cannot run them")
    built = build(processor)
    patched.setattr(library, "load_library", lambda: built)
    return built
