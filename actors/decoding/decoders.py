"""How a stack of models is run: fused where that is known to be the same, else module by module."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.actors.decoding.attention import StepContext
from paceline.actors.decoding.fused import FusedDecoder, can_fuse
from paceline.actors.decoding.grid import Grid
from paceline.actors.decoding.kv import KVRows

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 6
_CHECK_TOLERANCE = 0.05


class Decoder(Protocol):
    """E models of one architecture over the engine's rows."""

    def __call__(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """Logits ``[B, T or keep, V]`` of int64 ``[B, T]`` tokens; stores keys and values."""
        ...

    def refresh(self, expert: int | None = None) -> None:
        """Take note that the parameters (of one expert, or all) have changed."""
        ...


class ModuleDecoder:
    """Transformers' own modules, any architecture, one forward per expert."""

    def __init__(self, models: Sequence[Any]) -> None:
        """Take models that use the engine's attention function."""
        self._models = list(models)

    def refresh(self, expert: int | None = None) -> None:
        """Nothing to do: the modules read their parameters."""

    def __call__(self, token_ids: Tensor, step: StepContext, grid: Grid, keep: int) -> Tensor:
        """See Decoder."""
        if grid.single is not None:
            return self._run(grid.single, token_ids, step, keep)
        parts = []
        for expert, rows in zip(grid.experts, grid.members, strict=True):
            index = torch.tensor(rows, device=token_ids.device)
            parts.append((index, self._run(expert, token_ids[index], step.subset(index), keep)))
        logits = parts[0][1].new_empty(len(token_ids), *parts[0][1].shape[1:])
        for index, part in parts:
            logits[index] = part
        return logits

    def _run(self, expert: int, token_ids: Tensor, step: StepContext, keep: int) -> Tensor:
        output = self._models[expert](
            input_ids=token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=keep,
            paceline_step=step,
        )
        logits: Tensor = output.logits
        return logits


@torch.inference_mode()
def make_decoder(models: Sequence[Any], shapes: list[tuple[int, int]], capacity: int) -> Decoder:
    """The fastest decoder that gives transformers' own logits.

    Args:
        models: causal LMs of one config, on one device, in one dtype.
        shapes: per layer (key/value heads, head dimension).
        capacity: positions per row.
    """
    modules = ModuleDecoder(models)
    config = models[0].config
    if not can_fuse(config):
        return modules
    vocab, count = int(config.vocab_size), min(_CHECK_TOKENS, capacity)
    device, dtype = models[0].device, models[0].dtype
    spread = torch.arange(len(models) * count, device=device).view(-1, count)
    tokens = (spread * 7919 + 13) % vocab

    def logits(decoder: Decoder) -> Tensor:
        step = StepContext(
            kv=KVRows(shapes, len(models), count, dtype, device),
            rows=torch.arange(len(models), device=device),
            positions=torch.arange(count, device=device).expand(len(models), -1),
            span=count,
            contiguous=(0, len(models)),
        )
        return decoder(tokens, step, Grid(range(len(models)), device), 0).float()

    expected = logits(modules)
    fused = FusedDecoder(models, capacity)
    error = float((logits(fused) - expected).norm() / expected.norm())
    if error <= _CHECK_TOLERANCE:
        return fused
    logger.warning(
        "%s runs through transformers' modules: fused, its logits were off by %.3f",
        config.model_type,
        error,
    )
    return modules
