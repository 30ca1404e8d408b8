"""The topic classifier: a BERT with a topic head, and further rows for added topics."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import BertForSequenceClassification, BertModel

from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.encoder import TextEncoder, fingerprint, keep_layers
from paceline.actors.router.regression import ClassifiedTexts

HEAD_FILE = "head.safetensors"  # weight [labels, H] and bias [labels], float32

_Head = tuple[tuple[str, ...], Tensor, Tensor]  # all labels; weight [n, F] and bias [n] of n rows


@dataclass(frozen=True, slots=True)
class _ClassifierParts:
    """A classifier without added topics.

    Attributes:
        texts: computes the features.
        labels: of the rows.
        weight: float32 ``[labels, H]``, on the first H features.
        bias: float32 ``[labels]``.
        fingerprint: of all these.
    """

    texts: TextEncoder
    labels: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    fingerprint: str


class TopicClassifier:
    """Topic probabilities of a prompt, on the CPU.

    Attributes:
        fingerprint: of the model, tokenizer and head.
    """

    def __init__(self, model_path: str, encoder_path: str | None = None) -> None:
        """Load model and tokenizer.

        Args:
            model_path: folder of a BertForSequenceClassification, or of a head on another encoder.
            encoder_path: folder of the latter, a BERT of sentence embeddings.

        Raises:
            FileNotFoundError: a folder holds no model.
            ValueError: the head was fitted on another encoder.
        """
        for path in (model_path, encoder_path):
            if path is not None and not (Path(path) / "config.json").is_file():
                raise FileNotFoundError(f"router: no model in {path}")
        folder = Path(model_path)
        self._model = (
            _read_classifier(folder)
            if encoder_path is None
            else _read_head(folder, Path(encoder_path))
        )
        self.fingerprint = self._model.fingerprint
        # One attribute, replaced whole: a classification reads one head from start to end.
        self._head = self._with(AddedTopicHead.empty(self.fingerprint, self.feature_size))

    @property
    def labels(self) -> tuple[str, ...]:
        """All topics, the model's own first."""
        return self._head[0]

    @property
    def feature_size(self) -> int:
        """F of :meth:`features`."""
        return self._model.texts.size

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
        new = [i for i, topic in enumerate(head.topics) if topic not in self._model.labels]
        labels = (*self._model.labels, *(head.topics[i] for i in new))
        weight, bias = head.weight[new].copy(), head.bias[new].copy()
        return labels, torch.from_numpy(weight), torch.from_numpy(bias)

    @torch.inference_mode()
    def classify(self, text: str) -> dict[str, float]:
        """Probability by label; they sum to 1, and are equal for an empty text."""
        head = self._head
        labels, features = head[0], self.features(text)
        if features is None:
            return dict.fromkeys(labels, 1 / len(labels))
        logits = self._logits(features[None], head)[0]
        return dict(zip(labels, logits.double().softmax(-1).tolist(), strict=True))

    def features(self, text: str) -> Tensor | None:
        """Features of a text, float32 ``[F]``, see Pooling; None for an empty one.

        A classifier's pooled output was trained for its own rows alone and hardly separates new
        topics from ``general``: so added rows also read the mean embedding behind it.
        """
        return self._model.texts(text)

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
        weight, bias = self._model.weight, self._model.bias
        own = linear(features[:, : weight.shape[1]], weight, bias)
        return torch.cat([own, linear(features, *head[1:])], dim=1)


def _read_classifier(folder: Path) -> _ClassifierParts:
    bert = BertForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()
    mark = fingerprint(folder, bert)
    labels = tuple(str(bert.config.id2label[i]) for i in range(bert.config.num_labels))
    texts = TextEncoder(folder, bert.bert, "cls", int(bert.config.max_position_embeddings))
    own: Any = bert.classifier
    return _ClassifierParts(texts, labels, own.weight.detach(), own.bias.detach(), mark)


def _read_head(folder: Path, encoder_folder: Path) -> _ClassifierParts:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    bert = BertModel.from_pretrained(encoder_folder, dtype=torch.float32, local_files_only=True)
    mark = fingerprint(encoder_folder, bert)
    if mark != config["encoder_fingerprint"]:
        raise ValueError(f"router: {folder} was fitted on another encoder than {encoder_folder}")
    rows = load_file(folder / HEAD_FILE)
    # heads that were made before read all layers
    bert = keep_layers(bert.eval(), int(config.get("layers", bert.config.num_hidden_layers)))
    texts = TextEncoder(encoder_folder, bert, "mean", int(config["max_tokens"]))
    names = config["id2label"]
    labels = tuple(str(names[str(i)]) for i in range(len(names)))
    own = hashlib.blake2b(mark.encode(), digest_size=8)
    for name in ("weight", "bias"):
        own.update(rows[name].numpy().tobytes())
    return _ClassifierParts(texts, labels, rows["weight"], rows["bias"], own.hexdigest())
