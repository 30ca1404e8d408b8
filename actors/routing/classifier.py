"""The small BERT that tells a prompt's topic."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, BertForSequenceClassification

_CHARACTERS_PER_TOKEN = 16  # no token of a usual text is longer; what is cut off is never read


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
        self.labels: tuple[str, ...] = tuple(
            str(config.id2label[i]) for i in range(config.num_labels)
        )

    @torch.inference_mode()
    def classify(self, text: str) -> dict[str, float]:
        """Probability by label; they sum to 1. An empty text gets equal probabilities."""
        ids = self._tokenizer(
            text[: self._max_tokens * _CHARACTERS_PER_TOKEN],
            add_special_tokens=False,
            truncation=True,
            max_length=self._max_tokens,
        )["input_ids"]
        if not ids:
            return dict.fromkeys(self.labels, 1 / len(self.labels))
        logits = self._model(input_ids=torch.tensor([ids])).logits[0]
        return dict(zip(self.labels, logits.double().softmax(-1).tolist(), strict=True))
