"""What several unit tests stand on."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed_process import use_deepspeed
from lessons import TINY_VOCAB
from tiny_models import tiny_llama


@pytest.fixture(scope="session")
def deepspeed() -> None:
    """DeepSpeed is ready in this process."""
    use_deepspeed()


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random draft over the lessons' vocabulary."""
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(path)
    return path
