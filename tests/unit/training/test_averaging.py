"""The running mean of the weights: its arithmetic, and that it is what a candidate consists of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training_records import training_record

from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller, RunningMean
from paceline.actors.training.settings import DistillerSettings

BATCH = make_batch([training_record(number) for number in range(8)], 64)


def test_a_mean_moves_by_the_share_that_its_age_and_decay_leave() -> None:
    weights = [torch.zeros(2), torch.ones(1)]
    mean = RunningMean(weights, decay=0.25)
    expected = [w.clone() for w in weights]
    for step in range(1, 6):
        weights = [w + 1.0 for w in weights]
        mean.update(weights)
        keep = min(0.25, (1 + step) / (10 + step))
        expected = [keep * m + (1 - keep) * w for m, w in zip(expected, weights, strict=True)]
    with mean.in_place(weights):
        for weight, wanted in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, wanted)
    torch.testing.assert_close(weights[0], torch.full((2,), 5.0))


def test_small_steps_are_not_lost_in_bfloat16() -> None:
    weight = torch.ones(4, dtype=torch.bfloat16)
    mean = RunningMean([weight], decay=0.99)
    moved = weight + 2**-6  # a hundredth of it is below bfloat16's resolution at 1
    for _ in range(2_000):
        mean.update([moved])
    with mean.in_place([moved]):
        assert moved[0].item() == 1.0 + 2**-6
    assert mean.nbytes() == 4 * 4


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_candidate_is_the_mean_and_training_goes_on_from_the_weights(
    draft: Path, adapter: str, dtype: str
) -> None:
    def distiller(decay: float) -> Distiller:
        settings = DistillerSettings(
            learning_rate=1e-2,
            dtype=dtype,
            device="cpu",
            adapter=adapter,  # type: ignore[arg-type]
            average_decay=decay,
        )
        return Distiller(str(draft), settings)

    averaged, plain = distiller(0.9), distiller(0.0)
    seen: list[dict[str, torch.Tensor]] = []
    for _ in range(12):
        assert averaged.micro_step(BATCH).loss == plain.micro_step(BATCH).loss
        averaged.state_dict()  # a look must not disturb training
        seen.append(plain.state_dict())
    mean, last = averaged.state_dict(), seen[-1]
    changed = [n for n in last if not torch.equal(last[n], seen[0][n])]
    assert changed
    assert any(not torch.equal(mean[name], last[name]) for name in changed)
    if adapter == "full":
        for name in changed:  # between the first and the last of what was averaged
            every = torch.stack([state[name].float() for state in seen])
            low, high = every.amin(0), every.amax(0)
            slack = 0.02 * every.abs().amax()
            assert bool(((mean[name] >= low - slack) & (mean[name] <= high + slack)).all())


@pytest.mark.usefixtures("deepspeed")
def test_a_reset_forgets_the_mean(draft: Path) -> None:
    distiller = Distiller(str(draft), DistillerSettings(learning_rate=1e-2, device="cpu"))
    begin = distiller.state_dict()
    for _ in range(4):
        distiller.micro_step(BATCH)
    distiller.reset(begin)
    for name, weight in distiller.state_dict().items():
        assert torch.equal(weight, begin[name])
