"""Decoders of a stack of models: fused if the logits are the same, else transformers' modules."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.actors.engine.attention import StepContext
from paceline.actors.engine.dynamic_rope import DynamicRotary, dynamic_rotaries
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.fused import FusedDecoder, layer_window
from paceline.actors.engine.inference import inference
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.vocabulary import known_ids, resize_logits
from paceline.actors.weights.eagle import is_llama_like

logger = logging.getLogger(__name__)

_CHECK_TOKENS = 16
# Half-precision mixtures with random weights were off by up to 0.26: rounding changes experts.
_MIXTURE_TOLERANCE = 0.4
_MIXTURE_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
# Other layers keep a state instead of keys and values, or read them in another pattern.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Relative to the norm of a token's logits; rounding is far below, a missing part above.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.05}


class Decoder(Protocol):
    """E models of one architecture over the KV cache."""

    def __call__(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """Compute logits ``[B, T or keep, V]`` of int64 ``[B, T]``; stores keys and values."""
        ...

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Also return the hidden states of all tokens, ``[B, T, H]``, as the head reads them.

        The layout must be of one expert.
        """
        ...

    def refresh(self, expert: int | None = None) -> None:
        """Note that the parameters of one expert, or all, have changed."""
        ...

    def grow(self, models: Sequence[PreTrainedModel]) -> Iterator[None]:
        """Add models, a part per iteration; the present ones may run in between.

        Args:
            models: the present ones, then the new ones.
        """
        ...


class ModuleDecoder:
    """Runs transformers' own modules, one forward per expert.

    Attributes:
        vocab_size: V, logits per token: the models' own unless set to the target's.
    """

    def __init__(self, models: Sequence[PreTrainedModel], capacity: int = 0) -> None:
        """Use these models.

        Args:
            models: of one config, with the engine's attention.
            capacity: positions per row; 0 keeps the models' own rotary modules.
        """
        self._capacity = capacity
        self._rotaries: list[list[DynamicRotary]] = []
        self._vocab = vocab_rows(models[0])
        self.vocab_size = self._vocab
        self._set_models(models)

    def refresh(self, expert: int | None = None) -> None:
        """Do nothing: the modules read their parameters."""

    def grow(self, models: Sequence[PreTrainedModel]) -> Iterator[None]:
        """See Decoder."""
        self._set_models(models)
        yield

    def _set_models(self, models: Sequence[PreTrainedModel]) -> None:
        self._models = list(models)
        if self._capacity:
            for model in self._models[len(self._rotaries) :]:
                self._rotaries.append(dynamic_rotaries(model, self._capacity))

    def __call__(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> Tensor:
        """See Decoder."""
        if layout.single is not None:
            return self._run(layout.single, token_ids, step, keep)
        parts = []
        for expert, rows in zip(layout.experts, layout.rows_by_expert, strict=True):
            index = torch.tensor(rows, device=token_ids.device)
            parts.append((index, self._run(expert, token_ids[index], step.subset(index), keep)))
        logits = parts[0][1].new_empty(len(token_ids), *parts[0][1].shape[1:])
        for index, part in parts:
            logits[index] = part
        return logits

    def with_hidden(
        self, token_ids: Tensor, step: StepContext, layout: ExpertLayout, keep: int
    ) -> tuple[Tensor, Tensor]:
        """See Decoder; the output embeddings must be a module that the model calls."""
        inputs: list[Tensor] = []
        head = self._models[layout.experts[0]].get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        try:
            logits = self(token_ids, step, layout, 0)
        finally:
            hook.remove()
        return logits[:, -keep:], inputs[-1]

    def _run(self, expert: int, token_ids: Tensor, step: StepContext, keep: int) -> Tensor:
        if self.vocab_size > self._vocab:
            token_ids = known_ids(token_ids, self._vocab)
        for rotary in self._rotaries[expert] if self._rotaries else ():
            rotary.prompt_lengths = [step.kv.prompt_lengths[row] for row in step.rows.tolist()]
        output = self._models[expert](
            input_ids=token_ids,
            position_ids=step.positions,
            use_cache=False,
            logits_to_keep=keep,
            paceline_step=step,
        )
        logits: Tensor = output.logits
        # Some architectures ignore logits_to_keep.
        return resize_logits(logits[:, -keep:], self.vocab_size)


def vocab_rows(model: PreTrainedModel) -> int:
    """Return the number of embeddings of a causal LM."""
    return int(model.get_input_embeddings().num_embeddings)


def unservable(config: PreTrainedConfig, reason: str) -> ValueError:
    """Return the error of an architecture that the engine cannot run."""
    return ValueError(f"models of type {config.model_type} cannot be served: {reason}")


@inference
def make_decoder(
    models: Sequence[PreTrainedModel],
    shapes: list[tuple[int, int]],
    capacity: int,
) -> FusedDecoder | ModuleDecoder:
    """Make the fastest decoder that gives transformers' logits.

    Args:
        models: causal LMs of one config, device and dtype.
        shapes: per layer (key/value heads, head dimension).
        capacity: positions per row.

    Raises:
        ValueError: the engine cannot run the model; names its type and the reason.
    """
    config, count = models[0].config, min(_CHECK_TOKENS, capacity)
    _check_config(config, capacity)
    ids = torch.arange(len(models) * count, device=models[0].device).view(-1, count)
    tokens = (ids * 7919 + 13) % int(config.vocab_size)
    own = _check_modules(models[0], shapes, tokens[:1], capacity)
    if not is_llama_like(config):
        return ModuleDecoder(models, capacity)
    if len(models) > 1:
        own, _ = _probe(ModuleDecoder(models), models, shapes, tokens)
    fused = FusedDecoder(models, capacity)
    error = _relative_error(_probe(fused, models, shapes, tokens)[0], own)
    if error <= _tolerance(models[0]):
        return fused
    logger.warning("%s is not run fused: its logits were off by %.3f", config.model_type, error)
    return ModuleDecoder(models, capacity)


def _check_config(config: PreTrainedConfig, capacity: int) -> None:
    """Refuse a config whose problem a few tokens would not show, or not explain."""
    if getattr(config, "is_encoder_decoder", False):
        raise unservable(config, "an encoder beside the decoder has no place in the engine")
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise unservable(config, f"the engine has no layers of type {', '.join(sorted(kinds))}")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(own for own in rope.values() if isinstance(own, dict))):
        limit = part.get("original_max_position_embeddings")
        if part.get("rope_type") == "longrope" and limit is not None and capacity > limit:
            raise unservable(
                config,
                "its rotary embedding (longrope) changes for all requests of a batch when one is "
                f"longer than {limit} tokens; set target.max_model_len to at most {limit}",
            )


