"""Build and call the C++ kernels; they compile in half a minute, once per machine and version.

Without a compiler the engine uses torch operations, which are slower, and whose results may differ
in the last bits between batches of different shapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from paceline.actors.atomic_file import replace_file
from paceline.actors.processor import cpuinfo, has_tiles
from paceline.actors.weights.codes import GROUP, Codes, rounded

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_HEADERS = (
    *("numbers.h", "threads.h", "products.h", "codes.h", "tiles.h", "layers.h"),
    *("attention.h", "forward.h", "tokens.h", "rollout.h", "suffixes.h"),
)
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp-simd",
    "-fno-math-errno",
    "-fno-trapping-math",
    "--param=avoid-fma-max-bits=0",  # a sum is fused in every tile, or its bits would differ
    "-shared",
    "-fPIC",
    "-pthread",
)
_FLAGS_OF_VENDOR = {"GenuineIntel": ("-DPACELINE_MULTIPLY_ADDS",)}  # see products.h
_FLAGS_OF_TILES = ("-DPACELINE_TILES_ALLOWED",)
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_TIMEOUT_S = 600  # of a start, for compiling and for waiting until another process has compiled
_POLL_S = 0.1


class _Weight(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("in", "out", "bits")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Weight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "before_mlp")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys")),
        ("eps", ctypes.c_float),
    )


class _Cache(ctypes.Structure):
    _fields_ = (("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("window", ctypes.c_int64))


class Attention(ctypes.Structure):
    """Sizes and places of an attention, as in attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "q_heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("dim", "block_size", "columns", "span", "window")),
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "slots", "tables")),
        ("scale", ctypes.c_float),
    )


class _Forward(ctypes.Structure):
    _fields_ = (
        ("attention", Attention),
        *((name, ctypes.c_int64) for name in ("experts", "tokens", "layers", "hidden")),
        *((name, ctypes.c_int64) for name in ("intermediate", "threads")),
        *((name, ctypes.c_void_p) for name in ("weights", "caches", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("x", "memory", "out")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("forward", _Forward),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm")),
        ("head", _Weight),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("vocabulary", "keep")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "states", "logits")),
    )


