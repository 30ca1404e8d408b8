"""The small BERT that tells a prompt's topic."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoTokenizer, BertForSequenceClassification

from paceline.actors.routing.bert import reader_of
from paceline.actors.routing.head import GrownHead
from paceline.actors.routing.regression import Texts

_CHARACTERS_PER_TOKEN = 16  # no token of a usual text is longer; what is cut off is never read


_Head = tuple[tuple[str, ...], Tensor, Tensor]  # all labels; weight [n, F] and bias [n] of n rows


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
        model = BertForSequenceClassification.from_pretrained(
            model_path, dtype=torch.float32, local_files_only=True
        ).eval()
        config = model.config
        self._max_tokens = int(config.max_position_embeddings)
        self._hidden_size = int(config.hidden_size)
        self._own = tuple(str(config.id2label[i]) for i in range(config.num_labels))
        self.mark = _fingerprint(Path(model_path), model)
        self._reader = reader_of(model.bert)
        self._own_rows = model.classifier.weight.detach(), model.classifier.bias.detach()
        # One attribute, replaced whole: a classification reads one head from start to end.
        self._head = self._with(GrownHead.empty(self.mark, self.feature_size))

    @property
    def labels(self) -> tuple[str, ...]:
        """The topics that are told apart, the model's own first."""
        return self._head[0]

    @property
    def feature_size(self) -> int:
        """F, of :meth:`features`."""
        return 2 * self._hidden_size

    def take(self, head: GrownHead) -> None:
        """Tell the topics of a head apart too, in place of those of an earlier head.

        Raises:
            ValueError: for a head that was grown on another model.
        """
        self._head = self._with(head)

    def _with(self, head: GrownHead) -> _Head:
        """All labels, and a head's rows; a topic that the model knows itself is left to it."""
        if head.base != self.mark or head.weight.shape[1] != self.feature_size:
            raise ValueError("router: the head was grown on another model")
        new = [i for i, topic in enumerate(head.topics) if topic not in self._own]
        labels = (*self._own, *(head.topics[i] for i in new))
        weight, bias = head.weight[new].copy(), head.bias[new].copy()
        return labels, torch.from_numpy(weight), torch.from_numpy(bias)

    @torch.inference_mode()
    def classify(self, text: str) -> dict[str, float]:
        """Probability by label; they sum to 1. An empty text gets equal probabilities."""
        head = self._head
        labels, features = head[0], self._features(text)
        if features is None:
            return dict.fromkeys(labels, 1 / len(labels))
        logits = self._logits(features, head)[0]
        return dict(zip(labels, logits.double().softmax(-1).tolist(), strict=True))

    @torch.inference_mode()
    def features(self, text: str) -> Tensor | None:
        """What a text is judged by, float32 ``[F]``; None of an empty one.

        The first half is BERT's pooled output, which is all that the model's own rows read. It
        was trained for them alone, and what they do not need is hardly in it: new topics lie in
        ``general``'s heap there. So grown rows read a second half too, the mean over the text of
        BERT's embeddings: its words.
        """
        found = self._features(text)
        return None if found is None else found[0]

    @torch.inference_mode()
    def judged(self, features: Tensor, head: GrownHead) -> tuple[tuple[str, ...], Texts]:
        """The labels, and what a head makes of features, float32 ``[N, F]``.

        Raises:
            ValueError: for a head that was grown on another model.
        """
        rows = self._with(head)
        logits = self._logits(features, rows)
        return rows[0], Texts(features.double().numpy(), logits.double().numpy())

    def _logits(self, features: Tensor, head: _Head) -> Tensor:
        """Of all labels ``[N, L]``, from ``[N, F]``."""
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
        return self._reader(torch.tensor(ids))[None]


def _fingerprint(folder: Path, model: BertForSequenceClassification) -> str:
    """Of what the features depend on: weights, and how a text becomes tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    tokenizer = folder / "tokenizer.json"
    if tokenizer.is_file():
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()
