"""The C++ products: a row's bits depend on that row alone, at every size and number of threads."""

from __future__ import annotations

import ctypes
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processors import PROCESSORS, build, marked, use_kernels_of
from waiting import wait_until

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.linear import StackedLinear
from paceline.actors.engine.native.kernels import Kernels, kernels_for
from paceline.actors.engine.native.library import load_library

CPU = torch.device("cpu")
DTYPES = [torch.bfloat16, torch.float32]
# Of the largest sum of absolute products: the rounding of the result, and of float32 sums.
_ERRORS = {torch.bfloat16: 2**-8, torch.float32: 2**-18}


def kernels(dtype: torch.dtype) -> Kernels:
    found = kernels_for(CPU, dtype)
    if found is None:
        pytest.skip("no compiler made the kernels")
    return found


def test_a_compiler_makes_the_kernels() -> None:
    """Otherwise the tests of what they compute would be skipped in silence."""
    if shutil.which("c++") or shutil.which("g++"):
        assert all(kernels_for(CPU, dtype) is not None for dtype in DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    rows=st.integers(1, 40),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_size_is_the_product_and_each_row_is_computed_as_if_alone(
    dtype: torch.dtype, sizes: tuple[int, int], rows: int, bias: bool, seed: int
) -> None:
    check_product(kernels(dtype), dtype, sizes, rows, bias=bias, seed=seed)


def check_product(
    multiply: Kernels,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    rows: int,
    *,
    bias: bool,
    seed: int,
) -> None:
    """A product of random numbers is right, on any threads, and each row's bits are its own."""
    size, out = sizes
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, size, generator=generator).to(dtype)
    x = torch.randn(rows, size, generator=generator).to(dtype)
    offset = torch.randn(out, generator=generator).to(dtype) if bias else None
    packed = multiply.pack(weight, offset)
    torch.set_num_threads(1)
    alone = torch.cat([multiply.multiply(row[None], packed) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(multiply.multiply(x, packed), alone)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    scale = x.double().abs() @ weight.double().abs().T + (0 if offset is None else offset.abs())
    assert bool(((alone.double() - exact).abs() <= _ERRORS[dtype] * scale + 1e-30).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("processor", marked(PROCESSORS))
def test_other_processors_products(
    processor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Kernels(use_kernels_of(processor, monkeypatch), dtype)
    for rows in (*range(1, 10), 17, 33):
        for sizes in ((64, 160), (33, 90), (1, 1), (90, 15)):
            check_product(own, dtype, sizes, rows, bias=rows % 2 == 0, seed=rows)


@pytest.mark.full
@pytest.mark.parametrize("processor", PROCESSORS)
def test_they_compile_for_processors_other_than_this(processor: str) -> None:
    build(processor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(576, 960), (1536, 576), (4864, 896), (577, 33), (384, 1152)])
def test_sizes_of_real_models(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """oneDNN sums 576 and 1,536 columns of a lone bfloat16 row in another order."""
    multiply, (size, out) = kernels(dtype), sizes
    generator = torch.Generator().manual_seed(0)
    packed = multiply.pack(torch.randn(out, size, generator=generator).to(dtype))
    x = torch.randn(130, size, generator=generator).to(dtype)
    many = multiply.multiply(x, packed)
    for rows in (*range(1, 18), 31, 64, 129):
        assert torch.equal(multiply.multiply(x[:rows], packed), many[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_callers_at_once_get_their_own_products(dtype: torch.dtype) -> None:
    multiply = kernels(dtype)
    torch.set_num_threads(3)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(300, 200, generator=generator).to(dtype) for _ in range(4)]
    packed = [multiply.pack(weight) for weight in weights]
    x = torch.randn(5, 200, generator=generator).to(dtype)
    expected = [multiply.multiply(x, part) for part in packed]

    def same(i: int) -> bool:
        torch.set_num_threads(3)
        which = i % 4
        return torch.equal(multiply.multiply(x, packed[which]), expected[which])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(400)))


def test_a_job_wakes_the_threads_that_it_wants_of_more_that_sleep(tmp_path: Path) -> None:
    """Of three beside this one, a job for two threads wants the one that was made first."""
    if (built := load_library()) is None:
        pytest.skip("no compiler made the kernels")
    copy = shutil.copy(built._name, tmp_path / "copy.so")  # has threads of its own
    own, x = Kernels(ctypes.CDLL(copy), torch.float32), torch.randn(8, 100)
    tasks = Path("/proc/self/task")
    torch.set_num_threads(4)  # makes threads of torch's own
    before = {*tasks.iterdir()}
    own.top_k([x], 4)
    first = min({*tasks.iterdir()} - before, key=lambda task: int(task.name))
    torch.set_num_threads(2)

    def sleeps() -> int:
        status = (first / "status").read_text()
        return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])

    for _ in range(4):
        time.sleep(0.05)
        so_far = sleeps()
        own.top_k([x], 4)
        wait_until(lambda so_far=so_far: sleeps() > so_far, "the thread to wake up", 5.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_weights_are_packed_again_and_other_experts_stay(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 24, 16, generator=generator).to(dtype)
    linear = StackedLinear(weight)
    linear.pack()
    x = torch.randn(2, 5, 16, generator=generator).to(dtype)
    both = ExpertLayout([0, 1], CPU)
    before = linear(x, both)
    weight[1] += 1
    linear.pack(1)
    after = linear(x, both)
    assert torch.equal(after[0], before[0])
    tolerance = {"atol": 0.1, "rtol": 0.02} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(after[1], x[1] @ weight[1].T, **tolerance)
    grown = StackedLinear(torch.cat([weight, weight[:1]]))
    grown.copy_packed(linear, 2)
    three = grown(torch.cat([x, x[:1]]), ExpertLayout([0, 1, 2], CPU))
    assert torch.equal(three, torch.cat([after, after[:1]]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_any_size_are_torchs(dtype: torch.dtype) -> None:
    for size in (*range(1, 70), 576):
        x, delta, weight = (torch.randn(3, size).to(dtype) for _ in range(3))
        for change in (None, delta):
            own = x.clone()
            got = kernels(dtype).add_norm(own, change, weight[0], 1e-5)
            whole = x if change is None else x + change
            assert torch.equal(own, whole)
            wanted = whole.float() * (whole.float().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
            torch.testing.assert_close(got, wanted.to(dtype) * weight[0], rtol=0.01, atol=1e-6)
    broken = torch.randn(2, 37).to(dtype)
    broken[1, 36] = torch.nan
    got = kernels(dtype).add_norm(broken, None, torch.ones(37).to(dtype), 1e-5)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()
