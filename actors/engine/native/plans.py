"""What the C++ kernels read: structures in memory, and objects that hold what those point at."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class WeightStruct(ctypes.Structure):
    """A product's weight, as in products.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("in", "out", "bits")),
    )


class LayerStruct(ctypes.Structure):
    """A decoder layer's weights, as in forward.h."""

    _fields_ = (
        *((name, WeightStruct) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("before_attention", "before_mlp")),
        *((name, ctypes.c_void_p) for name in ("queries", "keys")),
        ("eps", ctypes.c_float),
    )


class CacheStruct(ctypes.Structure):
    """Keys and values of a layer, as in forward.h."""

    _fields_ = (("keys", ctypes.c_void_p), ("values", ctypes.c_void_p), ("window", ctypes.c_int64))


class AttentionStruct(ctypes.Structure):
    """Sizes and places of an attention, as in attention.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "steps", "q_heads", "kv_heads")),
        *((name, ctypes.c_int64) for name in ("dim", "block_size", "columns", "span", "window")),
        *((name, ctypes.c_void_p) for name in ("rows", "positions", "slots", "tables")),
        ("scale", ctypes.c_float),
    )


class ForwardStruct(ctypes.Structure):
    """A forward of layers, as in forward.h."""

    _fields_ = (
        ("attention", AttentionStruct),
        *((name, ctypes.c_int64) for name in ("experts", "tokens", "layers", "hidden")),
        *((name, ctypes.c_int64) for name in ("intermediate", "threads")),
        *((name, ctypes.c_void_p) for name in ("weights", "caches", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("x", "memory", "out")),
    )


class ModelStruct(ctypes.Structure):
    """A forward of a whole model, as in forward.h."""

    _fields_ = (
        ("forward", ForwardStruct),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm")),
        ("head", WeightStruct),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("vocabulary", "rows", "keep")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "states", "logits")),
    )


class DraftStruct(ctypes.Structure):
    """An EAGLE draft, as in rollout.h."""

    _fields_ = (
        ("fuse", WeightStruct),
        ("norm", ctypes.c_void_p),
        ("head", WeightStruct),
        ("vocabulary", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("basis", WeightStruct),
        ("rows", ctypes.c_void_p),
    )


class RolloutStruct(ctypes.Structure):
    """A rollout of drafts, as in rollout.h."""

    _fields_ = (
        ("forward", ForwardStruct),
        *((name, ctypes.c_void_p) for name in ("drafts", "embedding", "token_ids", "before")),
        *((name, ctypes.c_int64) for name in ("most", "capacity", "bins")),
        *((name, ctypes.c_void_p) for name in ("limits", "least", "acceptance")),
        *((name, ctypes.c_void_p) for name in ("ids", "counts", "probs")),
    )


_LANES = 16  # of the widest vectors, as in numbers.h


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
        self.struct = WeightStruct(packed.data_ptr(), bias_at, self.size, self.out, bits)

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
        self.struct = (LayerStruct * self.size)(
            *(
                LayerStruct(
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
        self.struct = (CacheStruct * len(keys))(
            *(
                CacheStruct(k.data_ptr(), v.data_ptr(), window or 0)
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

    def call(self, hidden: int) -> tuple[ForwardStruct, Any]:
        """The kernels' argument for tokens of H numbers, and what must live as long as it."""
        rows, positions = self.rows.contiguous(), self.positions.contiguous()
        _, block_size, kv_heads, dim = self.caches.shape
        assert self.span % block_size == 0
        attention = AttentionStruct(
            *(*positions.shape, self.heads[0], kv_heads, dim, block_size),
            *(self.tables.shape[1], self.span, 0, rows.data_ptr(), positions.data_ptr()),
            *(None if self.slots is None else self.slots.data_ptr(), self.tables.data_ptr()),
            self.scale,
        )
        experts, tokens = len(self.layers), self.expert_rows * positions.shape[1]
        weights = pointers(self.layers)
        intermediate = getattr(self.layers[0].struct[0].down, "in")
        call = ForwardStruct(
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
        self.struct = DraftStruct(
            fuse.struct, norm.data_ptr(), head.struct, vocabulary.data_ptr(), eps
        )
        if screen is not None:
            self.struct.basis, self.struct.rows = screen[0].struct, screen[1].data_ptr()


def pointers(plans: Sequence[LayerPlan] | Sequence[EaglePlan]) -> Any:
    """Addresses of the plans' structures, as an array of the kernels."""
    return (ctypes.c_void_p * len(plans))(*(ctypes.addressof(own.struct) for own in plans))
