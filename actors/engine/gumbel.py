"""Counter-based Gumbel noise, a function of (seed, choice, position, token).

A seeded request samples token t as ``argmax_v(log p_t(v) + G(seed, choice, t, v))``, which is an
exact draw from p_t (Gumbel-max). The draft proposes with the same G, so that it often picks the
target's token (Gumbel coupling, arXiv 2408.07978). The text depends on p and the seed alone, not on
drafts, batches, weight swaps or resumption.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.actors.engine.native import kernels

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_MANTISSA_BITS = 53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit words logically; torch shifts them arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014), modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def stream_key(seeds: Tensor, positions: Tensor, choice: Tensor | int = 0) -> Tensor:
    """Return the key of the noise at one output position.

    Args:
        seeds: int64, any shape; the requests' seeds.
        positions: int64, broadcastable; index of the output token, 0 for the first.
        choice: index of the choice in a request with several; int64, broadcastable.

    Returns:
        int64 of the broadcast shape.
    """
    return _mix(_mix(_mix(seeds + _GOLDEN) + choice * _GOLDEN) + (positions + 1) * _GOLDEN)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise of tokens under a key.

    Args:
        keys: int64 ``[...]`` from :func:`stream_key`.
        token_ids: int64, broadcastable to ``[..., V]``.

    Returns:
        float64 ``[..., V]``, finite.
    """
    bits = _shift_right(_mix(keys.unsqueeze(-1) + (token_ids + 1) * _GOLDEN), 64 - _MANTISSA_BITS)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-_MANTISSA_BITS
    # 1 - 2^-54 rounds to 1, where -log(-log(u)) is infinite.
    uniform = uniform.clamp_(max=1.0 - 2.0**-_MANTISSA_BITS)
    return -torch.log(-torch.log(uniform))


def gumbel_max(probs: Tensor, keys: Tensor, ids: Tensor | None = None) -> Tensor:
    """Draw from N distributions by their noise: the column of the largest ``log p + G``.

    Args:
        probs: float32 ``[N, K]``, at least one positive in each.
        keys: int64 ``[N]`` from :func:`stream_key`.
        ids: int64 ``[N, K]``, the tokens; None: all of them.

    Returns:
        int64 ``[N]``.
    """
    columns = kernels.gumbel_max(probs, keys, ids)
    if columns is not None:
        return columns
    tokens = torch.arange(probs.shape[-1], device=probs.device) if ids is None else ids
    return (probs.double().log() + gumbel(keys, tokens)).argmax(dim=-1)
