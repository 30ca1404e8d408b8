"""Whether a token's logits are the same bits whatever it is computed beside.

A forward over one row and one over several may round differently; where two tokens are nearly as
probable, greedy answers then depend on speculation, on the batch and on the replica.
"""

from __future__ import annotations

from itertools import pairwise, takewhile

import torch
from torch import Tensor

from paceline.actors.engine.model_runner import ModelRunner

INVARIANT, VARYING = "invariant", "varying"
# Over the end of a block of keys and values, and with all rows more tokens than a round's forward
# has: where one algorithm ends and the next begins, bits change.
_LENGTH = 20
_WAYS = ((1,) * _LENGTH, (9, 1, 2, 8), (_LENGTH,))


@torch.inference_mode()
def batch_invariant(runner: ModelRunner) -> bool:
    """Compute tokens one by one, some at a time, and beside other rows, and compare the bits.

    Args:
        runner: nothing must run in it; its key/value memory is used and freed again. As many
            rows as it has room for are computed together.

    Returns:
        False also where the memory has no room for a second row to compare with.
    """
    length = min(_LENGTH, runner.max_model_len - 1)
    tried = range(runner.kv.rows)
    rows = range(sum(1 for _ in takewhile(lambda row: runner.kv.allocate(row, length), tried)))
    vocab = int(runner.models[0].config.vocab_size)
    tokens = torch.arange(len(tried) * length, device=runner.device).view(-1, length)
    tokens = (tokens * 7919 + 13) % vocab
    try:
        alone = [_computed(runner, tokens[:1], range(1), way) for way in _WAYS]
        crowd = [_computed(runner, tokens[: len(rows)], rows, way)[:1] for way in _WAYS]
    finally:
        for row in tried:
            runner.kv.free(row)
    enough = len(rows) == len(tried) or len(rows) > 1
    return enough and all(torch.equal(a, b) for a, b in pairwise(alone + crowd))


def _computed(runner: ModelRunner, tokens: Tensor, rows: range, way: tuple[int, ...]) -> Tensor:
    """Logits ``[B, T, V]`` of int64 ``[B, T]``, so many tokens at a time as ``way`` says."""
    parts, start = [], 0
    for count in way:
        part = tokens[:, start : start + count]
        if part.shape[1]:
            end = start + part.shape[1]
            positions = torch.arange(start, end, device=runner.device).expand(len(rows), -1)
            parts.append(runner.forward(rows, part, positions, end))
            start = end
    return torch.cat(parts, dim=1)
