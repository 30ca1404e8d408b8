"""BERT as an encoder of one text, with less Python per operation than transformers' modules."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear, normalize
from transformers import AutoTokenizer, BertModel, PreTrainedModel

from paceline.actors.processor import multiplies_floats_faster

logger = logging.getLogger(__name__)

# cls: BERT's pooled output, then the mean embedding of the tokens, ``[2 H]``.
# mean: the normalised mean of the last hidden states, ``[H]`` (Reimers and Gurevych, EMNLP 2019).
Pooling = Literal["cls", "mean"]


_CHARACTERS_PER_TOKEN = 16  # upper bound for usual texts


class TextEncoder:
    """Features of a text's first and last tokens, by tokenizer and encoder.

    What is asked for is said at the start or the end of a long prompt.

    Attributes:
        size: number of features F.
    """

    def __init__(self, folder: Path, bert: BertModel, pooling: Pooling, max_tokens: int) -> None:
        """Load the tokenizer and build the encoder.

        Args:
            folder: of the tokenizer.
            bert: in float32 on the CPU; not needed afterwards.
            pooling: ``mean`` reads texts with the tokenizer's special tokens, as such models do.
            max_tokens: of a longer text so many are read, half of them its last; at most the
                model's positions.
        """
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._special = pooling == "mean"
        self._empty = self._tokenizer.num_special_tokens_to_add() if self._special else 0
        self._max_tokens = min(max_tokens, int(bert.config.max_position_embeddings))
        self.size = int(bert.config.hidden_size) * (1 if pooling == "mean" else 2)
        self._encoder = build_encoder(bert, pooling)

    def __call__(self, text: str) -> Tensor | None:
        """Float32 ``[F]``, None for an empty text."""
        last = self._max_tokens // 2
        first, characters = self._max_tokens - last, last * _CHARACTERS_PER_TOKEN
        if len(text) > 2 * characters:
            text = f"{text[:characters]} {text[-characters:]}"
        read = self._tokenizer(text, add_special_tokens=self._special, verbose=False)
        ids = read["input_ids"]
        if len(ids) > self._max_tokens:
            ids = ids[:first] + ids[len(ids) - last :]
        return None if len(ids) <= self._empty else self._encoder(torch.tensor(ids))


def keep_layers(bert: BertModel, count: int) -> BertModel:
    """The model with its first layers alone."""
    bert.encoder.layer = bert.encoder.layer[:count]
    return bert


def fingerprint(folder: Path, model: PreTrainedModel) -> str:
    """Hex digest of a model's weights and its folder's tokenizer, on which features depend."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor  # in bfloat16 as oneDNN reads it, if it does: `linear` would reorder every time
    bias: Tensor

    @classmethod
    def of(cls, *modules: torch.nn.Linear) -> _Dense:
        """Linear layers of one input as one."""
        weight = torch.cat([m.weight.detach() for m in modules])
        if weight.dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            weight = torch.ops.mkldnn._reorder_linear_weight(weight)
        return cls(weight, torch.cat([m.bias.detach() for m in modules]))

    def __call__(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return linear(x, self.weight, self.bias)
        product = torch.ops.mkldnn._linear_pointwise
        result: Tensor = product(x, self.weight, self.bias, "none", [], "")
        return result


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, module: torch.nn.LayerNorm) -> _Norm:
        return cls(module.weight.detach(), module.bias.detach(), module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class _EncoderLayer:
    queries_keys_values: _Dense
    attended: _Dense
    attended_norm: _Norm
    widened: _Dense
    activation: Callable[[Tensor], Tensor]
    narrowed: _Dense
    norm: _Norm


class BertEncoder:
    """Features of one unpadded text (Devlin et al., NAACL 2019).

    Equal to `transformers.BertModel` except for rounding. For ``cls`` the last layer computes the
    first token only, since no other one is pooled.
    """

    def __init__(self, bert: BertModel, pooling: Pooling) -> None:
        """Copy the weights of a model.

        Args:
            bert: on the CPU, with a pooler for ``cls``; not needed afterwards.
            pooling: see Pooling.

        Raises:
            ValueError: it is a decoder, or lacks the pooler.
        """
        config = bert.config
        if config.is_decoder or (pooling == "cls" and bert.pooler is None):
            raise ValueError("router: not an encoder with a pooler")
        own: Any = bert.embeddings
        self._heads = int(config.num_attention_heads)
        self._words = own.word_embeddings.weight.detach()
        first_type = own.token_type_embeddings.weight.detach()[0]
        self._positions = own.position_embeddings.weight.detach() + first_type
        self._norm = _Norm.of(own.LayerNorm)
        self._layers = [_layer_of(layer) for layer in bert.encoder.layer]
        self._pooler = _Dense.of(bert.pooler.dense) if pooling == "cls" else None

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        """Features, see Pooling; at least in float32.

        Args:
            token_ids: int64 ``[T]``, from one token to as many as the model has positions.
        """
        embedded = embedding(token_ids, self._words) + self._positions[: len(token_ids)]
        embedded = self._norm(embedded)
        hidden = embedded
        for layer in self._layers[:-1]:
            hidden = self._through(layer, hidden, len(hidden))
        for layer in self._layers[-1:]:
            hidden = self._through(layer, hidden, 1 if self._pooler else len(hidden))
        if self._pooler is None:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            return normalize(hidden.mean(dim=0, dtype=wide), dim=0)
        return torch.cat([self._pooler(hidden[0]).tanh(), embedded.mean(dim=0)])

    def _through(self, layer: _EncoderLayer, hidden: Tensor, rows: int) -> Tensor:
        """The first ``rows`` of a layer's output for ``[T, H]``."""
        split = layer.queries_keys_values(hidden).view(len(hidden), 3, self._heads, -1)
        queries, keys, values = split.permute(1, 2, 0, 3)
        # at these lengths faster than `scaled_dot_product_attention`
        scores = queries[:, :rows] @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])
        seen = (scores.softmax(-1) @ values).transpose(0, 1).reshape(rows, -1)
        hidden = layer.attended_norm(layer.attended(seen) + hidden[:rows])
        wide = layer.activation(layer.widened(hidden))
        return layer.norm(layer.narrowed(wide) + hidden)


