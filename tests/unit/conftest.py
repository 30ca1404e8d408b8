"""What several unit tests stand on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deepspeed_process import use_deepspeed
from local_ingress import CONTEXT_LENGTH
from tiny_models import save_tiny, tiny_llama, tiny_tokenizer
from training_records import TINY_VOCAB

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """A test may set torch's threads as it likes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


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


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random target with room for long answers."""
    return save_tiny(
        tmp_path_factory.mktemp("target"),
        1,
        vocab=len(tiny_tokenizer()),
        max_position_embeddings=CONTEXT_LENGTH,
    )


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Iterator[TargetReplica]:
    """That target at work in this process."""
    settings = TargetSettings(str(target_folder), dtype="float32", num_threads=1, max_num_seqs=4)
    replica = TargetReplica(settings)
    yield replica
    replica._loop.close()
