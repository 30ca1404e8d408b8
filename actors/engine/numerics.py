"""Batch invariance: whether a token's logits have the same bits in every batch.

A forward over one row and one over several may round differently; if two tokens are nearly equally
probable, greedy answers then depend on speculation, on the batch and on the replica.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

import torch
from torch import Tensor

from paceline.actors.engine.inference import inference
from paceline.actors.engine.model_runner import ModelRunner

INVARIANT, VARYING = "invariant", "varying"
# Beyond a KV block, and with all rows more tokens than a decoding round: bits change where one
# algorithm ends and the next begins.
_LENGTH = 20
_CHUNKINGS = ((1,) * _LENGTH, (9, 1, 2, 8), (_LENGTH,))


@inference
def batch_invariant(runner: ModelRunner) -> bool:
    """Compare the bits of logits computed token by token, in chunks, and together with other rows.

    Args:
        runner: idle; its KV cache is used and freed again. All rows that fit are computed
            together.

    Returns:
        False also if the KV cache has no room for a second row.
    """
    length = min(_LENGTH, runner.max_model_len - 1)
    all_rows = range(runner.kv.rows)
    rows = range(sum(1 for _ in takewhile(lambda row: runner.kv.allocate(row, length), all_rows)))
    vocab = int(runner.models[0].config.vocab_size)
    tokens = torch.arange(len(all_rows) * length, device=runner.device).view(-1, length)
    tokens = (tokens * 7919 + 13) % vocab
    try:
        alone = [_chunked_logits(runner, tokens[:1], range(1), chunks) for chunks in _CHUNKINGS]
        batch = [
            _chunked_logits(runner, tokens[: len(rows)], rows, chunks)[:1] for chunks in _CHUNKINGS
        ]
    finally:
        for row in all_rows:
            runner.kv.free(row)
    enough = len(rows) == len(all_rows) or len(rows) > 1
    return enough and all(torch.equal(a, b) for a, b in pairwise(alone + batch))


def _chunked_logits(
    runner: ModelRunner, tokens: Tensor, rows: range, chunks: tuple[int, ...]
) -> Tensor:
    """Compute logits ``[B, T, V]`` of int64 ``[B, T]`` in chunks of these numbers of tokens."""
    parts, start = [], 0
    for count in chunks:
        part = tokens[:, start : start + count]
        if part.shape[1]:
            end = start + part.shape[1]
            positions = torch.arange(start, end, device=runner.device).expand(len(rows), -1)
            parts.append(runner.forward(rows, part, positions, end))
            start = end
    return torch.cat(parts, dim=1)
