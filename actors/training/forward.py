"""A draft's forward over a batch, and a test for branches in one row."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training import eagle
from paceline.actors.training.batches import Batch
from paceline.actors.training.branches import Packed, layout
from paceline.actors.weights.checkpoint import ModelError, has_shared_head, read_causal_lm
from paceline.actors.weights.eagle import Draft, EagleDraft, is_eagle, load_draft
from paceline.actors.weights.target_ends import read_target_ends, share_ends

logger = logging.getLogger(__name__)

_POSITIONS = 64
_TOLERANCE = 0.05  # relative; bfloat16's own error is a fifth of it


def score_positions(draft: Draft, batch: Batch, score: Callable[[Tensor, Batch], Tensor]) -> Tensor:
    """Scores ``[S, N]`` of every drafted step at a batch's positions; S is 1 but for EAGLE.

    Args:
        draft: a causal LM or an EAGLE draft.
        batch: the N positions.
        score: logits ``[n, V]`` and the labels that they are to be compared with, in the draft's
            vocabulary, to scores ``[n]``.
    """
    if not isinstance(draft, EagleDraft):
        return score(logits_at(draft, batch), batch)[None]
    own, steps = eagle.draft_vocabulary(draft, batch), []
    for states in eagle.step_states(draft, batch):
        parts = [
            score(eagle.head_logits(draft, states[at]), own.positions(at))
            for at in eagle.parts_of(states)
        ]
        steps.append(torch.cat(parts))
    return torch.stack(steps)


def logits_at(draft: PreTrainedModel, batch: Batch) -> Tensor:
    """Logits ``[N, V]`` of the batch's positions, by the causal LM's own forward.

    The head computes no other positions; a scale or soft cap after it is the model's own code.

    Args:
        draft: a causal LM that calls its output embeddings as a module.
        batch: the N positions.
    """
    seen: dict[str, Tensor | None] = {}
    if batch.mask is not None:
        mask = _additive(batch.mask, draft.dtype)
        seen = {"attention_mask": mask, "position_ids": batch.position_ids}
    count = len(batch.rows)

    def pick(_head: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        picked = inputs[0][batch.rows, batch.columns]
        # Few shapes for oneDNN's cache, see batches.py.
        return nn.functional.pad(picked, (0, 0, 0, -count % _POSITIONS))[None]

    # Adapters' hooks on the head run after it, on the reduced input.
    hook = draft.get_output_embeddings().register_forward_pre_hook(pick)
    try:
        logits: Tensor = draft(input_ids=batch.input_ids, use_cache=False, **seen).logits
    finally:
        hook.remove()
    return logits[0, :count]


def load_trainable(
    path: str, target: str | None, dtype: torch.dtype, device: torch.device
) -> Draft:
    """A draft with an attention that is trained, from its folder.

    Args:
        path: folder of a causal LM or an EAGLE draft.
        target: folder of the target, for its embedding and head.
        dtype: of the weights.
        device: of the weights.

    Raises:
        OSError: there is no model.
        ModelError: a tensor is missing or of another shape, or the draft is another target's.
    """
    if is_eagle(path):
        own = _needed(target, path)
        ends = read_target_ends(own, device)  # in float32 those of a large target take gigabytes
        return load_draft(path, own, dtype, device, ends)
    draft: PreTrainedModel = read_causal_lm(path, dtype=dtype, attn_implementation="eager")
    if has_shared_head(draft.config):
        share_ends(draft, read_target_ends(_needed(target, path), device, dtype))
    return draft.to(device)


def _needed(target: str | None, path: str) -> str:
    if target is None:
        raise ModelError(f"draft: {path} cannot be loaded without its target")
    return target


def trains_on(draft: Draft, record: ReplayRecord) -> bool:
    """Whether a record has what a draft reads."""
    return not isinstance(draft, EagleDraft) or (
        record.hidden is not None and record.hidden.shape[1] == draft.config.hidden_size
    )


@torch.no_grad()
def takes_branches(draft: Draft) -> bool:
    """Whether a branch in a row gives the logits that it gives alone, by one small forward.

    Not of EAGLE drafts: no hidden states behind rejected tokens are recorded.

    It does if only attention mixes tokens, under the given mask. A recurrent layer mixes them in
    the row's order, and a sliding window is lost with its own mask.
    """
    if isinstance(draft, EagleDraft):
        return False
    config = draft.config
    windowed = getattr(config, "sliding_window", None) is not None
    if windowed and getattr(config, "use_sliding_window", True):
        return False
    ids = torch.arange(1, 9, device=draft.device) % config.vocab_size
    text, own = ids[:6], ids[6:]
    at = np.array([3, 4])
    packed = Packed(own.cpu().numpy(), at, np.array([3, 3]), np.array([0, 0]), np.array([0, 1]))
    positions, mask = layout([len(text)], [packed], len(ids))
    training = draft.training
    draft.eval()
    try:
        alone = draft(input_ids=torch.cat([text[:3], own])[None], use_cache=False).logits[0, -2:]
        together = draft(
            input_ids=ids[None],
            attention_mask=_additive(torch.from_numpy(mask).to(draft.device), draft.dtype),
            position_ids=torch.from_numpy(positions).to(draft.device),
            use_cache=False,
        ).logits[0, -2:]
    except Exception:
        logger.warning("the draft takes no custom mask", exc_info=True)
        return False
    finally:
        draft.train(training)
    difference = (together.float() - alone.float()).norm()
    return bool(difference <= _TOLERANCE * alone.float().norm())


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask ``[B, T, T]`` as the additive one of transformers, for all heads."""
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min).unsqueeze(1)