def _layer_of(layer: Any) -> _EncoderLayer:  # a transformers.BertLayer, whose parts have no types
    own, out = layer.attention.self, layer.attention.output
    return _EncoderLayer(
        queries_keys_values=_Dense.of(own.query, own.key, own.value),
        attended=_Dense.of(out.dense),
        attended_norm=_Norm.of(out.LayerNorm),
        widened=_Dense.of(layer.intermediate.dense),
        activation=layer.intermediate.intermediate_act_fn,
        narrowed=_Dense.of(layer.output.dense),
        norm=_Norm.of(layer.output.LayerNorm),
    )


def build_encoder(bert: BertModel, pooling: Pooling) -> Callable[[Tensor], Tensor]:
    """A BertEncoder if it equals transformers' forward, else the latter.

    For ``mean`` it computes in bfloat16 if the processor is fast in it.

    Args:
        bert: in float32; a decoder or quantized model needs transformers' forward.
        pooling: see Pooling.
    """
    positions = min(8, int(bert.config.max_position_embeddings))
    sample = torch.arange(positions) % int(bert.config.vocab_size)
    library = _TransformersEncoder(bert, pooling)
    try:
        encoder = BertEncoder(bert, pooling)
        if torch.allclose(encoder(sample), library(sample), rtol=1e-3, atol=1e-4, equal_nan=True):
            if pooling == "mean" and not multiplies_floats_faster():
                return BertEncoder(copy.deepcopy(bert).to(torch.bfloat16), pooling)
            return encoder
        logger.info("router: the fast encoder differs from transformers', which is used")
    except Exception as error:
        logger.info("router: no fast encoder for this model (%s)", error)
    return library


@dataclass(frozen=True, slots=True)
class _TransformersEncoder:
    bert: BertModel
    pooling: Pooling

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        ids = token_ids[None]
        read = self.bert(input_ids=ids)
        if self.pooling == "mean":
            return normalize(read.last_hidden_state[0].mean(dim=0), dim=0)
        mean = self.bert.embeddings(input_ids=ids).mean(dim=1)
        return torch.cat([read.pooler_output, mean], dim=1)[0]
