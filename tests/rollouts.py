"""What a rollout is held against, wherever it is replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.model_runner import ModelRunner

STEPS = 4


def start_of(turn: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Last two tokens and positions of three rows that have read prompts of twenty tokens."""
    tokens = torch.tensor([[5, 6], [7, 8], [9, 10]], device=device) + turn
    return tokens, torch.tensor([[19, 20], [18, 19], [19, 20]], device=device)


def compare_rollout(
    replayed: ModelRunner,
    launched: ModelRunner,
    rows: Sequence[int],
    turn: int,
    layout: ExpertLayout,
    tolerance: float,
) -> None:
    """A rollout gives the tokens and probabilities of its steps, launched one after the other."""
    tokens, positions = start_of(turn, layout.device)
    drafted = replayed.rollout(rows, tokens, positions, 21 + STEPS, STEPS, layout)
    assert drafted is not None
    for step in range(STEPS):
        logits = launched.forward(rows, tokens, positions, 21 + step, keep=1, layout=layout)[:, 0]
        assert torch.equal(drafted[0][:, step], logits.argmax(-1))
        probs = logits.softmax(-1).amax(-1)
        torch.testing.assert_close(drafted[1][:, step], probs, atol=tolerance, rtol=tolerance)
        tokens, positions = drafted[0][:, step : step + 1], positions[:, -1:] + 1
