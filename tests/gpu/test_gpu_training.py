"""A draft under DeepSpeed on a GPU: it learns, keeps its optimizer, and starts over."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record

from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings

pytestmark = pytest.mark.usefixtures("deepspeed")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("draft")
    tiny_llama(0, vocab=TINY_VOCAB, layers=1, hidden=64).save_pretrained(path)
    return str(path)


def make(path: str, **own: Any) -> Distiller:
    settings: dict[str, Any] = {
        "device": "cuda",
        "learning_rate": 5e-3,
        "warmup_steps": 2,
        "accumulation": 1,
    }
    return Distiller(path, DistillerSettings(**settings | own))


def losses(distiller: Distiller, steps: int = 40) -> list[float]:
    batch = make_batch([training_record(i) for i in range(16)], distiller.max_length)
    return [distiller.micro_step(batch).loss for _ in range(steps)]


@pytest.mark.parametrize(
    "own",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float32", "adapter": "lora"},
        {"dtype": "bfloat16", "zero_stage": 1},
        {"dtype": "bfloat16", "zero_stage": 2},
        {"dtype": "float32", "average_decay": 0.9},
    ],
    ids=lambda own: "-".join(map(str, own.values())),
)
def test_a_draft_learns_and_starts_over(draft: str, own: dict[str, Any]) -> None:
    distiller = make(draft, **own)
    assert distiller.device.type == "cuda"
    first = losses(distiller)
    assert first[-1] < 0.7 * first[0]
    state = distiller.state_dict()
    assert all(not tensor.isnan().any() for tensor in state.values())
    distiller.reset(None)
    assert losses(distiller, 1)[0] == pytest.approx(first[0], rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_goes_on_where_it_was(draft: str, dtype: str) -> None:
    one, other = make(draft, dtype=dtype), make(draft, dtype=dtype)
    losses(one, 10)
    state = one.optimizer_state()
    assert {tensor.device.type for tensor in state.tensors.values()} == {"cpu"}
    other.reset(one.state_dict())
    other.resume(state)
    assert losses(other, 5) == pytest.approx(losses(one, 5), rel=0.02)
    assert torch.cuda.memory_allocated() < 2**30
