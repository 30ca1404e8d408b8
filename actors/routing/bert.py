"""BERT's reading of one text, with as few operations as it takes.

The front door reads every request's text while it sends everybody's tokens: a small BERT is done in
a millisecond, of which the library's own forward makes two or three, most of them between its
operations. Every operation also hands the interpreter to another thread, and has to wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear, scaled_dot_product_attention
from transformers import BertModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Dense:
    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, *modules: torch.nn.Linear) -> _Dense:
        """Linear layers of one input as one."""
        weights, biases = [m.weight.detach() for m in modules], [m.bias.detach() for m in modules]
        return cls(torch.cat(weights), torch.cat(biases))

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


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
class _Layer:
    queries_keys_values: _Dense
    attended: _Dense
    attended_norm: _Norm
    widened: _Dense
    activation: Callable[[Tensor], Tensor]
    narrowed: _Dense
    norm: _Norm


class BertReader:
    """The pooled output, and the mean of the embeddings, of one unpadded text.

    The same numbers as `transformers.BertModel`'s but for rounding: Devlin et al., NAACL 2019. Only
    the first token is pooled, so that the last layer computes that one alone.
    """

    def __init__(self, bert: BertModel) -> None:
        """Take what is needed of a model with a pooler, which may then be dropped.

        Args:
            bert: in float32 on the CPU.

        Raises:
            ValueError: it is a decoder, or has no pooler.
        """
        config = bert.config
        if config.is_decoder or bert.pooler is None:
            raise ValueError("router: not an encoder with a pooler")
        own: Any = bert.embeddings
        self._heads = int(config.num_attention_heads)
        self._words = own.word_embeddings.weight.detach()
        first_type = own.token_type_embeddings.weight.detach()[0]
        self._positions = own.position_embeddings.weight.detach() + first_type
        self._norm = _Norm.of(own.LayerNorm)
        self._layers = [_layer_of(layer) for layer in bert.encoder.layer]
        self._pooler = _Dense.of(bert.pooler.dense)

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        """Float32 ``[2 H]``: pooled output, then mean embedding.

        Args:
            token_ids: int64 ``[T]``, from one token to as many as the model has positions.
        """
        embedded = embedding(token_ids, self._words) + self._positions[: len(token_ids)]
        embedded = self._norm(embedded)
        hidden = embedded
        for layer in self._layers[:-1]:
            hidden = self._through(layer, hidden, len(hidden))
        for layer in self._layers[-1:]:
            hidden = self._through(layer, hidden, 1)
        return torch.cat([self._pooler(hidden[0]).tanh(), embedded.mean(dim=0)])

    def _through(self, layer: _Layer, hidden: Tensor, rows: int) -> Tensor:
        """The first ``rows`` of what a layer makes of ``[T, H]``."""
        split = layer.queries_keys_values(hidden).view(len(hidden), 3, self._heads, -1)
        queries, keys, values = split.permute(1, 2, 0, 3).unsqueeze(1)
        seen = scaled_dot_product_attention(queries[:, :, :rows], keys, values)
        seen = seen[0].transpose(0, 1).reshape(rows, -1)
        hidden = layer.attended_norm(layer.attended(seen) + hidden[:rows])
        wide = layer.activation(layer.widened(hidden))
        return layer.norm(layer.narrowed(wide) + hidden)


def _layer_of(layer: Any) -> _Layer:  # a transformers.BertLayer, whose parts bear no types
    own, out = layer.attention.self, layer.attention.output
    return _Layer(
        queries_keys_values=_Dense.of(own.query, own.key, own.value),
        attended=_Dense.of(out.dense),
        attended_norm=_Norm.of(out.LayerNorm),
        widened=_Dense.of(layer.intermediate.dense),
        activation=layer.intermediate.intermediate_act_fn,
        narrowed=_Dense.of(layer.output.dense),
        norm=_Norm.of(layer.output.LayerNorm),
    )


def reader_of(bert: BertModel) -> Callable[[Tensor], Tensor]:
    """A BertReader where it reads as the library does, else the library's own forward.

    Args:
        bert: see BertReader; one that is a decoder or quantized is read by the library.
    """
    positions = min(8, int(bert.config.max_position_embeddings))
    sample = torch.arange(positions) % int(bert.config.vocab_size)
    library = _Library(bert)
    try:
        reader = BertReader(bert)
        if torch.allclose(reader(sample), library(sample), rtol=1e-3, atol=1e-4, equal_nan=True):
            return reader
        logger.info("router: a brief reading differs from the library's, which is taken")
    except Exception as error:
        logger.info("router: no brief reading of this model (%s)", error)
    return library


@dataclass(frozen=True, slots=True)
class _Library:
    bert: BertModel

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        ids = token_ids[None]
        mean = self.bert.embeddings(input_ids=ids).mean(dim=1)
        return torch.cat([self.bert(input_ids=ids).pooler_output, mean], dim=1)[0]
