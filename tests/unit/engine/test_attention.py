"""Attention over KV blocks, by the kernels and by torch, against the plain computation."""

from __future__ import annotations

import ctypes

import pytest
import torch
from processors import PROCESSORS, WIDE, marked, use_kernels_of
from torch import Tensor

from paceline.actors.engine.attention import StepContext, attend
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.native import library
from paceline.actors.engine.native.kernels import NAMES
from paceline.actors.engine.native.plans import AttentionStruct

ROWS, CAPACITY = 3, 150
BEHIND = (60, 0, 97)  # cached positions of the three rows
HEADS = [(1, 1), (6, 2), (15, 5)]  # of which at most four are taken together


def plain(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """``[T, heads, dim]`` queries of the last T of S positions, ``[S, kv_heads, dim]``."""
    steps, span, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (part.double().repeat_interleave(group, dim=1) for part in (k, v))
    at = torch.arange(span - steps, span)[:, None]
    seen = torch.arange(span)
    hidden = (seen > at) | (seen <= at - (window or span))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * 0.3
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param  # type: ignore[no-any-return]


def has_pairs() -> bool:
    """Whether the kernels arrange bfloat16 in pairs."""
    return bool(torch.cpu._is_avx2_supported())


class Case:
    """Rows of different lengths, whose blocks lie between each other's, and new tokens."""

    def __init__(self, heads: tuple[int, int], dim: int, steps: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(dim)
        self.heads, self.dim, self.steps = heads, dim, steps
        self.kv = KVCache([(heads[1], dim)], ROWS + 1, CAPACITY, dtype, "cpu")
        for length in (30, 70, CAPACITY):
            for row in (2, 0, 1):
                assert self.kv.allocate(row, min(length, BEHIND[row] + steps))
        self.cached = [
            torch.randn(2, behind, heads[1], dim, generator=generator).to(dtype)
            for behind in BEHIND
        ]
        self.q, self.k, self.v = (
            torch.randn(ROWS, steps, count, dim, generator=generator).to(dtype)
            for count in (heads[0], heads[1], heads[1])
        )
        positions = torch.tensor(BEHIND)[:, None] + torch.arange(steps)
        span = max(BEHIND) + steps
        self.step = StepContext.at(self.kv, torch.arange(ROWS), positions, span)

    def write_cached(self) -> None:
        """Write what the rows hold already, as torch's attention arranges it."""
        for row, (behind, cached) in enumerate(zip(BEHIND, self.cached, strict=True)):
            if behind:
                before = torch.arange(behind)[None]
                step = StepContext.at(self.kv, torch.tensor([row]), before, behind)
                step.write(0, *(part[None].transpose(1, 2) for part in cached))

    def attend(
        self,
        rows: list[int],
        start: Tensor,
        qkv: Tensor,
        window: int | None = None,
        threads: int = 1,
    ) -> Tensor:
        """The kernel alone, for ``[B, T, (heads + 2 * kv_heads) * dim]`` from a position on."""
        positions = start[:, None] + torch.arange(qkv.shape[1])
        step = StepContext.at(self.kv, torch.tensor(rows), positions, int(positions.max()) + 1)
        still = torch.ones(CAPACITY, self.dim).to(qkv), torch.zeros(CAPACITY, self.dim).to(qkv)
        at = step.rows, step.positions, self.kv.block_tables, step.span
        kv = self.kv.keys[0], self.kv.values[0]
        return attend_natively(qkv, still, *at, kv, self.heads, window, threads)

    def attend_to_cached(self) -> None:
        """Let the kernel write what the rows hold already."""
        for row, (behind, cached) in enumerate(zip(BEHIND, self.cached, strict=True)):
            if behind:
                query = torch.ones(behind, self.heads[0], self.dim).to(cached)
                qkv = torch.cat((query, *cached), dim=1).flatten(1)[None]
                self.attend([row], torch.tensor([0]), qkv)

    def stored_keys(self, row: int, *, native: bool) -> Tensor:
        """``[positions, kv_heads, dim]`` of a row's blocks."""
        blocks = self.kv.keys[0][self.kv.block_tables[row].long()]
        count, size, heads, dim = blocks.shape
        if native and self.k.dtype is torch.bfloat16 and dim % 32 == 0 and has_pairs():
            words = blocks.reshape(count, heads, size // 16, dim // 2, 16, 2)
            blocks = words.permute(0, 2, 4, 1, 3, 5)
        elif native:
            blocks = blocks.reshape(count, heads, size, dim).transpose(1, 2)
        return blocks.reshape(-1, heads, dim)

    def check(self, found: Tensor, window: int | None, *, native: bool) -> None:
        """``[B, T, heads, dim]`` is right, and so is what was stored."""
        tolerance = 1e-5 if found.dtype is torch.float32 else 0.02
        for row, (behind, cached) in enumerate(zip(BEHIND, self.cached, strict=True)):
            k, v = (
                torch.cat((old, new[row]))
                for old, new in zip(cached, (self.k, self.v), strict=True)
            )
            wanted = plain(self.q[row], k, v, window)
            torch.testing.assert_close(found[row].double(), wanted, rtol=tolerance, atol=tolerance)
            stored = self.stored_keys(row, native=native)[: behind + self.steps]
            assert torch.equal(stored, k)


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("steps", [1, 5, 37])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gathered_blocks(
    heads: tuple[int, int], steps: int, window: int | None, dtype: torch.dtype
) -> None:
    case = Case(heads, 24, steps, dtype)
    case.write_cached()
    parts = (part.transpose(1, 2) for part in (case.q, case.k, case.v))
    case.check(attend(case.step, 0, *parts, 0.3, window), window, native=False)


def attend_natively(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    rows: Tensor,
    positions: Tensor,
    tables: Tensor,
    span: int,
    kv: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    window: int | None = None,
    threads: int = 1,
) -> Tensor:
    """The kernel alone, as Kernels.forward uses it in every layer."""
    loaded = library.load_library()
    if loaded is None:
        pytest.skip("no compiler made the kernels")
    batch, steps, _ = qkv.shape
    _, block_size, keys, dim = kv[0].shape
    positions = positions.contiguous()
    shape = AttentionStruct(
        *(batch, steps, heads[0], keys, dim, block_size, tables.shape[1], span, window or 0),
        *(rows.data_ptr(), positions.data_ptr(), None, tables.data_ptr()),
        0.3,
    )
    out = qkv.new_empty(batch, steps, heads[0] * dim)
    tensors = (qkv, *rotary, *kv, out)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    loaded[f"attend_{NAMES[qkv.dtype]}"](ctypes.byref(shape), ctypes.c_int64(threads), *pointers)
    return out


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("steps", [1, 5, 37])
@pytest.mark.parametrize("dim", [4, 24, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_kernel(
    heads: tuple[int, int], dim: int, steps: int, window: int | None, dtype: torch.dtype
) -> None:
    case = Case(heads, dim, steps, dtype)
    case.attend_to_cached()
    qkv = torch.cat((case.q, case.k, case.v), dim=2).flatten(2)
    found = case.attend([0, 1, 2], torch.tensor(BEHIND), qkv, window=window)
    case.check(found.view(ROWS, steps, heads[0], dim), window, native=True)


@pytest.mark.parametrize("dim", [24, 96])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("processor", marked(PROCESSORS))
def test_other_processors_kernels(
    processor: str,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kernels_of(processor, monkeypatch)
    monkeypatch.setitem(globals(), "has_pairs", lambda: processor in WIDE)
    test_the_kernel(heads, dim, 5, 20, dtype)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_depend_neither_on_other_tokens_nor_on_threads(
    heads: tuple[int, int], dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Nor on what lies behind a token's own position."""
    case = Case(heads, dim, 5, dtype)
    case.attend_to_cached()
    qkv = torch.cat((case.q, case.k, case.v), dim=2).flatten(2)

    def run(rows: list[int], steps: slice, threads: int = 1) -> Tensor:
        own = qkv[rows][:, steps].contiguous()
        start = torch.tensor(BEHIND)[rows] + steps.start
        return case.attend(rows, start, own, window=window, threads=threads)

    whole = run([0, 1, 2], slice(0, 5))
    assert torch.equal(run([0, 1, 2], slice(0, 5), threads=2), whole)
    for row in range(ROWS):
        for step in range(5):
            at = BEHIND[row] + step  # what lies behind the token must not be read
            behind = len(case.kv.blocks(row)) * case.kv.block_size - at
            case.attend(
                [row], torch.tensor([at]), qkv.new_full((1, behind, qkv.shape[2]), torch.nan)
            )
            own = run([row], slice(step, step + 1))
            assert torch.equal(own, whole[row : row + 1, step : step + 1]), (row, step)


def test_padding_beyond_a_rows_blocks_does_not_affect_others(dtype: torch.dtype) -> None:
    """A row with blocks for one token in a step of nine: as alone, and its neighbours as ever."""
    heads, dim, steps = (4, 2), 16, 9
    kv = KVCache([(2, dim)], 2, 32, dtype, "cpu")
    assert kv.allocate(0, 16)
    assert kv.allocate(1, 32)
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(2, steps, 8 * dim, generator=generator).to(dtype)
    still = torch.ones(32, dim, dtype=dtype), torch.zeros(32, dim, dtype=dtype)
    stored = kv.keys[0], kv.values[0]

    def run(rows: list[int], count: int, start: int) -> Tensor:
        positions = (start + torch.arange(count)).expand(len(rows), -1)
        step = StepContext.at(kv, torch.tensor(rows), positions, start + count)
        at = step.rows, step.positions, kv.block_tables, step.span
        return attend_natively(qkv[rows, :count].contiguous(), still, *at, stored, heads, None)

    both = run([0, 1], steps, 15)
    assert torch.equal(run([0], 1, 15), both[:1, :1])
    assert torch.equal(run([1], steps, 15), both[1:])
    overhanging = run([0, 1], steps, 27)  # four of them beyond the capacity
    assert torch.equal(run([1], 4, 27), overhanging[1:, :4])
    assert torch.isfinite(overhanging.float()).all()