def _check_modules(
    model: PreTrainedModel, shapes: list[tuple[int, int]], tokens: Tensor, capacity: int
) -> Tensor:
    """Compute a probe's logits by the model's modules, with the engine's attention.

    Args:
        model: causal LM with the engine's attention.
        shapes: per layer (key/value heads, head dimension).
        tokens: int64 ``[1, T]``.
        capacity: positions per row.

    Returns:
        ``[2, T, V]``, see _probe.

    Raises:
        ValueError: they are not the model's own, or a part of it does not reach the engine.
    """
    config = model.config
    try:
        found, step = _probe(ModuleDecoder([model]), [model], shapes, tokens)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:
        raise unservable(config, f"its forward fails in the engine: {fault}") from fault
    unused = [str(i) for i, keys in enumerate(step.kv.keys) if not keys.any()]
    if unused:
        reason = f"layers {', '.join(unused)} do not attend through the engine"
        raise unservable(config, f"{reason} (recurrent, or an attention of their own)")
    windows = {layer_window(config, layer) for layer in range(len(shapes))} - step.windows
    ignored = [window for window in windows if window is not None and window < capacity]
    if ignored:
        raise unservable(config, f"its window of {ignored[0]} tokens does not reach the attention")
    logits, steps = _reference_logits(model, tokens), tokens.shape[1]
    expected = [
        logits[:, list(range(steps // 2)) + _second_positions(steps, lag)] for lag in (False, True)
    ]
    error = _relative_error(found, torch.cat(expected))
    if not error <= _tolerance(model):
        raise unservable(config, f"its logits in the engine are off by {error:.3f}")
    return found


def _second_positions(steps: int, lags: bool) -> list[int]:
    """Return the positions of a probe's second forward, in the row that continues or that lags."""
    start = steps // 2 - (steps // 4 if lags else 0)
    return list(range(start, start + steps - steps // 2))


def _probe(
    decoder: Decoder,
    models: Sequence[PreTrainedModel],
    shapes: list[tuple[int, int]],
    tokens: Tensor,
) -> tuple[Tensor, StepContext]:
    """Compute logits of int64 ``[E, T]`` tokens as the engine does, in two forwards.

    Every model has two rows. In the second forward one continues and one lags behind, which
    reveals a part that takes its positions from elsewhere, or keeps a state.

    Returns:
        ``[2E, T, V]``, the lagging rows after the others, and the last step.
    """
    device, (count, steps) = tokens.device, tokens.shape
    layout = ExpertLayout([*range(count)] * 2, device)
    kv = KVCache(shapes, 2 * count, steps, models[0].dtype, device)
    for row in range(2 * count):
        kv.allocate(row, steps)
    kv.sync()
    parts, first = [], list(range(steps // 2))
    for ahead, behind in (
        (first, first),
        (_second_positions(steps, False), _second_positions(steps, True)),
    ):
        positions = torch.tensor([ahead] * count + [behind] * count, device=device)
        rows = torch.arange(2 * count, device=device)
        step = StepContext.at(kv, rows, positions, ahead[-1] + 1)
        parts.append(decoder(tokens.repeat(2, 1).gather(1, positions), step, layout, 0))
    return torch.cat(parts, dim=1), step


def _reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Compute logits with transformers' eager attention."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    finally:
        model.set_attn_implementation(own)
    return logits


def _tolerance(model: PreTrainedModel) -> float:
    mixture = any(getattr(model.config, name, None) for name in _MIXTURE_FIELDS)
    if mixture and model.dtype is not torch.float32:
        return _MIXTURE_TOLERANCE
    return _TOLERANCES[model.dtype]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of the rows' two forwards, each by its median token.

    Not of the whole norm: rounding may send a token of a mixture to another expert, while a
    missing part shows in most tokens.
    """
    difference, scale = (
        (found.float() - expected.float()).norm(dim=-1),
        expected.float().norm(dim=-1),
    )
    first = found.shape[1] // 2
    parts = (difference / scale).split([first, found.shape[1] - first], dim=1)
    # A NaN is propagated, and is above every tolerance.
    return float(torch.cat([part.median(dim=1).values for part in parts]).max())
