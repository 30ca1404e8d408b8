"""Several prefills in one forward give the same as each alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from engines import DEVICE, served
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_llama

from paceline.actors.engine.expert_layout import ExpertLayout
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.costs import batch_prefills

VOCAB = 64


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 400))
def test_batches_bound_padding_and_tokens(lengths: list[int], most: int) -> None:
    parts = batch_prefills(lengths, most)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        own = [lengths[i] for i in part]
        assert len(part) == 1 or len(part) * max(own) <= most
        assert min(own) >= 0.5 * max(own)
    for before, after in pairwise(parts):  # none has room for what comes after it
        longest, further = lengths[before[0]], lengths[after[0]]
        assert (len(before) + 1) * longest > most or further < 0.5 * longest


def runner(models: int) -> ModelRunner:
    own = ModelRunner([served(tiny_llama(seed, vocab=VOCAB)) for seed in range(models)], 4, 64)
    for row in range(4):
        assert own.kv.allocate(row, 40)
    own.kv.sync()
    return own


@pytest.mark.parametrize("experts", [(0, 0, 0, 0), (1, 0, 2, 1)])
def test_batched_prefills_equal_single_ones(experts: tuple[int, ...]) -> None:
    numbers = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=numbers).tolist() for n in (9, 30, 17, 1)]
    starts = [4, 0, 7, 3]  # what comes before was read in an earlier round
    together, alone = runner(3), runner(3)
    for row, (tokens, start) in enumerate(zip(prompts, starts, strict=True)):
        for each in (together, alone):
            each.prefill(row, [5, 6, 7, 8, 9, 10, 11][:start], 0, experts[row])
        alone.prefill(row, tokens, start, experts[row])
    together.prefill_batch(
        [2, 0, 1, 3],
        [prompts[i] for i in (2, 0, 1, 3)],
        [7, 4, 0, 3],
        [experts[i] for i in (2, 0, 1, 3)],
    )
    ends = [start + len(tokens) for tokens, start in zip(prompts, starts, strict=True)]
    given_next = torch.tensor([[1], [2], [3], [4]], device=DEVICE)
    at = torch.tensor(ends, device=DEVICE)[:, None]
    layout = ExpertLayout(list(experts), DEVICE)
    own, other = (
        each.forward(range(4), given_next, at, max(ends) + 1, layout=layout)
        for each in (together, alone)
    )
    torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
