"""The environment that DeepSpeed reads when it is imported."""

from __future__ import annotations

import os

import pytest

from paceline.actors.training.deepspeed_setup import prepare_environment


@pytest.mark.parametrize(
    ("device", "there", "expected"),
    [
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cpu", True, "cpu"),
        ("cuda", True, "cuda"),
    ],
)
def test_deepspeed_computes_where_the_training_does(
    device: str, there: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left to itself it takes the GPU of a machine whose target and drafts are on the CPU."""
    for name in ("DS_ACCELERATOR", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    prepare_environment(device)
    assert os.environ["DS_ACCELERATOR"] == expected
