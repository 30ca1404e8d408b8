"""Build and call the C++ kernels; they compile in one second, once per machine and version.

Without a compiler the engine uses torch operations, which are slower, and whose results may differ
in the last bits between batches of different shapes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = ("numbers.h", "threads.h", "products.h", "layers.h", "attention.h", "tokens.h")
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
    "-pthread",
)
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_TIMEOUT_S = 120


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "q_heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("dim", "block_size", "columns", "span", "window")),
        ("scale", ctypes.c_float),
    )


# As in attention.h: queries per tile, and lanes of the widest vectors.
_TILE, _LANES = 16, 16


class Kernels:
    """Kernels for one dtype.

    They access raw memory: every tensor must be on the CPU, of this dtype unless another is named,
    and contiguous, and positions must be inside the rows.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = library[f"add_norm_{_NAMES[dtype]}"]
        self._add_norm.argtypes = [pointer, pointer, pointer, ctypes.c_float, size, size, pointer]
        self._silu_mul = library[f"silu_mul_{_NAMES[dtype]}"]
        self._silu_mul.argtypes = [pointer, size, size, pointer]
        self._attend = library[f"attend_{_NAMES[dtype]}"]
        self._attend.argtypes = [pointer] * 11
        self._top_one = library[f"top_one_{_NAMES[dtype]}"]
        self._top_one.argtypes = [pointer, size, size, pointer, pointer]
        self._top_k = library[f"top_k_{_NAMES[dtype]}"]
        self._top_k.argtypes = [pointer, size, size, size, pointer, pointer, pointer]
        self._accept = library[f"accept_{_NAMES[dtype]}"]
        self._accept.argtypes = [pointer, size, size, size, *[pointer] * 4]
        self._packed_size = library[f"packed_size_{_NAMES[dtype]}"]
        self._packed_size.argtypes = [size, size]
        self._packed_size.restype = size
        self._pack = library[f"pack_{_NAMES[dtype]}"]
        self._pack.argtypes = [pointer, size, size, pointer]
        self._multiply = library[f"multiply_{_NAMES[dtype]}"]
        self._multiply.argtypes = [*[pointer] * 3, *[size] * 4, pointer]
        layers = (self._add_norm, self._silu_mul, self._attend, self._pack, self._multiply)
        for function in (*layers, self._top_one, self._top_k, self._accept):
            function.restype = None

    def pack(self, weight: Tensor, into: Tensor | None = None) -> Tensor:
        """Lay a weight ``[out, in]`` out as :meth:`multiply` reads it.

        Args:
            weight: any strides.
            into: an earlier result for a weight of this shape, to be overwritten.
        """
        weight = weight.contiguous()
        out, size = weight.shape
        packed = weight.new_empty(self._packed_size(size, out)) if into is None else into
        self._pack(weight.data_ptr(), size, out, packed.data_ptr())
        return packed

    def multiply(self, x: Tensor, packed: Tensor, out: int, bias: Tensor | None) -> Tensor:
        """``x W^T + bias`` on torch's number of threads; a row's bits depend on that row alone.

        Args:
            x: ``[..., in]``.
            packed: W of ``[out, in]`` as :meth:`pack` gives it.
            out: its outputs.
            bias: ``[out]`` or None.

        Returns:
            ``[..., out]``.
        """
        x = x.contiguous()
        size = x.shape[-1]
        y = x.new_empty(*x.shape[:-1], out)
        self._multiply(
            x.data_ptr(),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            x.numel() // size,
            size,
            out,
            torch.get_num_threads(),
            y.data_ptr(),
        )
        return y

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta`` to ``x`` and return the RMS norm times ``weight``.

        Args:
            x: ``[N, size]``, modified in place.
            delta: like ``x``, or None.
            weight: ``[size]``.
            eps: added to the mean square.
        """
        out = torch.empty_like(x)
        assert x.is_contiguous()
        assert delta is None or delta.is_contiguous()
        self._add_norm(
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            eps,
            x.shape[0],
            x.shape[1],
            out.data_ptr(),
        )
        return out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up, ``[..., 2 * size]`` to ``[..., size]``."""
        size = gate_up.shape[-1] // 2
        assert gate_up.is_contiguous()
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._silu_mul(gate_up.data_ptr(), out.numel() // size, size, out.data_ptr())
        return out

    def top_one(self, logits: Tensor, ids: Tensor, probs: Tensor | None = None) -> None:
        """Find the first index of the largest entry along the last axis.

        Args:
            logits: ``[..., V]``.
            ids: int64 ``[...]``, output.
            probs: float32 ``[...]``, output: the softmax at these entries; None if not needed.
        """
        logits = logits.contiguous()
        assert ids.is_contiguous()
        assert probs is None or probs.is_contiguous()
        self._top_one(
            logits.data_ptr(),
            ids.numel(),
            logits.shape[-1],
            ids.data_ptr(),
            None if probs is None else probs.data_ptr(),
        )

    def top_k(self, logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k largest entries along the last axis, descending.

        Args:
            logits: ``[..., V]``.
            k: at most V.

        Returns:
            float32 values and int64 indices ``[..., k]``, float32 logsumexp ``[...]``.
        """
        logits = logits.contiguous()
        shape = logits.shape[:-1]
        ids = torch.empty(*shape, k, dtype=torch.int64)
        values, logsumexp = torch.empty(*shape, k), torch.empty(shape)
        self._top_k(
            logits.data_ptr(),
            logsumexp.numel(),
            logits.shape[-1],
            k,
            ids.data_ptr(),
            values.data_ptr(),
            logsumexp.data_ptr(),
        )
        return values, ids, logsumexp

    def accept(self, logits: Tensor, drafts: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """Verify greedily: count the accepted draft tokens, and return the target's next token.

        Args:
            logits: ``[B, k + 1, V]``.
            drafts: int64 ``[B, k]``.
            drafted: int64 ``[B]``, number of draft tokens per row, at most k.

        Returns:
            int64 ``[B]`` each.
        """
        batch, steps, vocab = logits.shape
        logits, drafts, drafted = logits.contiguous(), drafts.contiguous(), drafted.contiguous()
        accepted, final = torch.empty_like(drafted), torch.empty_like(drafted)
        self._accept(
            logits.data_ptr(),
            batch,
            steps - 1,
            vocab,
            drafts.data_ptr(),
            drafted.data_ptr(),
            accepted.data_ptr(),
            final.data_ptr(),
        )
        return accepted, final

    def attend(
        self,
        qkv: Tensor,
        rotary: tuple[Tensor, Tensor],
        rows: Tensor,
        positions: Tensor,
        tables: Tensor,
        span: int,
        kv: tuple[Tensor, Tensor],
        heads: tuple[int, int],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Rotate queries and keys, store keys and values, attend over the rows' blocks.

        Args:
            qkv: ``[B, T, (heads + 2 * kv_heads) * dim]``.
            rotary: cosine and signed sine, ``[capacity, dim]`` each.
            rows: int64 ``[B]``.
            positions: int64 ``[B, T]``.
            tables: int32 ``[rows, columns]``, block tables.
            span: positions that are read, in whole blocks.
            kv: ``[blocks, block_size, kv_heads, dim]`` each; block_size is a multiple of 16.
            heads: query heads and key/value heads.
            scale: of the scores.
            window: sliding window, None for none.

        Returns:
            ``[B, T, heads * dim]``.
        """
        batch, steps, _ = qkv.shape
        _, block_size, keys, dim = kv[0].shape
        assert block_size % _LANES == 0
        assert span % block_size == 0
        # Expanded views have no memory of their own.
        qkv, rows, positions = qkv.contiguous(), rows.contiguous(), positions.contiguous()
        sizes = (batch, steps, heads[0], keys, dim, block_size, tables.shape[1], span, window or 0)
        shape = _Attention(*sizes, scale)
        padded = -(-dim // _LANES) * _LANES
        per_query = 2 * padded + _LANES + span
        scratch = torch.empty(_TILE * per_query + block_size * padded)
        out = qkv.new_empty(batch, steps, heads[0] * dim)
        self._attend(
            ctypes.addressof(shape),
            qkv.data_ptr(),
            rotary[0].data_ptr(),
            rotary[1].data_ptr(),
            rows.data_ptr(),
            positions.data_ptr(),
            tables.data_ptr(),
            kv[0].data_ptr(),
            kv[1].data_ptr(),
            scratch.data_ptr(),
            out.data_ptr(),
        )
        return out


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels of a dtype, or None if the device or the machine has none."""
    if device.type != "cpu" or dtype not in _NAMES:
        return None
    library = _load()
    return None if library is None else Kernels(library, dtype)


@functools.cache
def _load() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(_build()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        logger.warning("no CPU kernels, torch is used instead: %s", error)
        return None


def _build() -> Path:
    """Compile the kernels for this processor unless they are cached, and return the library.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    files = [_SOURCE, *map(_SOURCE.with_name, _HEADERS)]
    texts = [file.read_text(encoding="utf-8") for file in files]
    key = hashlib.sha256("\0".join([*texts, *_FLAGS, _processor()]).encode())
    folder = _folder()
    library = folder / f"kernels-{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler on PATH")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as own:  # other processes may build too
        output = Path(own) / library.name
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(output)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[-500:]}")
        output.replace(library)
    return library


def _folder() -> Path:
    """Return ``PACELINE_OPS_DIR``, the interpreter's environment, or the user's cache."""
    chosen = os.environ.get("PACELINE_OPS_DIR")
    if chosen:
        return Path(chosen)
    if os.access(sys.prefix, os.W_OK):
        return Path(sys.prefix) / "var" / "paceline"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def _processor() -> str:
    """Return the machine type and instruction sets of this processor."""
    info = Path("/proc/cpuinfo")
    lines: list[Any] = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"
