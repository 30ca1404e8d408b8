"""Records of a target whose vocabulary is padded to more than the draft's."""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from replay_samples import make_record, with_branches
from tiny_models import save_tiny

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import make_batch, usable, within
from paceline.actors.training.expert_evaluation import ExpertEvaluator, acceptance
from paceline.actors.training.losses import objective
from paceline.actors.training.settings import Loss, ObjectiveSettings, ScorerSettings


def padded(seed: int, temperature: float, vocab: int) -> ReplayRecord:
    """Emitted tokens are below ``vocab``, others that the target thought of up to half beyond."""
    rng = np.random.default_rng(seed)

    def top_ids(count: int) -> NDArray[np.int32]:
        rows = []
        for _ in range(count):
            first = rng.integers(vocab)
            others = np.setdiff1d(np.arange(vocab * 3 // 2), [first])
            rows.append([first, *rng.choice(others, 7, replace=False)])
        return np.array(rows, dtype=np.int32)

    record = make_record(seed=seed, vocab=vocab, top=8, temperature=temperature)
    ids = top_ids(5)
    return dataclasses.replace(
        with_branches(record, [(1, (5, 6)), (3, (7,))]),
        target_top_ids=ids,
        output_token_ids=ids[:, 0].copy(),
        branch_top_ids=top_ids(3),
    )


@pytest.mark.parametrize("loss", get_args(Loss))
def test_what_a_smaller_draft_lacks_is_tail_to_it(loss: Loss) -> None:
    """A target padded to more recorded tokens beyond the draft's vocabulary."""
    vocab = 40
    records = [padded(seed, t, vocab) for seed, t in product(range(8), (0.0, 1.0))]
    assert all(usable(record, vocab) for record in records)
    assert all(int(record.target_top_ids.max()) >= vocab for record in records)
    own = [within(record, vocab) for record in records]
    for before, after in zip(records, own, strict=True):
        assert usable(after, vocab)
        for name in ("target", "branch"):
            ids, mass, tail = (
                [getattr(r, f"{name}_{part}") for r in (before, after)]
                for part in ("top_ids", "top_logprobs", "tail_mass")
            )
            inside = ids[0] < vocab
            assert (ids[1] < vocab).all()
            assert all(len(set(row)) == len(row) for row in ids[1].tolist())
            assert (ids[1][inside] == ids[0][inside]).all()
            assert (mass[1][inside] == mass[0][inside]).all()
            assert (mass[1][~inside] == -np.inf).all()
            whole = [
                np.exp(m.astype(np.float32)).sum(1) + t for m, t in zip(mass, tail, strict=True)
            ]
            np.testing.assert_allclose(*whole, rtol=1e-5)
        assert within(after, vocab) is after
    batch = make_batch(own, max_length=32, branches=True)
    logits = torch.randn(batch.num_positions, vocab, requires_grad=True)
    found = objective(logits, batch, ObjectiveSettings(loss=loss))
    found.loss.backward()  # type: ignore[no-untyped-call]
    assert bool(found.loss.isfinite())
    assert bool(found.per_record.isfinite().all())
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    chances = acceptance(logits.detach(), batch, 16)
    assert bool(((chances >= 0.0) & (chances <= 1.0 + 1e-5)).all())


def test_a_record_within_the_vocabulary_is_left_alone() -> None:
    record = with_branches(make_record(), [(1, (5, 6))])
    assert within(record, 300) is record
    assert not usable(make_record(top=4), 3)


def test_an_expert_is_scored_on_what_a_padded_target_recorded(tmp_path: Path) -> None:
    """A draft is not evaluated on an answer with a token that it lacks."""
    draft = str(save_tiny(tmp_path / "d", 1, vocab=300))
    evaluator = ExpertEvaluator(
        ScorerSettings({"general": draft}, {}, device="cpu", dtype="float32")
    )
    sound, odd = padded(1, 0.8, 300), padded(2, 0.8, 300)
    sound.target_top_ids[:, 1:] = np.arange(300, 307)
    odd = dataclasses.replace(odd, output_token_ids=odd.output_token_ids * 0 + 310)
    first, second = evaluator.score("general", None, [sound, odd], lambda: None)
    assert 0.0 <= first <= 1.0
    assert np.isnan(second)
