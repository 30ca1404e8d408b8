"""Tokens that stand for a draft's vocabulary: what was recorded, and a fair share of the rest."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.actors.training.batches import Batch
from paceline.actors.training.eagle import draw_tokens

_SIZE = 2000


def labels(seed: int) -> Batch:
    """Five positions with four recorded tokens each; the token outside is among them."""
    rng = np.random.default_rng(seed)
    top = torch.from_numpy(np.stack([rng.permutation(_SIZE + 1)[:4] for _ in range(5)]))
    top[0, 3] = _SIZE
    fields: dict[str, torch.Tensor] = {
        field.name: torch.zeros(5) for field in dataclasses.fields(Batch)
    }
    return Batch(**fields | {"top_ids": top, "output_ids": top[:, 0]})  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3000))
def test_every_recorded_token_is_there_as_itself(seed: int, least: int) -> None:
    batch = labels(seed)
    ids, added = draw_tokens(batch, _SIZE, least, np.random.default_rng(seed))
    assert len(ids.unique()) == len(ids) == len(added) >= min(least, _SIZE)
    weights = dict(zip(ids.tolist(), added.tolist(), strict=True))
    named = set(batch.top_ids.flatten().tolist()) - {_SIZE}
    assert all(weights[token] == 0.0 for token in named)
    # each of the others stands for as many: together for all
    torch.testing.assert_close(float(added.exp().sum()), float(_SIZE), rtol=1e-4, atol=0.0)


def test_the_sum_of_exponentials_is_that_of_the_vocabulary_on_average() -> None:
    batch, rng = labels(1), np.random.default_rng(2)
    logits = torch.randn(_SIZE, generator=torch.Generator().manual_seed(3))
    sums = []
    for _ in range(400):
        ids, added = draw_tokens(batch, _SIZE, 1, rng)
        sums.append(float((logits[ids] + added).exp().sum()))
    whole = float(logits.exp().sum())
    assert abs(np.mean(sums) - whole) < 4 * np.std(sums) / np.sqrt(len(sums))
    assert np.std(sums) > 0.0
