"""The small BERT that tells a prompt's topic."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertForSequenceClassification

from paceline.actors.routing.growth import Texts
from paceline.actors.routing.head import GrownHead

_CHARACTERS_PER_TOKEN = 16  # no token of a usual text is longer; what is cut off is never read


_Head = tuple[tuple[str, ...], Tensor, Tensor]  # labels, weight [L, H], bias [L]


class TopicClassifier:
    """A prompt's topic probabilities, on the CPU in float32.

    Only the start of a text counts, as much of it as the model was made for.
    """

    def __init__(self, model_path: str) -> None:
        """Load model and tokenizer from one folder.

        Raises:
            FileNotFoundError: the folder holds no model.
        """
        if not (Path(model_path) / "config.json").is_file():
            raise FileNotFoundError(f"router: no model in {model_path}")
        self._tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        self._model = BertForSequenceClassification.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        ).eval()
        config = self._model.config
        self._max_tokens = int(config.max_position_embeddings)
        self._own = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        self.mark = self._fingerprint(Path(model_path))
        head = self._model.classifier
        # One attribute, replaced whole: a classification reads one head from start to end.
        self._head: _Head = self._own, head.weight.detach(), head.bias.detach()

    @property
    def labels(self) -> tuple[str, ...]:
        """The topics that are told apart, the model's own first."""
        return self._head[0]

    @property
    def feature_size(self) -> int:
        """H of the features."""
        return int(self._model.classifier.in_features)

    def take(self, head: GrownHead) -> None:
        """Tell the topics of a head apart too, in place of those of an earlier head.

        Raises:
            ValueError: for a head that was grown on another model.
        """
        self._head = self._with(head)

    def _with(self, head: GrownHead) -> _Head:
        """The model's own rows and a head's; a topic that the model knows itself is left to it."""
        if head.base != self.mark or head.weight.shape[1] != self.feature_size:
            raise ValueError("router: the head was grown on another model")
        own = self._model.classifier
        new = [i for i, topic in enumerate(head.topics) if topic not in self._own]
        weight = torch.from_numpy(head.weight[new].copy())
        bias = torch.from_numpy(head.bias[new].copy())
        return (
            (*self._own, *(head.topics[i] for i in new)),
            torch.cat([own.weight.detach(), weight]),
            torch.cat([own.bias.detach(), bias]),
        )

    @torch.inference_mode()
    def classify(self, text: str) -> dict[str, float]:
        """Probability by label; they sum to 1. An empty text gets equal probabilities."""
        labels, weight, bias = self._head
        features = self._features(text)
        if features is None:
            return dict.fromkeys(labels, 1 / len(labels))
        logits = torch.nn.functional.linear(features, weight, bias)[0]
        return dict(zip(labels, logits.double().softmax(-1).tolist(), strict=True))

    @torch.inference_mode()
    def features(self, text: str) -> Tensor | None:
        """What the classifier's rows read of a text, float32 ``[H]``; None of an empty one."""
        found = self._features(text)
        return None if found is None else found[0]

    @torch.inference_mode()
    def judged(self, features: Tensor, head: GrownHead) -> tuple[tuple[str, ...], Texts]:
        """The labels, and what a head makes of features, float32 ``[N, H]``.

        Raises:
            ValueError: for a head that was grown on another model.
        """
        labels, weight, bias = self._with(head)
        logits = torch.nn.functional.linear(features, weight, bias)
        return labels, Texts(features.double().numpy(), logits.double().numpy())

    def _features(self, text: str) -> Tensor | None:
        """``[1, H]``."""
        ids = self._tokenizer(
            text[: self._max_tokens * _CHARACTERS_PER_TOKEN],
            add_special_tokens=False,
            truncation=True,
            max_length=self._max_tokens,
        )["input_ids"]
        if not ids:
            return None
        pooled: Tensor = self._model.bert(input_ids=torch.tensor([ids])).pooler_output
        return pooled

    def _fingerprint(self, folder: Path) -> str:
        """Of what the features depend on: weights, and how a text becomes tokens."""
        digest = hashlib.blake2b(digest_size=8)
        for name, tensor in sorted(self._model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        tokenizer = folder / "tokenizer.json"
        if tokenizer.is_file():
            digest.update(tokenizer.read_bytes())
        return digest.hexdigest()
