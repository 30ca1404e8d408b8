"""Attention over KV blocks, by the kernels and by torch, against the plain computation."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from paceline.actors.engine.attention import StepContext, attend
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.native import library

ROWS, CAPACITY = 3, 150
BEHIND = (60, 0, 97)  # cached positions of the three rows
HEADS = [(1, 1), (6, 2), (4, 4)]


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
        for row, (behind, cached) in enumerate(zip(BEHIND, self.cached, strict=True)):
            if behind:
                before = torch.arange(behind)[None]
                step = StepContext.at(self.kv, torch.tensor([row]), before, behind)
                step.write(0, *(part[None].transpose(1, 2) for part in cached))

    def check(self, found: Tensor, window: int | None) -> None:
        """``[B, T, heads, dim]`` is right, and so is what was stored."""
        tolerance = 1e-5 if found.dtype is torch.float32 else 0.02
        for row, (behind, cached) in enumerate(zip(BEHIND, self.cached, strict=True)):
            k, v = (
                torch.cat((old, new[row]))
                for old, new in zip(cached, (self.k, self.v), strict=True)
            )
            wanted = plain(self.q[row], k, v, window)
            torch.testing.assert_close(found[row].double(), wanted, rtol=tolerance, atol=tolerance)
            blocks = self.kv.block_tables[row].long()
            stored = self.kv.keys[0][blocks].flatten(0, 1)[: behind + self.steps]
            assert torch.equal(stored, k)


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("steps", [1, 5, 37])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gathered_blocks(
    heads: tuple[int, int], steps: int, window: int | None, dtype: torch.dtype
) -> None:
    case = Case(heads, 24, steps, dtype)
    parts = (part.transpose(1, 2) for part in (case.q, case.k, case.v))
    case.check(attend(case.step, 0, *parts, 0.3, window), window)


def attend_natively(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    rows: Tensor,
    positions: Tensor,
    tables: Tensor,
    span: int,
    kv: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    window: int | None,
    threads: int = 1,
) -> Tensor:
    """The kernel alone, as Kernels.forward uses it in every layer."""
    loaded = library.load_library()
    if loaded is None:
        pytest.skip("no compiler made the kernels")
    batch, steps, _ = qkv.shape
    _, block_size, keys, dim = kv[0].shape
    positions = positions.contiguous()
    shape = library.Attention(
        *(batch, steps, heads[0], keys, dim, block_size, tables.shape[1], span, window or 0),
        *(rows.data_ptr(), positions.data_ptr(), None, tables.data_ptr()),
        0.3,
    )
    out = qkv.new_empty(batch, steps, heads[0] * dim)
    tensors = (qkv, *rotary, *kv, out)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    loaded[f"attend_{library.NAMES[qkv.dtype]}"](
        ctypes.byref(shape), ctypes.c_int64(threads), *pointers
    )
    return out


@pytest.mark.parametrize("window", [None, 1, 20, 64])
@pytest.mark.parametrize("steps", [1, 5, 37])
@pytest.mark.parametrize("dim", [4, 24, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_the_kernel(
    heads: tuple[int, int], dim: int, steps: int, window: int | None, dtype: torch.dtype
) -> None:
    case = Case(heads, dim, steps, dtype)
    still = torch.ones(CAPACITY, dim, dtype=dtype), torch.zeros(CAPACITY, dim, dtype=dtype)
    qkv = torch.cat((case.q, case.k, case.v), dim=2).flatten(2)
    kv, step = (case.kv.keys[0], case.kv.values[0]), case.step
    rows = step.rows, step.positions
    tables, span = case.kv.block_tables, step.span
    found = attend_natively(qkv, still, *rows, tables, span, kv, heads, window)
    case.check(found.view(ROWS, steps, heads[0], dim), window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_bits_depend_neither_on_other_tokens_nor_on_threads(
    heads: tuple[int, int], dim: int, window: int | None, dtype: torch.dtype
) -> None:
    """Nor on what lies behind a token's own position."""
    case = Case(heads, dim, 5, dtype)
    still = torch.ones(CAPACITY, dim, dtype=dtype), torch.zeros(CAPACITY, dim, dtype=dtype)
    qkv = torch.cat((case.q, case.k, case.v), dim=2).flatten(2)
    kv, tables = (case.kv.keys[0], case.kv.values[0]), case.kv.block_tables

    def run(rows: list[int], steps: slice, threads: int = 1) -> Tensor:
        positions = torch.tensor(BEHIND)[rows][:, None] + torch.arange(5)[steps]
        step = StepContext.at(case.kv, torch.tensor(rows), positions, int(positions.max()) + 1)
        at = step.rows, step.positions, tables, step.span
        own = qkv[rows][:, steps].contiguous()
        return attend_natively(own, still, *at, kv, heads, window, threads)

    whole = run([0, 1, 2], slice(5))
    assert torch.equal(run([0, 1, 2], slice(5), threads=2), whole)
    for row in range(ROWS):
        blocks = tables[row, : -(-(BEHIND[row] + 5) // case.kv.block_size)].long()
        for step in range(5):
            for part in kv:  # what lies behind the token must not be read
                flat = part[blocks].flatten(0, 1)
                flat[BEHIND[row] + step :] = torch.nan
                part[blocks] = flat.view(-1, *part.shape[1:])
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
