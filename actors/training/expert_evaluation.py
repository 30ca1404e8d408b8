"""Evaluation of drafts on replay records, with the truncation of serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.model_loader import resolve_device
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.adapters import load_state
from paceline.actors.training.batches import Batch, make_batch, usable, within
from paceline.actors.training.deepspeed_config import training_dtype
from paceline.actors.training.eagle import STEPS
from paceline.actors.training.forward import load_trainable, score_positions, trains_on
from paceline.actors.training.settings import ScorerSettings
from paceline.actors.weights.eagle import SUPPORT, Draft, EagleDraft
from paceline.actors.weights.flat_weights import FlatWeights, unflatten

_FORWARDS = 3  # of the same records take about as long as a micro-step with its backward


def records_per_forward(micro_batch: int, device: str) -> int:
    """Records of a forward that takes as long as a micro-step.

    Args:
        micro_batch: records of a micro-step.
        device: its type; on a GPU memory is the limit.
    """
    return micro_batch * _FORWARDS if device == "cpu" else micro_batch


def acceptance(logits: Tensor, batch: Batch, draft_top_k: int) -> Tensor:
    """Probability that a served draft's token is accepted, per emitted position.

    The draft is truncated to its ``draft_top_k`` most probable tokens and renormalised, as in
    serving. A greedy position is 1 if the draft's best token is the target's, which was not emitted
    where a grammar forbids it. A sampled one is the sum over the recorded tokens of min(p, q) at
    the request's temperature, a lower bound: the tail is left out, and q is not truncated by top_p
    and top_k.

    Args:
        logits: float ``[N, V]``.
        batch: the N positions.
        draft_top_k: tokens that the served draft proposes from.

    Returns:
        float32 ``[N]``.
    """
    greedy = batch.temperature == 0.0
    agrees = (logits.argmax(dim=-1) == batch.top_ids[:, 0]).float()
    if bool(greedy.all()):
        return agrees
    scores = logits.float()
    temperature = torch.where(greedy, 1.0, batch.temperature)
    top, _ = scores.topk(min(draft_top_k, scores.shape[-1]), dim=-1)
    log_q = (scores.gather(-1, batch.top_ids) - top[:, :1]) / temperature[:, None]
    norm = ((top - top[:, :1]) / temperature[:, None]).exp().sum(-1, keepdim=True)
    served = scores.gather(-1, batch.top_ids) >= top[:, -1:]
    q = log_q.exp() / norm * served
    overlap = torch.minimum(batch.processed_probs, q).sum(-1)
    return torch.where(greedy, agrees, overlap)


@torch.inference_mode()
def score_steps(
    draft: Draft,
    records: Sequence[ReplayRecord],
    score: Callable[[Tensor, Batch], Tensor],
    *,
    max_length: int,
    batch_size: int = 8,
    before_batch: Callable[[], float | None] = lambda: None,
) -> NDArray[np.float64]:
    """Mean score of every drafted step on every record, float64 ``[S, R]``; S is 1 but for EAGLE.

    Args:
        draft: in eval mode, with the weights and in the dtype that are served.
        records: all usable.
        score: see :func:`paceline.actors.training.forward.score_positions`.
        max_length: tokens per record at most.
        batch_size: records per forward.
        before_batch: called before each forward; may wait for a permit, or raise. Records of the
            forward that were created before what it returns, unix seconds, get no score: nan.
    """
    scores = np.full((STEPS if isinstance(draft, EagleDraft) else 1, len(records)), np.nan)
    lengths = [len(r.prompt_token_ids) + len(r.output_token_ids) for r in records]
    order = np.argsort(lengths, kind="stable")  # neighbours of one length need no padding
    for start in range(0, len(records), batch_size):
        oldest = before_batch()
        own = order[start : start + batch_size]
        if oldest is not None:
            own = own[[records[i].created >= oldest for i in own]]
        if not len(own):
            continue
        batch = make_batch([records[i] for i in own], max_length).to(draft.device)
        values = score_positions(draft, batch, score)
        # new_zeros: the default dtype differs while another thread loads a model
        sums = values.new_zeros(len(values), batch.num_records).index_add_(1, batch.rows, values)
        counts = torch.bincount(batch.rows, minlength=batch.num_records)
        scores[:, own] = (sums / counts).cpu().numpy()
    return scores


def score_records(
    draft: Draft,
    records: Sequence[ReplayRecord],
    *,
    max_length: int,
    draft_top_k: int = 64,
    batch_size: int = 8,
    before_batch: Callable[[], float | None] = lambda: None,
) -> NDArray[np.float64]:
    """Mean acceptance of every record, float64 ``[R]``; of an EAGLE draft over its steps.

    Args:
        draft: see :func:`score_steps`, as the others.
        records: all usable.
        max_length: tokens per record at most.
        draft_top_k: tokens that the served draft proposes from; of an EAGLE draft it is one.
        batch_size: records per forward.
        before_batch: called before each forward, see :func:`score_steps`.
    """
    support = SUPPORT if isinstance(draft, EagleDraft) else draft_top_k

    def score(logits: Tensor, batch: Batch) -> Tensor:
        return acceptance(logits, batch, support)

    steps = score_steps(
        draft,
        records,
        score,
        max_length=max_length,
        batch_size=batch_size,
        before_batch=before_batch,
    )
    return np.asarray(steps.mean(axis=0))


def step_agreement(
    draft: Draft, records: Sequence[ReplayRecord], *, max_length: int
) -> list[float]:
    """Share of positions where draft and target find the same token most probable, by step.

    Args:
        draft: see :func:`score_steps`, as the others.
        records: all usable; each counts the same.
        max_length: tokens per record at most.
    """
    if not records:
        return []

    def score(logits: Tensor, batch: Batch) -> Tensor:
        return (logits.argmax(dim=-1) == batch.top_ids[:, 0]).float()

    steps = score_steps(draft, records, score, max_length=max_length)
    return [float(share) for share in steps.mean(axis=1)]


@dataclass(frozen=True, slots=True)
class _InitialModel:
    """A model for all experts with the same initial weights, and these weights."""

    draft: Draft
    initial: dict[str, Tensor]


class ExpertEvaluator:
    """Scores experts on records, with one model in memory per folder of initial weights.

    An expert's weights are copied into it before its forwards: milliseconds.
    """

    def __init__(self, settings: ScorerSettings) -> None:
        """Load the models.

        Loading sets torch's default dtype for the whole process: do it before other threads
        compute.

        Raises:
            OSError: a folder holds no model.
        """
        self._settings = settings
        self._paths = dict(settings.draft_paths)
        self._device = resolve_device(settings.device)
        self._models = {path: self._load(path) for path in set(self._paths.values())}

    def add_expert(self, expert: str, like: str) -> None:
        """Add an expert with the initial weights of another one."""
        self._paths[expert] = self._paths[like]

    def score(
        self,
        expert: str,
        flat: FlatWeights | None,
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], None],
    ) -> list[float]:
        """Mean acceptance of every record, nan if the draft lacks its tokens.

        Args:
            expert: of the model.
            flat: its weights; None are the initial ones.
            records: any.
            before_batch: called before each piece of work; may wait for a permit, or raise.

        Raises:
            ValueError: for weights of another draft.
        """
        before_batch()  # copying weights takes the processor too
        model = self._models[self._paths[expert]]
        load_state(model.draft, model.initial if flat is None else unflatten(flat))
        vocab = int(model.draft.config.vocab_size)
        good = [
            i
            for i, record in enumerate(records)
            if usable(record, vocab) and trains_on(model.draft, record)
        ]
        limit = getattr(model.draft.config, "max_position_embeddings", self._settings.max_length)
        scores = score_records(
            model.draft,
            [within(records[i], vocab) for i in good],
            max_length=min(self._settings.max_length, int(limit)),
            draft_top_k=self._settings.draft_top_k,
            batch_size=self._settings.micro_batch,
            before_batch=before_batch,
        )
        gains = np.full(len(records), np.nan)
        gains[good] = scores
        return [float(gain) for gain in gains]

    def _load(self, path: str) -> _InitialModel:
        dtype = training_dtype(self._settings.dtype, self._device)
        draft = load_trainable(path, self._settings.target_path, dtype, self._device)
        draft.eval().requires_grad_(False)
        return _InitialModel(
            draft, {name: value.clone() for name, value in draft.state_dict().items()}
        )
