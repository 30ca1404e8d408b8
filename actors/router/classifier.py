"""The topic classifier: a small BERT with further rows for added topics."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, layer_norm, linear, scaled_dot_product_attention
from transformers import AutoTokenizer, BertForSequenceClassification, BertModel

from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.regression import ClassifiedTexts

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


class BertEncoder:
    """Pooled output and mean embedding of one unpadded text (Devlin et al., NAACL 2019).

    Equal to `transformers.BertModel` except for rounding. The last layer computes the first token
    only, since no other one is pooled.
    """

    def __init__(self, bert: BertModel) -> None:
        """Copy the weights of a model.

        Args:
            bert: with a pooler, in float32 on the CPU; not needed afterwards.

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
        """The first ``rows`` of a layer's output for ``[T, H]``."""
        split = layer.queries_keys_values(hidden).view(len(hidden), 3, self._heads, -1)
        queries, keys, values = split.permute(1, 2, 0, 3).unsqueeze(1)
        seen = scaled_dot_product_attention(queries[:, :, :rows], keys, values)
        seen = seen[0].transpose(0, 1).reshape(rows, -1)
        hidden = layer.attended_norm(layer.attended(seen) + hidden[:rows])
        wide = layer.activation(layer.widened(hidden))
        return layer.norm(layer.narrowed(wide) + hidden)


def _layer_of(layer: Any) -> _Layer:  # a transformers.BertLayer, whose parts have no types
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


def build_encoder(bert: BertModel) -> Callable[[Tensor], Tensor]:
    """A BertEncoder if it equals transformers' forward, else the latter.

    Args:
        bert: a decoder or quantized model needs transformers' forward.
    """
    positions = min(8, int(bert.config.max_position_embeddings))
    sample = torch.arange(positions) % int(bert.config.vocab_size)
    library = _TransformersEncoder(bert)
    try:
        encoder = BertEncoder(bert)
        if torch.allclose(encoder(sample), library(sample), rtol=1e-3, atol=1e-4, equal_nan=True):
            return encoder
        logger.info("router: the fast encoder differs from transformers', which is used")
    except Exception as error:
        logger.info("router: no fast encoder for this model (%s)", error)
    return library


@dataclass(frozen=True, slots=True)
class _TransformersEncoder:
    bert: BertModel

    @torch.inference_mode()
    def __call__(self, token_ids: Tensor) -> Tensor:
        ids = token_ids[None]
        mean = self.bert.embeddings(input_ids=ids).mean(dim=1)
        return torch.cat([self.bert(input_ids=ids).pooler_output, mean], dim=1)[0]


_CHARACTERS_PER_TOKEN = 16  # upper bound for usual texts


_Head = tuple[tuple[str, ...], Tensor, Tensor]  # all labels; weight [n, F] and bias [n] of n rows


class TopicClassifier:
    """Topic probabilities of a prompt, on the CPU in float32.

    A text is truncated to the model's positions.

    Attributes:
        fingerprint: of the model and tokenizer.
    """

    def __init__(self, model_path: str) -> None:
        """Load model and tokenizer from one folder.

        Raises:
            FileNotFoundError: the folder holds no model.
        """
        if not (Path(model_path) / "config.json").is_file():
            raise FileNotFoundError(f"router: no model in {model_path}")
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        model = BertForSequenceClassification.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        ).eval()
        config = model.config
        self._max_tokens = int(config.max_position_embeddings)
        self._hidden_size = int(config.hidden_size)
        self._own = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        self.fingerprint = _fingerprint(Path(model_path), model)
        self._encoder = build_encoder(model.bert)
        self._own_rows = model.classifier.weight.detach(), model.classifier.bias.detach()
        # One attribute, replaced whole: a classification reads one head from start to end.
        self._head = self._with(AddedTopicHead.empty(self.fingerprint, self.feature_size))

    @property
    def labels(self) -> tuple[str, ...]:
        """All topics, the model's own first."""
        return self._head[0]

    @property
    def feature_size(self) -> int:
        """F of :meth:`features`."""
        return 2 * self._hidden_size

    def set_head(self, head: AddedTopicHead) -> None:
        """Use a head for added topics, in place of an earlier one.

        Raises:
            ValueError: the head was fitted on another model.
        """
        self._head = self._with(head)

    def _with(self, head: AddedTopicHead) -> _Head:
        """All labels, and a head's rows; for a topic of the model its own row is used."""
        if head.base != self.fingerprint or head.weight.shape[1] != self.feature_size:
            raise ValueError("router: the head was fitted on another model")
        new = [i for i, topic in enumerate(head.topics) if topic not in self._own]
        labels = (*self._own, *(head.topics[i] for i in new))
        weight, bias = head.weight[new].copy(), head.bias[new].copy()
        return labels, torch.from_numpy(weight), torch.from_numpy(bias)

    @torch.inference_mode()
    def classify(self, text: str) -> dict[str, float]:
        """Probability by label; they sum to 1, and are equal for an empty text."""
        head = self._head
        labels, features = head[0], self._features(text)
        if features is None:
            return dict.fromkeys(labels, 1 / len(labels))
        logits = self._logits(features, head)[0]
        return dict(zip(labels, logits.double().softmax(-1).tolist(), strict=True))

    @torch.inference_mode()
    def features(self, text: str) -> Tensor | None:
        """Features of a text, float32 ``[F]``; None for an empty one.

        The first half is BERT's pooled output, the input of the model's own rows. It was trained
        for these alone and hardly separates new topics from ``general``. So added rows also read
        the second half, the mean of BERT's embeddings over the text.
        """
        found = self._features(text)
        return None if found is None else found[0]

    @torch.inference_mode()
    def classify_features(
        self, features: Tensor, head: AddedTopicHead
    ) -> tuple[tuple[str, ...], ClassifiedTexts]:
        """The labels, and the logits with a head for features, float32 ``[N, F]``.

        Raises:
            ValueError: the head was fitted on another model.
        """
        rows = self._with(head)
        logits = self._logits(features, rows)
        return rows[0], ClassifiedTexts(features.double().numpy(), logits.double().numpy())

    def _logits(self, features: Tensor, head: _Head) -> Tensor:
        """Logits of all labels ``[N, L]``, from features ``[N, F]``."""
        own = linear(features[:, : self._hidden_size], *self._own_rows)
        return torch.cat([own, linear(features, *head[1:])], dim=1)

    def _features(self, text: str) -> Tensor | None:
        """``[1, F]``."""
        ids = self._tokenizer(
            text[: self._max_tokens * _CHARACTERS_PER_TOKEN],
            add_special_tokens=False,
            truncation=True,
            max_length=self._max_tokens,
        )["input_ids"]
        if not ids:
            return None
        return self._encoder(torch.tensor(ids))[None]


def _fingerprint(folder: Path, model: BertForSequenceClassification) -> str:
    """Hex digest of weights and tokenizer, on which the features depend."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()
