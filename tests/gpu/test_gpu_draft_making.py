"""``paceline draft make`` on a GPU: answers, training with all tokens, basis, speed and card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fixture_models import TARGET

from paceline.actors.training import draft_maker
from paceline.actors.training.draft_maker import MakerSettings
from paceline.actors.weights.eagle import read_draft
from paceline.deploy.draft_making import make


@pytest.mark.usefixtures("deepspeed")
def test_a_draft_and_its_card_are_made_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_maker, "_GPU_PROMPTS", 256)
    card = make("small", MakerSettings(str(TARGET), tmp_path / "draft", 40.0))
    assert (tmp_path / "draft" / "README.md").read_text() == card
    made = re.search(r"in (\d+) optimizer\s+steps of 32 answers", card)
    assert made is not None
    assert int(made[1]) > 0
    assert torch.cuda.get_device_name() in card
    assert read_draft(tmp_path / "draft").has_basis
