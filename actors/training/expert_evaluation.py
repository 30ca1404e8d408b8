"""Runs experts over records as they would be served, one after the other in one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.model_loader import load_causal_lm, resolve_device, resolve_dtype
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.adapters import load_state
from paceline.actors.training.batches import Batch, make_batch, usable, within
from paceline.actors.training.forward import logits_at
from paceline.actors.training.settings import ScorerSettings
from paceline.actors.weights.flat_weights import FlatWeights, unflatten

_FORWARDS = 3  # of the same records take about as long as a micro-step with its backward


def records_per_forward(micro_batch: int, device: str) -> int:
    """How many records to judge at once, for whoever waits for one forward or one micro-step.

    Args:
        micro_batch: records of a micro-step.
        device: its type; a GPU has its memory to think of.
    """
    return micro_batch * _FORWARDS if device == "cpu" else micro_batch


def acceptance(logits: Tensor, batch: Batch, draft_top_k: int) -> Tensor:
    """Chance that a served draft's token is accepted, per emitted position.

    The draft is truncated to its ``draft_top_k`` most probable tokens and renormalised, as in
    serving. A greedy position counts 1 where the draft's best token is the target's. A sampled
    one counts the sum over the recorded tokens of min(p, q) at the request's temperature,
    which is a lower bound: the tail is left out, and q is not cut by top_p and top_k.

    Args:
        logits: float ``[N, V]``.
        batch: the N positions.
        draft_top_k: tokens that the served draft proposes from.

    Returns:
        float32 ``[N]``.
    """
    scores = logits.float()
    greedy = batch.temperature == 0.0
    agrees = (scores.argmax(dim=-1) == batch.output_ids).float()
    if bool(greedy.all()):
        return agrees
    temperature = torch.where(greedy, 1.0, batch.temperature)
    top, _ = scores.topk(min(draft_top_k, scores.shape[-1]), dim=-1)
    log_q = (scores.gather(-1, batch.top_ids) - top[:, :1]) / temperature[:, None]
    norm = ((top - top[:, :1]) / temperature[:, None]).exp().sum(-1, keepdim=True)
    served = scores.gather(-1, batch.top_ids) >= top[:, -1:]
    q = log_q.exp() / norm * served
    overlap = torch.minimum(batch.processed_probs, q).sum(-1)
    return torch.where(greedy, agrees, overlap)


@torch.inference_mode()
def score_records(
    draft: Any,
    records: Sequence[ReplayRecord],
    *,
    max_length: int,
    draft_top_k: int = 64,
    batch_size: int = 8,
    before_batch: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Mean acceptance of every record, float64 ``[R]``.

    Args:
        draft: a causal LM in eval mode, with the weights and in the dtype that are served.
        records: all usable.
        max_length: tokens per record at most.
        draft_top_k: tokens that the served draft proposes from.
        batch_size: records per forward.
        before_batch: called before each forward; may wait for leave, or raise.
    """
    scores = np.zeros(len(records))
    lengths = [len(r.prompt_token_ids) + len(r.output_token_ids) for r in records]
    order = np.argsort(lengths, kind="stable")  # neighbours of one length need no padding
    for start in range(0, len(records), batch_size):
        before_batch()
        own = order[start : start + batch_size]
        batch = make_batch([records[i] for i in own], max_length).to(draft.device)
        values = acceptance(logits_at(draft, batch), batch, draft_top_k)
        # new_zeros: the default dtype is another one while a thread beside loads a model
        sums = values.new_zeros(batch.num_records).index_add_(0, batch.rows, values)
        counts = torch.bincount(batch.rows, minlength=batch.num_records)
        scores[own] = (sums / counts).cpu().numpy()
    return scores


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
