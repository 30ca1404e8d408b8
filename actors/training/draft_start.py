"""Where a draft's training starts: the best linear guess of the target's next hidden state.

Hidden states of a target are nearly its answers (EAGLE, Li et al., arXiv 2401.15077), and the best
linear guess of the next one is solved for, not trained for: seconds in place of an hour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import make_batch
from paceline.actors.training.eagle import shifted
from paceline.actors.weights.eagle import EagleDraft

_RIDGE = 0.01  # relative to each input's own square: states are far larger than embeddings
_RECORDS = 8  # of a batch


@torch.no_grad()
def start_linear(draft: EagleDraft, records: Sequence[ReplayRecord], max_length: int) -> None:
    """Set a draft's weights to a ridge regression (Hoerl and Kennard, 1970).

    ``fuse`` then guesses the target's state of a position, up to its final norm, from the token
    there and the state before; the layers add nothing, until they learn to.

    Args:
        draft: float32, with its target's ends.
        records: with hidden states.
        max_length: tokens of a record at most.
    """
    norm = draft.trunk.norm.weight
    squares = norm.new_zeros(2 * len(norm), 2 * len(norm))
    products = norm.new_zeros(2 * len(norm), len(norm))
    for start in range(0, len(records), _RECORDS):
        inputs, states = _pairs(draft, records[start : start + _RECORDS], max_length)
        squares += inputs.T @ inputs
        products += inputs.T @ (states / norm)
    squares.diagonal().mul_(1.0 + _RIDGE).add_(torch.finfo(torch.float32).eps)  # and for dead ones
    draft.fuse.weight.copy_(torch.linalg.solve(squares.double(), products.double()).T)
    for layer in draft.trunk.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def _pairs(
    draft: EagleDraft, records: Sequence[ReplayRecord], max_length: int
) -> tuple[Tensor, Tensor]:
    """What the draft reads ``[N, 2 H]`` and the target's states there ``[N, H]``, float32."""
    batch = make_batch(records, max_length).to(draft.device)
    assert batch.hidden is not None
    hidden = batch.hidden.float()
    known = hidden.any(dim=-1)
    known &= torch.nn.functional.pad(known, (1, 0))[:, :-1]
    embedded = torch.nn.functional.embedding(batch.input_ids, draft.ends.embedding).float()
    return torch.cat([embedded, shifted(hidden)], dim=-1)[known], hidden[known]
