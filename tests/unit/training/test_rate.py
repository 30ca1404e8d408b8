"""The learning rate over a candidate's steps, as the real optimizer has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_records import training_record

from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings

BATCH = make_batch([training_record(number) for number in range(2)], 64)
RATE = 1e-3


def distiller(draft: Path, hold: int) -> Distiller:
    settings = DistillerSettings(
        learning_rate=RATE, warmup_steps=2, rate_hold_steps=hold, dtype="float32"
    )
    return Distiller(str(draft), settings)


def rates(own: Distiller, steps: int) -> list[float]:
    """The rate of each of the next steps, as a share of the configured one."""
    found = []
    for _ in range(steps):
        found.append(own._engine.basic_optimizer.param_groups[0]["lr"] / RATE)
        own.micro_step(BATCH)
    return found


@pytest.mark.usefixtures("deepspeed")
def test_it_is_held_and_then_falls_as_one_over_the_steps(draft: Path) -> None:
    own = distiller(draft, hold=3)
    expected = [0.5, 1.0, 1.0, 1.0, 3 / 4, 3 / 5, 3 / 6]
    assert rates(own, 7) == pytest.approx(expected)
    own.scale_rate(0.5)
    rates(own, 1)
    assert rates(own, 1) == pytest.approx([0.5 * 3 / 8])
    rates(own, 30)
    assert rates(own, 1) == pytest.approx([0.5 * 0.1])  # a tenth at least
    assert rates(distiller(draft, hold=0), 40)[2:] == pytest.approx([1.0] * 38)


@pytest.mark.usefixtures("deepspeed")
def test_it_is_full_again_where_there_is_something_new_to_learn(draft: Path) -> None:
    own = distiller(draft, hold=3)
    rates(own, 12)
    own.refresh_rate()
    rates(own, 1)
    assert rates(own, 4) == pytest.approx([1.0, 1.0, 1.0, 3 / 4], rel=1e-6)
    own.reset(None)
    assert rates(own, 4) == pytest.approx([0.5, 1.0, 1.0, 1.0])


@pytest.mark.usefixtures("deepspeed")
def test_a_restarted_trainer_keeps_its_learning_rate(draft: Path) -> None:
    one, other = distiller(draft, hold=3), distiller(draft, hold=3)
    rates(one, 12)
    state = one.optimizer_state()
    other.reset(one.state_dict())
    other.resume(state)
    assert rates(other, 2) == pytest.approx(rates(one, 2))
