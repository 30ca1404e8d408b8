"""Classifier rows for added topics, beside those of the router's model. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AddedTopicHead:
    """Rows of added topics; the model's own rows never change.

    Attributes:
        base: fingerprint of the model whose features the rows read.
        topics: one per row.
        weight: float32 ``[topics, F]``.
        bias: float32 ``[topics]``.
        features: float32 ``[N, F]``, of the training examples (TopicClassifier.features), which
            later topics must not capture. They hold no text.
        rows: int64 ``[N]``, the row of each example.
    """

    base: str
    topics: tuple[str, ...]
    weight: Floats
    bias: Floats
    features: Floats
    rows: NDArray[np.int64]

    @classmethod
    def empty(cls, base: str, size: int) -> AddedTopicHead:
        """A head without rows, for F = ``size`` features."""
        nothing = np.zeros((0, size), np.float32)
        return cls(base, (), nothing, nothing[:, 0], nothing, np.zeros(0, np.int64))

    def with_row(self, topic: str, weight: Floats, bias: float, features: Floats) -> AddedTopicHead:
        """The head with a further topic.

        Args:
            topic: its name.
            weight: float32 ``[F]``.
            bias: of the row.
            features: float32 ``[N, F]``, of its examples.
        """
        return AddedTopicHead(
            self.base,
            (*self.topics, topic),
            np.concatenate([self.weight, weight[None]]).astype(np.float32),
            np.append(self.bias, np.float32(bias)).astype(np.float32),
            np.concatenate([self.features, features]).astype(np.float32),
            np.append(self.rows, np.full(len(features), len(self.topics))).astype(np.int64),
        )

    def without(self, topic: str) -> AddedTopicHead:
        """The head without a topic's row and examples, if it has them."""
        kept = [i for i, name in enumerate(self.topics) if name != topic]
        examples = np.isin(self.rows, kept)
        return AddedTopicHead(
            self.base,
            tuple(self.topics[i] for i in kept),
            self.weight[kept],
            self.bias[kept],
            self.features[examples],
            np.searchsorted(kept, self.rows[examples]).astype(np.int64),
        )

    def export(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """JSON-able facts, and arrays by name."""
        arrays: dict[str, NDArray[Any]] = {
            "weight": self.weight,
            "bias": self.bias,
            "features": self.features,
            "rows": self.rows,
        }
        return {"base": self.base, "topics": list(self.topics)}, arrays

    @classmethod
    def restore(
        cls, facts: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]
    ) -> AddedTopicHead:
        """Restore what :meth:`export` returned.

        Raises:
            ValueError: a part is missing, or of another shape.
        """
        try:
            head = cls(
                str(facts["base"]),
                tuple(map(str, facts["topics"])),
                np.asarray(arrays["weight"], np.float32),
                np.asarray(arrays["bias"], np.float32),
                np.asarray(arrays["features"], np.float32),
                np.asarray(arrays["rows"], np.int64),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"router: no head ({error!r})") from error
        count, features = len(head.topics), len(head.rows)
        size = head.weight.shape[-1]
        shapes = head.weight.shape, head.bias.shape, head.features.shape
        if shapes != ((count, size), (count,), (features, size)):
            raise ValueError(f"router: a head of shapes {shapes} for {count} topics")
        if not (np.isfinite(head.weight).all() and np.isfinite(head.bias).all()):
            raise ValueError("router: a head that is not finite")
        return head
