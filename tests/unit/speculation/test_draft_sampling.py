"""What drafts sample from."""

from __future__ import annotations

import pytest
import torch

from paceline.actors.engine.request import SamplingParams
from paceline.actors.engine.sampling import make_sampling_batch
from paceline.actors.speculation.draft_sampling import draft_support


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_beside_an_infinite_logit_no_token_has_a_probability(dtype: torch.dtype) -> None:
    """Else a token with probability 0 would be drafted, and the output distribution biased."""
    batch = make_sampling_batch([SamplingParams(8, temperature=1.0)] * 2, "cpu")
    logits = torch.linspace(-2.0, 2.0, 40).to(dtype).repeat(2, 1)
    logits[0, 7] = torch.inf
    _, probs, sure = draft_support(logits, batch, 4)
    assert sure[0].isnan().all()
    assert sure[1].isfinite().all()
    assert probs[1].sum().item() == pytest.approx(1.0)
