"""Which positions count, with which weight, and what a batch's loss is then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from replay_samples import make_record, with_branches

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import Batch, make_batch
from paceline.actors.training.losses import (
    expected_acceptance,
    forward_kl,
    hard_label,
    objective,
    position_losses,
    position_weights,
)
from paceline.actors.training.settings import ObjectiveSettings
from paceline.actors.training.shares import make_shares


def plain() -> ReplayRecord:
    """Decoded without a draft."""
    record = make_record(length=3, seed=7)
    nothing = {"draft_token_ids": -1, "accepted": -1}
    return dataclasses.replace(
        record, **{n: getattr(record, n) * 0 + value for n, value in nothing.items()}
    )


def drafted() -> ReplayRecord:
    """Positions accepted, rejected, not drafted, rejected; 3 positions in branches."""
    record = dataclasses.replace(
        make_record(length=4, seed=8),
        accepted=plain().accepted[[0, 0, 0, 0]] * 0 + [1, 0, -1, 0],
    )
    return with_branches(record, [(1, (21, 22)), (3, (23,))])


def batch_of(*records: ReplayRecord) -> Batch:
    return make_batch(records, max_length=32, branches=True)


def weights(batch: Batch, **settings: Any) -> list[float]:
    found = position_weights([batch], ObjectiveSettings(**settings))
    assert float(found.sum()) == pytest.approx(1.0)
    return [round(value, 5) for value in found.tolist()]


def shares(*parts: float) -> list[float]:
    return [round(part / sum(parts), 5) for part in parts]


def test_uniform_target_counts_every_emitted_position_alike() -> None:
    batch = batch_of(drafted(), plain())
    assert weights(batch) == shares(1, 1, 1, 1, 0, 0, 0, 1, 1, 1)


def test_first_rejections_count_more_or_alone() -> None:
    batch = batch_of(drafted(), plain())
    heavy = weights(batch, weighting="first_rejection", rejection_weight=3.0)
    assert heavy == shares(1, 3, 1, 3, 0, 0, 0, 1, 1, 1)
    assert weights(batch, weighting="rejected_only") == shares(0, 1, 0, 1, 0, 0, 0, 0, 0, 0)


def test_the_student_counts_where_it_proposed_and_behind_its_rejected_tokens() -> None:
    batch = batch_of(drafted(), plain())
    assert weights(batch, sampling="student") == shares(1, 1, 0, 1, 1, 1, 1, 0, 0, 0)
    heavy = weights(batch, sampling="student", weighting="first_rejection", rejection_weight=2.0)
    assert heavy == shares(1, 2, 0, 2, 1, 1, 1, 0, 0, 0)


def test_mixed_is_the_mean_of_both() -> None:
    batch = batch_of(drafted(), plain())
    emitted, proposed = weights(batch), weights(batch, sampling="student")
    mixed = weights(batch, sampling="mixed", student_share=0.25)
    expected = [0.75 * e + 0.25 * p for e, p in zip(emitted, proposed, strict=True)]
    assert mixed == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("sampling", ["target", "student", "mixed"])
@pytest.mark.parametrize("weighting", ["uniform", "first_rejection", "rejected_only"])
def test_a_draft_that_is_off_still_learns(sampling: str, weighting: str) -> None:
    found = weights(batch_of(plain()), sampling=sampling, weighting=weighting)
    assert found == shares(1, 1, 1)


def test_the_default_is_the_mean_forward_kl_of_the_emitted_positions() -> None:
    batch = batch_of(drafted(), plain())
    logits = torch.randn(10, 300, generator=torch.Generator().manual_seed(0), requires_grad=True)
    target = (batch.top_ids, batch.top_logprobs, batch.tail_mass)
    found = objective(logits, batch, ObjectiveSettings())
    each = forward_kl(logits, *target)
    emitted = ~batch.branch
    torch.testing.assert_close(found.loss, each[emitted].mean())
    torch.testing.assert_close(found.per_record, torch.stack([each[:4].mean(), each[7:].mean()]))
    lower, _ = expected_acceptance(logits, *target)
    torch.testing.assert_close(found.expected_acceptance, lower[emitted].mean())
    assert found.loss.requires_grad
    assert not found.per_record.requires_grad
    (pull,) = torch.autograd.grad(found.loss, logits)
    assert not pull[batch.branch].any()
    assert pull[emitted].any(dim=-1).all()


@pytest.mark.parametrize("sampling", ["target", "student", "mixed"])
@pytest.mark.parametrize("weighting", ["uniform", "first_rejection", "rejected_only"])
def test_a_step_minimises_the_same_in_one_micro_batch_and_in_several(
    sampling: Any, weighting: Any
) -> None:
    settings = ObjectiveSettings(sampling=sampling, weighting=weighting)
    parts = [batch_of(drafted()), batch_of(plain()), batch_of(plain())]
    logits = torch.randn(13, 300, generator=torch.Generator().manual_seed(2))
    whole = objective(logits, batch_of(drafted(), plain(), plain()), settings).loss
    pieces = logits.split([batch.num_positions for batch in parts])
    losses = [
        objective(piece, share.batch, settings, share.weights).loss
        for piece, share in zip(pieces, make_shares(parts, settings), strict=True)
    ]
    torch.testing.assert_close(torch.stack(losses).mean(), whole)  # as the optimizer takes it


def test_hard_labels_are_the_emitted_tokens_whatever_the_target_thinks() -> None:
    batch = batch_of(drafted())
    logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(1))
    found = position_losses(logits, batch, ObjectiveSettings(loss="hard_label"))
    torch.testing.assert_close(found, hard_label(logits, batch.output_ids))


@pytest.mark.parametrize(
    "wrong",
    [
        {"loss": "mse"},
        {"weighting": "random"},
        {"sampling": "both"},
        {"jsd_beta": 1.0},
        {"student_share": 1.5},
        {"rejection_weight": 0.0},
    ],
)
def test_senseless_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ObjectiveSettings(**wrong)


def test_only_objectives_that_learn_from_branches_need_them() -> None:
    assert not ObjectiveSettings().needs_branches
    assert ObjectiveSettings(sampling="mixed").needs_branches
    assert not ObjectiveSettings(sampling="student", weighting="rejected_only").needs_branches
