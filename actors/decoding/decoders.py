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
from paceline.actors.decoding.kv import KVRows, kv_dtype

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 16
# Of the norm of the logits: rounding stays far below, a part that is missing does not.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}


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

    Raises:
        ValueError: for a model that the engine's attention does not compute rightly.
    """
    config, count = models[0].config, min(_CHECK_TOKENS, capacity)
    spread = torch.arange(len(models) * count, device=models[0].device).view(-1, count)
    tokens = (spread * 7919 + 13) % int(config.vocab_size)
    modules, tolerance = ModuleDecoder(models), _TOLERANCES[models[0].dtype]
    own = _whole(modules, models, shapes, tokens)
    error = _relative(own[:1], _stock(models[0], tokens[:1]))
    if not error <= tolerance:
        raise ValueError(
            f"models of type {config.model_type} cannot be served: their logits in the engine "
            f"are off by {error:.3f}"
        )
    if not can_fuse(config):
        return modules
    fused = FusedDecoder(models, capacity)
    error = _relative(_whole(fused, models, shapes, tokens), own)
    if error <= tolerance:
        return fused
    logger.warning("%s is not run fused: its logits were off by %.3f", config.model_type, error)
    return modules


def _whole(
    decoder: Decoder, models: Sequence[Any], shapes: list[tuple[int, int]], tokens: Tensor
) -> Tensor:
    """Logits of int64 ``[E, T]`` tokens, a row per model, over rows of their own."""
    device, (count, steps) = tokens.device, tokens.shape
    step = StepContext(
        kv=KVRows(shapes, count, steps, kv_dtype(models[0].dtype, device), device),
        rows=torch.arange(count, device=device),
        positions=torch.arange(steps, device=device).expand(count, -1),
        span=steps,
        contiguous=(0, count),
    )
    return decoder(tokens, step, Grid(range(count), device), 0)


def _stock(model: Any, tokens: Tensor) -> Tensor:
    """Logits by transformers' plainest attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(own)
    return logits


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())
