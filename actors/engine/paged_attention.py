"""Attention that reads KV blocks in place on GPUs, with torch's own kernels.

``torch.nn.attention.varlen`` runs FlashAttention over a block table. The block sizes that it
supports depend on the version behind it (2 needs multiples of 256, 3 takes any), so it is tried
once at the start and compared with the reference. It needs torch 2.13's signature: on the one GPU
that tests ran on, torch was older, and blocks were gathered.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional

logger = logging.getLogger(__name__)

_DTYPES = (torch.float16, torch.bfloat16)
_BLOCK_SIZES = (16, 256)
_TOLERANCE = 0.05


def is_supported(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether :func:`attend` supports these tensors on their device.

    Args:
        query: ``[B, heads, T, head_dim]``.
        keys: ``[blocks, block_size, kv_heads, head_dim]``.
        values: like ``keys``.
    """
    if not query.is_cuda or query.dtype is not keys.dtype or keys.shape != values.shape:
        return False
    return supports(query.device, query.dtype, query.shape[1], *keys.shape[1:])


def block_size(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> int:
    """Return the smallest block size that can be read in place; 16 if none can, or on CPUs."""
    for size in _BLOCK_SIZES:
        if device.type == "cuda" and supports(device, dtype, heads, size, kv_heads, dim):
            return size
    return _BLOCK_SIZES[0]


def attend(
    query: Tensor,
    stored: tuple[Tensor, Tensor],
    block_table: Tensor,
    lengths: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend causally over blocks; the last token of a row is its last position.

    Split-KV is off, as a row's rounding would depend on the lengths of the others.

    Args:
        query: ``[B, T, heads, head_dim]``.
        stored: keys and values, ``[blocks, block_size, kv_heads, head_dim]`` each.
        block_table: int32 ``[B, columns]``.
        lengths: int32 ``[B]``, 1 + the position of every row's last token.
        scaling: softmax scale, None for the default.
        window: sliding window, None for none.

    Returns:
        ``[B, T, heads, head_dim]``.
    """
    from torch.nn.attention.varlen import varlen_attn

    keys, values = stored
    (batch, steps), span = query.shape[:2], block_table.shape[1] * keys.shape[1]
    starts = torch.arange(0, (batch + 1) * steps, steps, dtype=torch.int32, device=query.device)
    output = varlen_attn(
        query.flatten(0, 1),
        keys,
        values,
        starts,
        None,
        steps,
        span,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[2] != keys.shape[2],
        # Only padding can be beyond the table, and its result is not used.
        seqused_k=lengths.clamp(max=span),
        block_table=block_table,
        num_splits=1,
    )
    assert isinstance(output, Tensor)
    return output.view(query.shape)


@functools.cache
def supports(
    device: torch.device, dtype: torch.dtype, heads: int, size: int, kv_heads: int, dim: int
) -> bool:
    """Run :func:`attend` on two rows and compare it with the reference, once per argument.

    Args:
        device: a GPU.
        dtype: of queries, keys and values.
        heads: of the queries.
        size: positions per block.
        kv_heads: of keys and values.
        dim: of a head.
    """
    if dtype not in _DTYPES:
        return False
    try:
        generator = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        query, keys, values = (
            noise(*shape) for shape in ((2, 3, heads, dim), *2 * [(7, size, kv_heads, dim)])
        )
        table = torch.tensor([[4, 1, 6], [2, 5, 3]], dtype=torch.int32, device=device)
        lengths = torch.tensor([2 * size + 5, size + 9], dtype=torch.int32, device=device)
        found = attend(query, (keys, values), table, lengths, None, None)
        for row, length in enumerate(lengths.tolist()):
            own = [part[table[row]].flatten(0, 1)[:length] for part in (keys, values)]
            mask = torch.ones(3, length, dtype=torch.bool, device=device).tril(length - 3)
            wanted = functional.scaled_dot_product_attention(
                query[row].transpose(0, 1),
                own[0].transpose(0, 1),
                own[1].transpose(0, 1),
                attn_mask=mask,
                enable_gqa=heads != kv_heads,
            ).transpose(0, 1)
            if not (found[row] - wanted).abs().max() < _TOLERANCE:
                raise ValueError("wrong result")
    except (RuntimeError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        logger.info("blocks of %d are not read in place on %s: %s", size, device, error)
        return False
    return True
