"""Blocks read in place by torch's paged attention give what gathered ones give."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from paceline.actors.engine import paged_attention as paged
from paceline.actors.engine.attention import StepContext, attend
from paceline.actors.engine.kv_cache import KVCache

CAPACITY, ROWS = 600, 3
GPU = torch.device("cuda")


def noise(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator, device=GPU).to(dtype)


def blocks(heads: tuple[int, int], dim: int, dtype: torch.dtype, size: int) -> KVCache:
    kv = KVCache([(heads[1], dim)], ROWS, CAPACITY, dtype, GPU, None, size)
    generator = torch.Generator(GPU).manual_seed(7)
    for part in (kv.keys[0], kv.values[0]):
        part.copy_(noise(generator, *part.shape, dtype=dtype))
    for row in (2, 0, 1):  # blocks of a row do not follow each other
        assert kv.allocate(row, 40)
    for row in range(ROWS):
        assert kv.allocate(row, CAPACITY)
    kv.sync()
    return kv


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_reading_in_place_is_reading_a_copy(
    dtype: torch.dtype,
    heads: tuple[int, int],
    dim: int,
    tokens: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not {"block_table", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        pytest.skip(f"varlen_attn of torch {torch.__version__} reads no blocks")
    size = paged.block_size(GPU, dtype, *heads, dim)
    assert paged.supports(GPU, dtype, heads[0], size, heads[1], dim)
    generator = torch.Generator(GPU).manual_seed(1)
    query = noise(generator, ROWS, heads[0], tokens, dim, dtype=dtype)
    key, value = (noise(generator, ROWS, heads[1], tokens, dim, dtype=dtype) for _ in range(2))
    lasts = torch.tensor([[511], [17], [300]], device=GPU)
    positions = lasts - tokens + 1 + torch.arange(tokens, device=GPU)
    found = []
    for in_place in (True, False):
        name = paged.is_supported.__name__  # mypy checks it, also without a GPU
        monkeypatch.setattr(paged, name, lambda *_, in_place=in_place: in_place)
        step = StepContext.at(
            blocks(heads, dim, dtype, size), torch.tensor([1, 0, 2], device=GPU), positions, 512
        )
        found.append(attend(step, 0, query, key, value, None, window))
        assert step.windows == {window}
    torch.testing.assert_close(found[0], found[1], atol=2e-2, rtol=2e-2)


def test_float32_is_gathered() -> None:
    assert not paged.supports(GPU, torch.float32, 4, 16, 4, 64)
    assert paged.block_size(GPU, torch.float32, 4, 4, 64) == 16
