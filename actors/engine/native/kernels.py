"""The C++ kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.actors.engine.native import library
from paceline.actors.engine.native.plans import (
    EaglePlan,
    ForwardPlan,
    ForwardStruct,
    ModelStruct,
    PackedWeight,
    RolloutStruct,
    WeightStruct,
    pointers,
)
from paceline.actors.weights.codes import GROUP, Codes, rounded

NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
ACTIVATIONS = ("silu", "swish")  # names in configs of the MLP's that the kernels have


def _fit(codes: Codes, weight: Tensor) -> bool:
    """Whether codes are as many as a weight's: those of a folder may be another's."""
    scales = 2 * (weight.numel() // GROUP)
    wanted = weight.numel() * codes.bits // 8, scales, scales if codes.bits == 4 else 0
    parts = codes.codes, codes.scales, codes.mins
    return wanted == tuple(0 if part is None else part.nbytes for part in parts)


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

    def __init__(self, loaded: ctypes.CDLL, dtype: torch.dtype) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._add_norm = loaded[f"add_norm_{NAMES[dtype]}"]
        self._add_norm.argtypes = [pointer, pointer, pointer, ctypes.c_float, size, size, pointer]
        self._forward = loaded[f"forward_{NAMES[dtype]}"]
        self._forward.argtypes = [ctypes.POINTER(ForwardStruct)]
        self._model = loaded[f"model_{NAMES[dtype]}"]
        self._model.argtypes, self._model.restype = [ctypes.POINTER(ModelStruct)], ctypes.c_bool
        self._rollout = loaded[f"rollout_{NAMES[dtype]}"]
        self._rollout.argtypes = [ctypes.POINTER(RolloutStruct)]
        self._top_one = loaded[f"top_one_{NAMES[dtype]}"]
        self._top_one.argtypes = [pointer, size, size, pointer, pointer]
        self._read_states = loaded[f"read_states_{NAMES[dtype]}"]
        self._write_states = loaded[f"write_states_{NAMES[dtype]}"]
        for move in (self._read_states, self._write_states):
            move.argtypes = [*[pointer] * 2, *[size] * 3, *[pointer] * 2, *[size] * 2, pointer]
        self._have_finite_blocks = loaded[f"have_finite_blocks_{NAMES[dtype]}"]
        self._have_finite_blocks.argtypes = [
            *(ctypes.POINTER(pointer), ctypes.POINTER(size), size),
            *(pointer, size, size, pointer),
        ]
        self._have_distributions = loaded[f"have_distributions_{NAMES[dtype]}"]
        self._have_distributions.argtypes = [pointer, size, size, size]
        self._have_distributions.restype = ctypes.c_bool
        self._top_k = loaded[f"top_k_{NAMES[dtype]}"]
        self._top_k.argtypes = [ctypes.POINTER(pointer), *[size] * 4, pointer, pointer, pointer]
        self._keep_top = loaded[f"keep_top_{NAMES[dtype]}"]
        self._keep_top.argtypes = [pointer, *[size] * 3, *[pointer] * 4, size, *[pointer] * 3]
        self._softmax_at = loaded[f"softmax_at_{NAMES[dtype]}"]
        self._softmax_at.argtypes = [*[pointer] * 2, *[size] * 2, pointer, size, pointer]
        self._accept = loaded[f"accept_{NAMES[dtype]}"]
        self._accept.argtypes = [pointer, *[size] * 3, *[pointer] * 2, size, *[pointer] * 2]
        self._packed_size = loaded[f"packed_size_{NAMES[dtype]}"]
        self._packed_size.argtypes = [size, size]
        self._packed_size.restype = size
        self._pack = loaded[f"pack_{NAMES[dtype]}"]
        self._pack.argtypes = [pointer, size, size, pointer]
        self._multiply = loaded[f"multiply_{NAMES[dtype]}"]
        self._multiply.argtypes = [pointer, ctypes.POINTER(WeightStruct), size, size, pointer]
        layers = (self._add_norm, self._forward, self._rollout, self._pack, self._multiply)
        selection = (self._top_one, self._top_k, self._keep_top, self._softmax_at, self._accept)
        for function in (*layers, *selection):
            function.restype = None
        self._reads_codes = dtype is torch.bfloat16
        self._codes_size, self._pack_codes = loaded.packed_codes_size, loaded.pack_weight_codes
        self._codes_size.argtypes, self._codes_size.restype = [size] * 3, size
        self._pack_codes.argtypes = [*[pointer] * 4, *[size] * 3, pointer]
        self._pack_codes.restype = ctypes.c_bool
        self._work_size = loaded.forward_work_size
        self._model_work_size = loaded.model_memory_size
        for function in (self._work_size, self._model_work_size):
            function.argtypes, function.restype = [ctypes.POINTER(ForwardStruct)], size

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
        logit_rows: int | None = None,
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
            logit_rows: of the first L rows alone; None is B.

        Returns:
            logits ``[L, T or keep, V']``; states after the norm, ``[B, T, H]``.

        Raises:
            IndexError: a token id is not below V.
        """
        token_ids = token_ids.contiguous()
        (batch, steps), hidden = token_ids.shape, embedding.shape[1]
        keep = min(keep, steps) or steps
        logit_rows = batch if logit_rows is None else logit_rows
        call, held = plan.call(hidden)
        states = embedding.new_empty(batch, steps, hidden)
        logits = embedding.new_empty(logit_rows, keep, head.out)
        memory = embedding.new_empty(self._model_work_size(call))
        call.memory = memory.data_ptr()
        ends = embedding.data_ptr(), norm.data_ptr(), head.struct, eps, len(embedding)
        outputs = token_ids.data_ptr(), states.data_ptr(), logits.data_ptr()
        known = self._model(ModelStruct(call, *ends, logit_rows, keep, *outputs))
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
        own = pointers(drafts)
        rollout = RolloutStruct(
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
        size, threads = logits.shape[-1], torch.get_num_threads()
        rows = logits.numel() // size
        return bool(self._have_distributions(logits.data_ptr(), rows, size, threads))

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

    def keep_top(
        self, logits: Tensor, params: Sequence[Tensor], k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Filter distributions down to at most k tokens, see sampling.py.

        Args:
            logits: ``[N, V]``.
            params: ``top_p``, ``top_k``, ``min_p`` and ``temperature``, ``[N]`` each.
            k: less than V.

        Returns:
            float32 probabilities and int64 ids ``[N, k]``; bool ``[N]``, whether more may be kept.
        """
        logits = logits.contiguous()
        top_p, top_k, min_p, temperature = (part.contiguous() for part in params)
        (rows, vocab), own = logits.shape, (temperature, top_p, top_k, min_p)
        probs, ids = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        more = torch.empty(rows, dtype=torch.bool)
        self._keep_top(
            *(logits.data_ptr(), rows, vocab, k, *(part.data_ptr() for part in own)),
            *(torch.get_num_threads(), ids.data_ptr(), probs.data_ptr(), more.data_ptr()),
        )
        return probs, ids, more

    def softmax_at(self, logits: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
        """See top_tokens."""
        logits, temperature = logits.contiguous(), temperature.contiguous()
        probs = torch.empty(logits.shape)
        self._softmax_at(
            logits.data_ptr(),
            rows.data_ptr(),
            len(rows),
            logits.shape[-1],
            temperature.data_ptr(),
            torch.get_num_threads(),
            probs.data_ptr(),
        )
        return probs

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
    loaded = library.load_library() if probs.device.type == "cpu" else None
    if loaded is None:
        return None
    probs, keys = probs.contiguous(), keys.contiguous()
    ids = None if ids is None else ids.contiguous()
    columns = torch.empty_like(keys)
    loaded.gumbel_max_rows(
        *map(ctypes.c_void_p, (probs.data_ptr(), None if ids is None else ids.data_ptr())),
        *map(ctypes.c_int64, probs.shape),
        ctypes.c_void_p(keys.data_ptr()),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(columns.data_ptr()),
    )
    return columns


def sample(
    probs: Tensor,
    ids: Tensor | None,
    drafts: tuple[Tensor, Tensor, Tensor, Tensor],
    uniform: Tensor,
) -> tuple[Tensor, Tensor] | None:
    """Speculative sampling, see rejection_sampler.py; None where there are no kernels.

    Args:
        probs: float32 ``[R, k + 1, K]``, of candidates.
        ids: int64 ``[R, k + 1, K]``, which, ascending; None: all tokens.
        drafts: tokens int64 ``[R, k]``; how many of them int64 ``[R]``; int64 and float32
            ``[R, k, S]``, what each was drawn from.
        uniform: float64 ``[R, k + 1]``, in [0, 1).

    Returns:
        how many are accepted, and the token behind them, int64 ``[R]`` each.
    """
    loaded = library.load_library() if probs.device.type == "cpu" else None
    if loaded is None:
        return None
    probs, ids = probs.contiguous(), None if ids is None else ids.contiguous()
    tokens, counts, support, q = (part.contiguous() for part in drafts)
    accepted, final = torch.empty_like(counts), torch.empty_like(counts)
    rows, steps, width = support.shape
    loaded.sample_rows(
        *(ctypes.c_void_p(None if part is None else part.data_ptr()) for part in (probs, ids)),
        *map(ctypes.c_int64, (rows, steps, probs.shape[-1])),
        *(ctypes.c_void_p(part.data_ptr()) for part in (tokens, counts, support, q)),
        ctypes.c_int64(width),
        ctypes.c_void_p(uniform.data_ptr()),
        ctypes.c_int64(torch.get_num_threads()),
        *(ctypes.c_void_p(part.data_ptr()) for part in (accepted, final)),
    )
    return accepted, final


@functools.cache
def kernels_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """Return the kernels of a dtype, or None if the device or the machine has none."""
    if device.type != "cpu" or dtype not in NAMES:
        return None
    loaded = library.load_library()
    return None if loaded is None else Kernels(loaded, dtype)
