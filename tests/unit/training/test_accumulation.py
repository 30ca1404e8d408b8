"""Steps of several micro-steps: the same step as of one, and none that survives a reset."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from training_records import training_record

from paceline.actors.training.batches import Batch, make_batch
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import (
    DistillerSettings,
    ObjectiveSettings,
    TrainerSettings,
    ZeroStage,
)
from paceline.actors.training.shares import make_shares

pytestmark = pytest.mark.usefixtures("deepspeed")


def distiller(
    draft: Path, accumulation: int, stage: ZeroStage = "auto", decay: float = 0.0
) -> Distiller:
    settings = DistillerSettings(
        learning_rate=1e-2,
        dtype="float32",
        device="cpu",
        accumulation=accumulation,
        zero_stage=stage,
        average_decay=decay,
    )
    return Distiller(str(draft), settings)


def batch(first: int) -> Batch:
    return make_batch([training_record(first)], 64)


def test_a_step_is_made_of_all_its_micro_steps(draft: Path) -> None:
    own = distiller(draft, 2)
    before = {name: weight.clone() for name, weight in own.state_dict().items()}
    own.micro_step(batch(1))
    assert own.steps == 0
    for name, weight in own.state_dict().items():
        assert torch.equal(weight, before[name])
    own.micro_step(batch(2))
    assert own.steps == 1
    assert any(not torch.equal(w, before[name]) for name, w in own.state_dict().items())


@pytest.mark.parametrize("weighting", ["uniform", "rejected_only"])
def test_records_one_at_a_time_make_the_step_of_all_at_once(draft: Path, weighting: Any) -> None:
    """Answers of 3, 6, 9 and 12 tokens, of which one was drafted and rejected at."""
    records = [training_record(number, length=3 * number) for number in (1, 2, 3, 4)]
    records[2].accepted[4] = 0
    objective = ObjectiveSettings(weighting=weighting)

    def learnt(micro_batch: int) -> dict[str, Tensor]:
        own = DistillerSettings(
            learning_rate=1e-2,
            dtype="float32",
            device="cpu",
            accumulation=4 // micro_batch,
            objective=objective,
            average_decay=0.0,
        )
        candidate = Candidate("sql", TrainerSettings({"sql": str(draft)}, own))
        step = [records[at : at + micro_batch] for at in range(0, 4, micro_batch)]
        assert candidate.micro_steps_left == len(step)
        for share in candidate.make_shares(step):
            candidate.learn(share)
        assert candidate.steps == 1
        return {name: w.clone() for name, w in candidate._distiller.state_dict().items()}

    together, apart = learnt(4), learnt(1)
    for name, weight in together.items():
        torch.testing.assert_close(apart[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_left_of_a_step_does_not_survive_a_reset(draft: Path, stage: ZeroStage) -> None:
    own, fresh = distiller(draft, 2, stage), distiller(draft, 2, stage)
    broken = {name: weight * math.nan for name, weight in own.state_dict().items()}
    own.reset(broken)
    assert not math.isfinite(own.micro_step(batch(1)).loss)
    own.reset(None)
    for number in (3, 4):
        own.micro_step(batch(number))
        fresh.micro_step(batch(number))
    for name, weight in fresh.state_dict().items():
        torch.testing.assert_close(own.state_dict()[name], weight)


def test_whoever_waits_before_a_step_is_asked_once_a_step_and_may_raise(draft: Path) -> None:
    class Ended(Exception):  # noqa: N818
        pass

    own, twin = distiller(draft, 2, decay=0.5), distiller(draft, 2, decay=0.5)
    asked, settings = list[int](), own.settings.objective

    def learn(number: int, before_step: Any) -> None:
        own.learn(make_shares([batch(number)], settings)[0], before_step)

    for number in range(4):
        learn(number, lambda n=number: asked.append(n))
    assert asked == [1, 3]
    assert own.steps == 2

    def raises() -> None:
        raise Ended

    learn(5, raises)
    with pytest.raises(Ended):
        learn(6, raises)
    assert own.steps == 3
    assert own.micro_steps_left == 2
    for number in (0, 1, 2, 3, 5, 6):
        twin.micro_step(batch(number))
    for name, weight in twin.state_dict().items():  # the step that raised is in the mean too
        torch.testing.assert_close(own.state_dict()[name], weight)
