"""Models with their KV cache: one forward over rows of any lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from paceline.actors.engine import paged_attention as paged
from paceline.actors.engine.attention import StepContext
from paceline.actors.engine.cuda_graphs import CudaCapture, GraphedDecoder
from paceline.actors.engine.decoders import Decoder, make_decoder, unservable, vocab_rows
from paceline.actors.engine.dynamic_rope import dynamic_length
from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.inference import inference
from paceline.actors.engine.kv_cache import KVCache
from paceline.actors.engine.transfer import device_tensor
from paceline.actors.weights.checkpoint import copy_state, tied_names
from paceline.actors.weights.eagle import weights_for


def kv_shapes(config: PreTrainedConfig) -> list[tuple[int, int]]:
    """Return (key/value heads, head dimension) per layer of a transformers config.

    Raises:
        ValueError: the config names none, or keys and values differ in size.
    """
    if getattr(config, "text_config", None) is not None:
        raise unservable(config, "it reads more than text")
    if not isinstance(getattr(config, "num_attention_heads", None), int):
        raise unservable(config, "its config gives no attention heads, so no keys and values")
    if getattr(config, "kv_lora_rank", None):
        raise unservable(config, "its keys and values (latent attention) differ in size")
    return [_kv_shape(layer) for layer in config.per_layer_config]


def _kv_shape(config: PreTrainedConfig) -> tuple[int, int]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def kv_block_size(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Return the positions per block of a model's KV cache.

    Args:
        config: transformers' config.
        dtype: of keys and values.
        device: of keys and values.
    """
    return paged.block_size(device, dtype, int(config.num_attention_heads), *kv_shapes(config)[0])


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Consecutive tokens of one row, at least one, of which no logits are needed.

    Attributes:
        row: of the KV cache.
        token_ids: from position ``start`` on.
        start: position of the first one.
    """

    row: int
    token_ids: Sequence[int]
    start: int


class ModelRunner:
    """Runs E models of one architecture for up to ``rows`` requests at once.

    The target is one model; the experts of a draft architecture are several that share rows.

    Attributes:
        models: their parameters may be views into fused weights.
        device: of the models.
        max_model_len: maximum positions per request.
        vocab_size: V.
        decoder: runs the models.
        kv: keys and values of all rows.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel],
        rows: int,
        max_model_len: int,
        kv_positions: int | None = None,
        *,
        graph_tokens: int = 0,
        vocab_size: int | None = None,
        keep_hidden: bool = False,
    ) -> None:
        """Take over the models, whose weights are changed by :meth:`load_weights` alone.

        Args:
            models: causal LMs of one config, dtype and device, with the engine's attention.
            rows: maximum number of requests.
            max_model_len: maximum positions per request.
            kv_positions: positions of the KV cache over all requests; None is
                ``rows * max_model_len``.
            graph_tokens: on GPUs, fused forwards of at most so many tokens per row run as CUDA
                graphs.
            vocab_size: V, of token ids and logits; None is the models' own.
            keep_hidden: whether the KV cache keeps hidden states; of one model.

        Raises:
            ValueError: the model cannot be served, or the cache is smaller than one request.
        """
        self.models = list(models)
        self.device: torch.device = self.models[0].device
        self.max_model_len = max_model_len
        config, dtype = self.models[0].config, self.models[0].dtype
        shapes = kv_shapes(config)
        self.vocab_size = vocab_rows(self.models[0]) if vocab_size is None else vocab_size
        self.decoder = self._make_decoder(graph_tokens)
        size = kv_block_size(config, dtype, self.device)
        where = dtype, self.device
        hidden = int(config.hidden_size) if keep_hidden else 0
        self.kv = KVCache(shapes, rows, max_model_len, *where, kv_positions, size, hidden)
        self.kv.max_shared_prompt = dynamic_length(config)

    def _make_decoder(self, graph_tokens: int) -> Decoder:
        shapes = kv_shapes(self.models[0].config)
        decoder = make_decoder(self.models, shapes, self.max_model_len)
        decoder.vocab_size = self.vocab_size
        if graph_tokens and self.device.type == "cuda" and isinstance(decoder, FusedDecoder):
            return GraphedDecoder(decoder, CudaCapture(), graph_tokens)
        return decoder

    @property
    def rolls_out(self) -> bool:
        """Whether all steps of a draft can be one call, see :meth:`rollout`."""
        return isinstance(self.decoder, GraphedDecoder)

    @inference
    def forward(
        self,
        rows: Sequence[int],
        token_ids: Tensor,
        positions: Tensor,
        span: int,
        keep: int = 0,
        layout: ExpertLayout | None = None,
    ) -> Tensor:
        """Compute T new tokens of B rows and store their keys and values.

        Rows must have blocks for their own tokens (``kv.allocate``), not for padding behind them.

        Args:
            rows: B rows.
            token_ids: int64 ``[B, T]``.
            positions: int64 ``[B, T]``.
            span: 1 + the largest position that any row reads.
            keep: return logits of the last ``keep`` tokens only; 0 is all.
            layout: models of the rows; None is the first for all.

        Returns:
            logits ``[B, T or keep, V]`` in the models' dtype.
        """
        step = self._step(rows, positions, span)
        layout = layout or _first_model(len(rows), self.device)
        if self.kv.hidden is None:
            return self.decoder(token_ids, step, layout, keep)
        logits, hidden = self.decoder.with_hidden(token_ids, step, layout, keep)
        step.write_hidden(hidden)
        return logits

    @property
    def is_ragged(self) -> bool:
        """Whether :meth:`verify` computes a row's own tokens alone."""
        return isinstance(self.decoder, FusedDecoder) and self.decoder.has_kernels

    def verify(
        self,
        rows: Sequence[int],
        token_ids: Tensor,
        positions: Tensor,
        span: int,
        num_drafted: Tensor,
        prompts: Sequence[PromptTokens] = (),
    ) -> Tensor:
        """Compute the last token of B rows and their drafted tokens, see :meth:`forward`.

        Args:
            rows: B rows.
            token_ids: int64 ``[B, k + 1]``.
            positions: int64 ``[B, k + 1]``.
            span: 1 + the largest position that any row reads.
            num_drafted: int64 ``[B]``; tokens behind a row's own are padding.
            prompts: to compute in the same forward; it must be ragged. They may come before a
                row's last token.

        Returns:
            logits ``[B, k + 1, V]``; those of padding are of any token, or zeros.
        """
        counts = (num_drafted + 1).tolist() if self.is_ragged else []
        if not prompts and (not counts or sum(counts) == token_ids.numel()):
            return self.forward(rows, token_ids, positions, span)
        own = torch.arange(token_ids.shape[1]) <= num_drafted[:, None]
        of_tokens = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        logits = self._run_ragged(of_tokens, token_ids[own], positions[own], prompts)
        if len(of_tokens) == own.numel():
            return logits.view(*own.shape, -1)
        padded = logits.new_zeros(own.numel(), self.vocab_size)
        padded.index_copy_(0, own.flatten().nonzero().flatten(), logits)
        return padded.view(*own.shape, -1)

    @inference
    def _run_ragged(
        self,
        rows: list[int],
        token_ids: Tensor,
        positions: Tensor,
        prompts: Sequence[PromptTokens],
    ) -> Tensor:
        """Compute N tokens and those of prompts; return the former's logits ``[N, V]``.

        A token is a row of its own, which all kernels allow: they store keys before they read, and
        read what neighbouring tokens of one row attend to once.
        """
        assert isinstance(self.decoder, FusedDecoder)
        count, rows = len(rows), [*rows, *(p.row for p in prompts for _ in p.token_ids)]
        tokens = [token for p in prompts for token in p.token_ids]
        at = [p.start + i for p in prompts for i in range(len(p.token_ids))]
        token_ids = torch.cat([token_ids, torch.tensor(tokens, dtype=torch.int64)])[:, None]
        positions = torch.cat([positions, torch.tensor(at, dtype=torch.int64)])[:, None]
        step = self._step(rows, positions, int(positions.max()) + 1)
        layout = _first_model(len(rows), self.device)
        logits, hidden = self.decoder.first_logits(token_ids, step, layout, count)
        if self.kv.hidden is not None:
            step.write_hidden(hidden)
        return logits[:, 0]

    @inference
    def rollout(
        self,
        rows: Sequence[int],
        token_ids: Tensor,
        positions: Tensor,
        span: int,
        steps: int,
        layout: ExpertLayout,
    ) -> tuple[Tensor, Tensor] | None:
        """Draft the most probable tokens, all steps in one call: a CUDA graph.

        Args:
            rows: B rows.
            token_ids: int64 ``[B, 2]``, their last tokens.
            positions: int64 ``[B, 2]``.
            span: 1 + the largest position that any row reads at the last step.
            steps: k.
            layout: models of the rows.

        Returns:
            tokens int64 and their probabilities float32, ``[B, k]`` each; None unless it
            ``rolls_out``.
        """
        if not isinstance(self.decoder, GraphedDecoder):
            return None
        return self.decoder.rollout(token_ids, self._step(rows, positions, span), layout, steps)

    def _step(self, rows: Sequence[int], positions: Tensor, span: int) -> StepContext:
        self.kv.sync()
        return StepContext.at(self.kv, _index(tuple(rows), self.device), positions, span)

    def prefill(
        self,
        row: int,
        token_ids: Sequence[int],
        start: int,
        expert: int = 0,
        keep: int = 1,
    ) -> Tensor:
        """Store keys and values of consecutive tokens of one row, from position ``start``.

        The row must have blocks for them.

        Returns:
            logits of the last ``keep`` tokens ``[keep, V]``; 0 is all.
        """
        if not token_ids:
            return torch.empty(0, self.vocab_size)
        tokens = torch.tensor([list(token_ids)], dtype=torch.int64, device=self.device)
        end = start + len(token_ids)
        positions = torch.arange(start, end, device=self.device)[None]
        layout = ExpertLayout([expert], self.device)
        return self.forward([row], tokens, positions, span=end, keep=keep, layout=layout)[0]

    def prefill_prompts(self, prompts: Sequence[PromptTokens]) -> None:
        """Store keys and values of prompts' tokens; their rows must have blocks for them."""
        if self.is_ragged:
            none = torch.empty(0, dtype=torch.int64)
            self._run_ragged([], none, none, prompts)
            return
        for prompt in prompts:
            self.prefill(prompt.row, prompt.token_ids, prompt.start)

    def prefill_batch(
        self,
        rows: Sequence[int],
        token_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        experts: Sequence[int],
    ) -> None:
        """Prefill several rows at once, each padded to the longest.

        Args:
            rows: B rows.
            token_ids: consecutive tokens per row, at least one.
            starts: position of the first one per row.
            experts: model per row.
        """
        longest = max(map(len, token_ids))
        padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in token_ids]
        first = device_tensor(list(starts), self.device)
        positions = first[:, None] + torch.arange(longest, device=self.device)
        layout = ExpertLayout(experts, self.device)
        tokens = device_tensor(padded, self.device)
        self.forward(rows, tokens, positions, max(starts) + longest, keep=1, layout=layout)

    def grow(self, models: Sequence[PreTrainedModel]) -> Iterator[None]:
        """Add models, a part per iteration; forwards may run in between.

        They share rows and KV cache with the present ones, come after them, and may run once all
        parts are done. Iterate in ``torch.inference_mode``.

        Args:
            models: of the same config, dtype and device, with the engine's attention.
        """
        all_models = [*self.models, *models]
        yield from self.decoder.grow(all_models)
        self.models = all_models

    @inference
    def load_weights(self, state: Mapping[str, Tensor], expert: int = 0) -> None:
        """Copy new weights over a model's, in place.

        Raises:
            ValueError: a name or shape differs, or see weights_for; nothing has been copied then.
        """
        model = self.models[expert]
        copy_state(model.state_dict(), weights_for(model, state), tied_names(model))
        self.decoder.refresh(expert)


# Cached, since a batch stays the same for many rounds.
@lru_cache(maxsize=256)
def _index(rows: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def _first_model(rows: int, device: torch.device) -> ExpertLayout:
    return ExpertLayout([0] * rows, device)
