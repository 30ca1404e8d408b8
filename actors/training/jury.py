"""Runs experts over records as they would be served, one after the other in one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from paceline.actors.decoding.loading import load_causal_lm, resolve_device, resolve_dtype
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import usable, within
from paceline.actors.training.draft_state import load_state
from paceline.actors.training.evaluation import score_records
from paceline.actors.training.scorer_settings import ScorerSettings
from paceline.actors.weights.flat import FlatWeights, unflatten


@dataclass(frozen=True, slots=True)
class _Seat:
    """A model for all experts that start from one folder, and that folder's weights."""

    model: Any
    initial: dict[str, Tensor]


class Jury:
    """Scores experts; whatever their number, one model per folder of initial weights is held.

    Weights are copied into it when an expert's turn comes, milliseconds beside its forwards.
    """

    def __init__(self, settings: ScorerSettings) -> None:
        """Load the first drafts.

        Loading sets torch's default dtype for the whole process: do it before other threads
        compute.

        Raises:
            OSError: a folder holds no model.
        """
        self._settings = settings
        self._paths = dict(settings.draft_paths)
        self._device = resolve_device(settings.device)
        self._seats = {path: self._seat(path) for path in set(self._paths.values())}

    def enlist(self, expert: str, like: str) -> None:
        """Take a further expert with the initial weights of another one: no model more."""
        self._paths[expert] = self._paths[like]

    def score(
        self,
        expert: str,
        flat: FlatWeights | None,
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], None],
    ) -> list[float]:
        """Mean acceptance of every record, nan where the draft does not know its tokens.

        Args:
            expert: whose folder names the model.
            flat: its weights; None are the initial ones.
            records: any.
            before_batch: called before each piece of work; may wait for leave, or raise.

        Raises:
            ValueError: for weights of another draft.
        """
        before_batch()  # copying weights takes the processor too
        seat = self._seats[self._paths[expert]]
        load_state(seat.model, seat.initial if flat is None else unflatten(flat))
        vocab = int(seat.model.config.vocab_size)
        good = [i for i, record in enumerate(records) if usable(record, vocab)]
        limit = getattr(seat.model.config, "max_position_embeddings", self._settings.max_length)
        scores = score_records(
            seat.model,
            [within(records[i], vocab) for i in good],
            max_length=min(self._settings.max_length, int(limit)),
            draft_top_k=self._settings.draft_top_k,
            batch_size=self._settings.micro_batch,
            before_batch=before_batch,
        )
        gains = np.full(len(records), np.nan)
        gains[good] = scores
        return [float(gain) for gain in gains]

    def _seat(self, path: str) -> _Seat:
        dtype = resolve_dtype(self._settings.dtype, self._device)
        model = load_causal_lm(path, dtype, self._device, attention="eager")
        return _Seat(model, {name: value.clone() for name, value in model.state_dict().items()})