class _Draft(ctypes.Structure):
    _fields_ = (
        ("fuse", _Weight),
        ("norm", ctypes.c_void_p),
        ("head", _Weight),
        ("vocabulary", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("basis", _Weight),
        ("rows", ctypes.c_void_p),
    )


class _Rollout(ctypes.Structure):
    _fields_ = (
        ("forward", _Forward),
        *((name, ctypes.c_void_p) for name in ("drafts", "embedding", "token_ids", "before")),
        *((name, ctypes.c_int64) for name in ("most", "capacity", "bins")),
        *((name, ctypes.c_void_p) for name in ("limits", "least", "acceptance")),
        *((name, ctypes.c_void_p) for name in ("ids", "counts", "probs")),
    )


_LANES = 16  # of the widest vectors, as in numbers.h
ACTIVATIONS = ("silu", "swish")  # names in configs of the MLP's that the kernels have


class PackedWeight:
    """A weight ``[out, in]`` and its bias as :class:`Kernels` read them.

    Attributes:
        packed: the memory.
        bits: of a code; 0 if the weights themselves are packed.
        out: outputs.
        size: inputs.
    """

    def __init__(
        self, packed: Tensor, shape: tuple[int, int], bias: Tensor | None, bits: int
    ) -> None:
        self.packed, self.bits = packed, bits
        self.out, self.size = shape
        self._bias = bias
        bias_at = None if bias is None else bias.data_ptr()
        self.struct = _Weight(packed.data_ptr(), bias_at, self.size, self.out, bits)

    def with_bias(self, bias: Tensor | None) -> PackedWeight:
        """The same weight with a bias elsewhere in memory."""
        return PackedWeight(self.packed, (self.out, self.size), bias, self.bits)


class LayerPlan:
    """Weights of one expert's decoder layers, as :meth:`Kernels.forward` reads them."""

    def __init__(
        self,
        weights: Sequence[Sequence[PackedWeight]],
        norms: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
        eps: float,
    ) -> None:
        """Point at the weights.

        Args:
            weights: of each layer: queries, keys and values; output; gate and up; down.
            norms: of each layer: before attention, before the MLP, of queries, of keys.
            eps: of the norms.
        """
        self._held = weights, norms
        self.size = len(weights)
        self.struct = (_Layer * self.size)(
            *(
                _Layer(
                    *(part.struct for part in parts),
                    *(None if norm is None else norm.data_ptr() for norm in own),
                    eps,
                )
                for parts, own in zip(weights, norms, strict=True)
            )
        )


class CachePlan:
    """Keys and values of the layers, as :meth:`Kernels.forward` reads them."""

    def __init__(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], windows: Sequence[int | None]
    ) -> None:
        """Point at ``[blocks, block_size, kv_heads, dim]`` of each layer.

        Within a block the kernels have an order of their own, head by head (``attention.h``).

        Args:
            keys: block_size is a multiple of 16.
            values: like ``keys``.
            windows: sliding window of each layer, None for none.
        """
        assert keys[0].shape[1] % _LANES == 0
        self._held = keys, values
        self.shape = keys[0].shape
        self.struct = (_Cache * len(keys))(
            *(
                _Cache(k.data_ptr(), v.data_ptr(), window or 0)
                for k, v, window in zip(keys, values, windows, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Decoder layers of E experts and the tokens that they compute: T of R rows of every expert.

    Attributes:
        layers: of the E experts.
        expert_rows: R; some may be padding.
        caches: of the layers.
        rotary: cosine and signed sine, ``[capacity, dim]`` each.
        rows: int64 ``[B]``.
        positions: int64 ``[B, T]``.
        slots: int64 ``[B]``, index of each row among the ``E * R``; None if they are in order.
            Tokens of padding attend to nothing.
        tables: int32 ``[rows, columns]``, block tables.
        span: positions that are read, in whole blocks.
        heads: query heads and key/value heads.
        scale: of the scores.
    """

    layers: Sequence[LayerPlan]
    expert_rows: int
    caches: CachePlan
    rotary: tuple[Tensor, Tensor]
    rows: Tensor
    positions: Tensor
    slots: Tensor | None
    tables: Tensor
    span: int
    heads: tuple[int, int]
    scale: float

    def call(self, hidden: int) -> tuple[_Forward, Any]:
        """The kernels' argument for tokens of H numbers, and what must live as long as it."""
        rows, positions = self.rows.contiguous(), self.positions.contiguous()
        _, block_size, kv_heads, dim = self.caches.shape
        assert self.span % block_size == 0
        attention = Attention(
            *(*positions.shape, self.heads[0], kv_heads, dim, block_size),
            *(self.tables.shape[1], self.span, 0, rows.data_ptr(), positions.data_ptr()),
            *(None if self.slots is None else self.slots.data_ptr(), self.tables.data_ptr()),
            self.scale,
        )
        experts, tokens = len(self.layers), self.expert_rows * positions.shape[1]
        weights = _pointers(self.layers)
        intermediate = getattr(self.layers[0].struct[0].down, "in")
        call = _Forward(
            attention,
            *(experts, tokens, self.layers[0].size, hidden, intermediate, torch.get_num_threads()),
            *(ctypes.addressof(weights), ctypes.addressof(self.caches.struct)),
            *(self.rotary[0].data_ptr(), self.rotary[1].data_ptr(), None, None, None),
        )
        return call, (rows, positions, weights)


class EaglePlan:
    """What an EAGLE draft has beside its trunk, as :meth:`Kernels.rollout` reads it."""

    def __init__(
        self,
        fuse: PackedWeight,
        norm: Tensor,
        eps: float,
        head: PackedWeight,
        vocabulary: Tensor,
        screen: tuple[PackedWeight, Tensor] | None = None,
    ) -> None:
        """Point at the weights.

        Args:
            fuse: ``[H, 2H]``.
            norm: ``[H]``, the final norm.
            eps: of the norm.
            head: ``[D, H]``; with a screen ``[D, R]``, of states in its basis.
            vocabulary: int64 ``[D]``, token ids of the head's rows.
            screen: basis ``[R, H]``, and ``[V, H]``, the rows of the exact head; all drafts of a
                rollout have one of the same R, or none has.
        """
        self._held = fuse, norm, head, vocabulary, screen
        self.struct = _Draft(fuse.struct, norm.data_ptr(), head.struct, vocabulary.data_ptr(), eps)
        if screen is not None:
            self.struct.basis, self.struct.rows = screen[0].struct, screen[1].data_ptr()


def _fit(codes: Codes, weight: Tensor) -> bool:
    """Whether codes are as many as a weight's: those of a folder may be another's."""
    scales = 2 * (weight.numel() // GROUP)
    wanted = weight.numel() * codes.bits // 8, scales, scales if codes.bits == 4 else 0
    parts = codes.codes, codes.scales, codes.mins
    return wanted == tuple(0 if part is None else part.nbytes for part in parts)


def _pointers(plans: Sequence[LayerPlan] | Sequence[EaglePlan]) -> Any:
    return (ctypes.c_void_p * len(plans))(*(ctypes.addressof(own.struct) for own in plans))


def _rows_of(parts: Sequence[Tensor]) -> Any:
    width = parts[0].shape[-1] * parts[0].element_size()
    rows = [part.data_ptr() + i * width for part in parts for i in range(len(part))]
    return (ctypes.c_void_p * len(rows))(*rows)


def _paged(cache: Tensor, tables: Tensor, rows: Tensor, positions: Tensor) -> tuple[int, ...]:
    """The kernels' arguments; the caller must hold the tensors."""
    return (
        *(cache.data_ptr(), tables.data_ptr(), tables.shape[1], *cache.shape[1:]),
        *(rows.data_ptr(), positions.data_ptr(), *positions.shape),
    )


class Kernels:
    """Kernels for one dtype.

    They access raw memory: every tensor must be on the CPU, of this dtype unless another is named,
    and contiguous, and positions must be inside the rows. They use torch's number of threads.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = library[f"add_norm_{NAMES[dtype]}"]
        self._add_norm.argtypes = [pointer, pointer, pointer, ctypes.c_float, size, size, pointer]
        self._forward = library[f"forward_{NAMES[dtype]}"]
        self._forward.argtypes = [ctypes.POINTER(_Forward)]
        self._model = library[f"model_{NAMES[dtype]}"]
        self._model.argtypes, self._model.restype = [ctypes.POINTER(_Model)], ctypes.c_bool
        self._rollout = library[f"rollout_{NAMES[dtype]}"]
        self._rollout.argtypes = [ctypes.POINTER(_Rollout)]
        self._top_one = library[f"top_one_{NAMES[dtype]}"]
        self._top_one.argtypes = [pointer, size, size, pointer, pointer]
        self._read_states = library[f"read_states_{NAMES[dtype]}"]
        self._write_states = library[f"write_states_{NAMES[dtype]}"]
        for move in (self._read_states, self._write_states):
            move.argtypes = [*[pointer] * 2, *[size] * 3, *[pointer] * 2, *[size] * 2, pointer]
        self._have_finite_blocks = library[f"have_finite_blocks_{NAMES[dtype]}"]
        self._have_finite_blocks.argtypes = [
            *(ctypes.POINTER(pointer), ctypes.POINTER(size), size),
            *(pointer, size, size, pointer),
        ]
        self._have_distributions = library[f"have_distributions_{NAMES[dtype]}"]
        self._have_distributions.argtypes = [pointer, size, size]
        self._have_distributions.restype = ctypes.c_bool
        self._top_k = library[f"top_k_{NAMES[dtype]}"]
        self._top_k.argtypes = [ctypes.POINTER(pointer), *[size] * 4, pointer, pointer, pointer]
        self._top_probs = library[f"top_probs_{NAMES[dtype]}"]
        self._top_probs.argtypes = [ctypes.POINTER(pointer), *[size] * 4, *[pointer] * 3]
        self._accept = library[f"accept_{NAMES[dtype]}"]
        self._accept.argtypes = [pointer, *[size] * 3, *[pointer] * 2, size, *[pointer] * 2]
        self._packed_size = library[f"packed_size_{NAMES[dtype]}"]
        self._packed_size.argtypes = [size, size]
        self._packed_size.restype = size
        self._pack = library[f"pack_{NAMES[dtype]}"]
        self._pack.argtypes = [pointer, size, size, pointer]
        self._multiply = library[f"multiply_{NAMES[dtype]}"]
        self._multiply.argtypes = [pointer, ctypes.POINTER(_Weight), size, size, pointer]
        layers = (self._add_norm, self._forward, self._rollout, self._pack, self._multiply)
        for function in (*layers, self._top_one, self._top_k, self._top_probs, self._accept):
            function.restype = None
        self._reads_codes = dtype is torch.bfloat16
        self._codes_size, self._pack_codes = library.packed_codes_size, library.pack_weight_codes
        self._codes_size.argtypes, self._codes_size.restype = [size] * 3, size
        self._pack_codes.argtypes = [*[pointer] * 4, *[size] * 3, pointer]
        self._pack_codes.restype = ctypes.c_bool
        self._work_size = library.forward_work_size
        self._model_work_size = library.model_memory_size
        for function in (self._work_size, self._model_work_size):
            function.argtypes, function.restype = [ctypes.POINTER(_Forward)], size

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        codes: Codes | None = None,
        into: PackedWeight | None = None,
    ) -> PackedWeight:
        """Lay a weight out as the products read it: its codes if they decode to it.

        Args:
            weight: ``[out, in]``, any strides.
            bias: ``[out]`` or None.
            codes: of the checkpoint's quantized weight, if there is one.
            into: an earlier result for a weight of this shape, to be overwritten.
        """
        weight = weight.contiguous()
        out, size = weight.shape
        coded = None if codes is None else self._coded(weight, codes)
        if coded is not None:
            assert codes is not None
            return PackedWeight(coded, (out, size), bias, codes.bits)
        if into is None or into.bits:
            packed = weight.new_empty(self._packed_size(size, out))
        else:
            packed = into.packed
        self._pack(weight.data_ptr(), size, out, packed.data_ptr())
        return PackedWeight(packed, (out, size), bias, 0)

    def pack_rounded(
        self, weight: Tensor, bias: Tensor | None = None, into: PackedWeight | None = None
    ) -> PackedWeight:
        """As :meth:`pack`, rounded to codes of 8 bits if the kernels read such."""
        weight = weight.contiguous()
        out, size = weight.shape
        if size % GROUP or not self._codes_bytes(weight, 8):
            return self.pack(weight, bias, into=into)
        own = None if into is None or into.bits != 8 else into.packed
        packed, _ = self._decoded(weight, rounded(weight), own)
        return PackedWeight(packed, (out, size), bias, 8)

    def _codes_bytes(self, weight: Tensor, bits: int) -> int:
        out, size = weight.shape
        return int(self._codes_size(size, out, bits)) if self._reads_codes else 0

    def _coded(self, weight: Tensor, codes: Codes) -> Tensor | None:
        if not self._codes_bytes(weight, codes.bits) or not _fit(codes, weight):
            return None
        packed, exact = self._decoded(weight, codes)
        return packed if exact else None

    def _decoded(
        self, weight: Tensor, codes: Codes, into: Tensor | None = None
    ) -> tuple[Tensor, bool]:
        """Codes as the kernels read them, and whether they decode to the weight."""
        out, size = weight.shape
        packed = into
        if packed is None:
            packed = torch.empty(self._codes_bytes(weight, codes.bits), dtype=torch.uint8)
        parts = [
            None if part is None else part.contiguous()
            for part in (codes.codes, codes.scales, codes.mins)
        ]
        pointers = [None if part is None else part.data_ptr() for part in parts]
        shape = (size, out, codes.bits)
        exact = self._pack_codes(weight.data_ptr(), *pointers, *shape, packed.data_ptr())
        return packed, bool(exact)

    def multiply(self, x: Tensor, weight: PackedWeight) -> Tensor:
        """``x W^T + bias``, ``[..., in]`` to ``[..., out]``; a row's bits depend on it alone."""
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], weight.out)
        rows, threads = x.numel() // weight.size, torch.get_num_threads()
        self._multiply(x.data_ptr(), weight.struct, rows, threads, y.data_ptr())
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

    def forward(self, x: Tensor, plan: ForwardPlan) -> Tensor:
        """Run decoder layers; the new tokens' keys and values are stored.

        Args:
            x: residual stream ``[E, R * T, H]``; modified in place.
            plan: layers and tokens.

        Returns:
            ``[E, R * T, H]``, the last MLP's output, not yet added to ``x``.
        """
        assert x.is_contiguous()
        call, held = plan.call(x.shape[2])
        out = torch.empty_like(x)
        size = self._work_size(call)
        memory = x.new_empty(size) if plan.slots is None else x.new_zeros(size)
        call.x, call.memory, call.out = x.data_ptr(), memory.data_ptr(), out.data_ptr()
        self._forward(call)
        del held
        return out

    def model(
        self,
        plan: ForwardPlan,
        embedding: Tensor,
        norm: Tensor,
        eps: float,
        head: PackedWeight,
        token_ids: Tensor,
        keep: int,
    ) -> tuple[Tensor, Tensor]:
        """Run a whole model of a single expert, see :meth:`forward`.

        Args:
            plan: layers and tokens.
            embedding: ``[V, H]``.
            norm: ``[H]``, the final one.
            eps: of the norm.
            head: ``[V', H]``.
            token_ids: int64 ``[B, T]``.
            keep: logits of the last ``keep`` tokens; 0 is all.

        Returns:
            logits ``[B, T or keep, V']``; states after the norm, ``[B, T, H]``.

        Raises:
            IndexError: a token id is not below V.
        """
        token_ids = token_ids.contiguous()
        (batch, steps), hidden = token_ids.shape, embedding.shape[1]
        keep = min(keep, steps) or steps
        call, held = plan.call(hidden)
        states = embedding.new_empty(batch, steps, hidden)
        logits = embedding.new_empty(batch, keep, head.out)
        memory = embedding.new_empty(self._model_work_size(call))
        call.memory = memory.data_ptr()
        ends = embedding.data_ptr(), norm.data_ptr(), head.struct, eps, len(embedding), keep
        outputs = token_ids.data_ptr(), states.data_ptr(), logits.data_ptr()
        known = self._model(_Model(call, *ends, *outputs))
        del held, memory
        if not known:
            raise IndexError("a token id is not in the model's vocabulary")
        return logits, states

    def rollout(
        self,
        plan: ForwardPlan,
        drafts: Sequence[EaglePlan],
        embedding: Tensor,
        token_ids: Tensor,
        before: Tensor,
        limits: Tensor,
        ends: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft the most probable tokens of EAGLE drafts, all steps of a round.

        A row ends before a token with which the expected acceptance of all that it drafted, by its
        tokens' probabilities, falls below its least; its first token is always drafted.

        Args:
            plan: the trunks, and the tokens that the first step computes.
            drafts: of the plan's E experts.
            embedding: ``[V, H]``, the target's.
            token_ids: int64 ``[B, T]``, of the plan's positions.
            before: ``[B, T, H]``, the target's hidden states of the positions before.
            limits: int64 ``[B]``, most tokens of a row, at least 1.
            ends: float32 ``[B]``, the least, and ``[B, bins]``, acceptance by probability.

        Returns:
            tokens int64 ``[B, k]`` and their probabilities float32 ``[B, k]``, zeros behind a row's
            own; int64 ``[B]``, how many each row drafted; k is the most of them.
        """
        call, held = plan.call(embedding.shape[1])
        token_ids, before = token_ids.contiguous(), before.contiguous()
        batch, most = len(token_ids), max(limits.tolist())
        ids = torch.empty(batch, most, dtype=torch.int64)
        probs, counts = torch.empty(batch, most), torch.empty_like(limits)
        own = _pointers(drafts)
        rollout = _Rollout(
            call,
            *(ctypes.addressof(own), embedding.data_ptr()),
            *(token_ids.data_ptr(), before.data_ptr(), most, plan.rotary[0].shape[0]),
            ends[1].shape[1],
            *(part.data_ptr() for part in (limits, *ends, ids, counts, probs)),
        )
        self._rollout(rollout)
        del held
        longest = max(counts.tolist())
        if longest < most:
            ids, probs = ids[:, :longest].contiguous(), probs[:, :longest].contiguous()
        return ids, probs, counts

    def read_states(self, cache: Tensor, tables: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Read states ``[B, T, H]`` of a paged cache, zeros at negative positions.

        Args:
            cache: ``[blocks, block_size, H]``.
            tables: int32 ``[rows, columns]``.
            rows: int64 ``[B]``.
            positions: int64 ``[B, T]``.
        """
        positions = positions.contiguous()
        out = cache.new_empty(*positions.shape, cache.shape[-1])
        self._read_states(*_paged(cache, tables, rows, positions), out.data_ptr())
        return out

    def write_states(
        self, cache: Tensor, tables: Tensor, rows: Tensor, positions: Tensor, states: Tensor
    ) -> None:
        """Write what :meth:`read_states` reads; positions are not negative."""
        positions, states = positions.contiguous(), states.contiguous()
        self._write_states(*_paged(cache, tables, rows, positions), states.data_ptr())

    def have_finite_blocks(self, parts: Sequence[Tensor], blocks: Tensor) -> Tensor:
        """Whether blocks of a paged cache hold no NaN and no infinity.

        Args:
            parts: ``[all blocks, ...]``, contiguous.
            blocks: int64 ``[N]``.

        Returns:
            bool ``[N]``.
        """
        finite, count = torch.empty(len(blocks), dtype=torch.bool), len(parts)
        self._have_finite_blocks(
            (ctypes.c_void_p * count)(*(part.data_ptr() for part in parts)),
            (ctypes.c_int64 * count)(*(part.stride(0) for part in parts)),
            *(count, blocks.data_ptr(), len(blocks), torch.get_num_threads(), finite.data_ptr()),
        )
        return finite

    def have_distributions(self, logits: Tensor) -> bool:
        """Whether all logits ``[..., V]`` give distributions, see top_tokens."""
        logits = logits.contiguous()
        size = logits.shape[-1]
        return bool(self._have_distributions(logits.data_ptr(), logits.numel() // size, size))

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

    def top_k(self, parts: Sequence[Tensor], k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the k largest entries along the last axis, descending.

        Args:
            parts: ``[m, V]`` each, M rows in all.
            k: at most V.

        Returns:
            float32 values and int64 indices ``[M, k]``, float32 logsumexp ``[M]``.
        """
        parts = [part.contiguous() for part in parts]  # keeps copies alive
        rows = _rows_of(parts)
        ids = torch.empty(len(rows), k, dtype=torch.int64)
        values, logsumexp = torch.empty(len(rows), k), torch.empty(len(rows))
        self._top_k(
            rows,
            len(rows),
            parts[0].shape[-1],
            k,
            torch.get_num_threads(),
            ids.data_ptr(),
            values.data_ptr(),
            logsumexp.data_ptr(),
        )
        return values, ids, logsumexp

    def top_probs(self, logits: Tensor, temperature: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the k largest entries of ``softmax(logits / temperature)``, descending.

        Args:
            logits: ``[N, V]``.
            temperature: float32 ``[N]``.
            k: at most V.

        Returns:
            float32 probabilities and int64 indices ``[N, k]``.
        """
        logits, temperature = logits.contiguous(), temperature.contiguous()
        rows = _rows_of([logits])
        ids = torch.empty(len(rows), k, dtype=torch.int64)
        probs = torch.empty(len(rows), k)
        self._top_probs(
            rows,
            len(rows),
            logits.shape[-1],
            k,
            torch.get_num_threads(),
            temperature.data_ptr(),
            ids.data_ptr(),
            probs.data_ptr(),
        )
        return probs, ids

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
            torch.get_num_threads(),
            accepted.data_ptr(),
            final.data_ptr(),
        )
        return accepted, final


def gumbel_max(probs: Tensor, keys: Tensor, ids: Tensor | None) -> Tensor | None:
    """See gumbel.py; None where there are no kernels.

    Args:
        probs: float32 ``[N, K]``.
        keys: int64 ``[N]``.
        ids: int64 ``[N, K]``; None if they are all tokens.
    """
    library = load_library() if probs.device.type == "cpu" else None
    if library is None:
        return None
    probs, keys = probs.contiguous(), keys.contiguous()
    ids = None if ids is None else ids.contiguous()
    columns = torch.empty_like(keys)
    library.gumbel_max_rows(
        *map(ctypes.c_void_p, (probs.data_ptr(), None if ids is None else ids.data_ptr())),
        *map(ctypes.c_int64, probs.shape),
        ctypes.c_void_p(keys.data_ptr()),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(columns.data_ptr()),
    )
    return columns


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels of a dtype, or None if the device or the machine has none."""
    if device.type != "cpu" or dtype not in NAMES:
        return None
    library = load_library()
    return None if library is None else Kernels(library, dtype)


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if need be, or None if the machine has no compiler."""
    flags = [*_FLAGS, *_FLAGS_OF_VENDOR.get(cpuinfo("vendor_id"), ())]
    flags += _FLAGS_OF_TILES if has_tiles() else ()
    texts = [_SOURCE.with_name(name).read_text("utf-8") for name in (_SOURCE.name, *_HEADERS)]
    processor = f"{platform.machine()} {cpuinfo('flags') or cpuinfo('Features')}"
    key = hashlib.sha256("\0".join([*texts, *flags, processor]).encode()).hexdigest()
    places = [folder / f"kernels-{key[:16]}.so" for folder in _folders()]
    for place in places:
        with contextlib.suppress(OSError):  # there is none, or a crash has left it broken
            return ctypes.CDLL(str(place))
    for place in places:
        try:
            return _build(place, flags)
        except OSError as error:
            logger.warning("no CPU kernels in %s: %s", place.parent, error)
        except (RuntimeError, subprocess.SubprocessError) as error:
            logger.warning("the CPU kernels do not compile: %s", error)
            break
    logger.warning("no CPU kernels, torch is used instead")
    return None


def _build(place: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Compile the kernels unless another process does so, and load them.

    Raises:
        OSError: the folder cannot be written, or the library in it cannot be loaded.
        RuntimeError: there is no compiler, it fails, or another process compiles for too long.
        subprocess.TimeoutExpired: it takes too long.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("ab") as lock:
        _acquire(lock, deadline)
        with contextlib.suppress(OSError):  # built by another process in the meantime
            return ctypes.CDLL(str(place))
        replace_file(place, lambda output: _compile(output, flags, deadline))
    return ctypes.CDLL(str(place))


def _acquire(lock: IO[bytes], deadline: float) -> None:
    """Wait until no other process compiles, or until a monotonic time.

    Raises:
        RuntimeError: another process still compiles then.
    """
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RuntimeError("another process compiles for too long") from None
            time.sleep(_POLL_S)
        except OSError:  # a file system without locks: each process compiles
            return


def _compile(output: Path, flags: Sequence[str], deadline: float) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("no C++ compiler on PATH")
    command = [compiler, *flags, str(_SOURCE), "-o", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            _, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.0))
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # its children compile, and would go on
            raise
    if process.returncode:
        raise RuntimeError(f"{compiler} failed: {errors.strip()[-500:]}")


def _folders() -> list[Path]:
    """Return ``PACELINE_OPS_DIR``, or the interpreter's environment and the user's cache."""
    chosen = os.environ.get("PACELINE_OPS_DIR")
    if chosen:
        return [Path(chosen)]
    folders = [Path(sys.prefix) / "var" / "paceline"]
    with contextlib.suppress(RuntimeError):  # a user without a home
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folders.append(cache / "paceline")
    return folders
