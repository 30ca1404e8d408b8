"""How well a draft, as it would be served, meets the target on held-out records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import Batch, make_batch
from paceline.actors.training.forward import logits_at

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
