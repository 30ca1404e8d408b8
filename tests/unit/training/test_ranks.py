"""Two ranks in two processes, over gloo: they learn what one learns, and one may die."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixture_models import TARGET
from local_client import filled, make_loop, trainer_settings
from rank_processes import TIMEOUT_S, as_rank_0, worker_group_of
from training_records import training_record

from paceline.actors.training import worker_group as group
from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller, MicroStep
from paceline.actors.training.settings import DistillerSettings, ObjectiveSettings
from paceline.actors.training.shares import make_shares, split_share
from paceline.actors.training.worker_group import (
    DistributedDistiller,
    Worker,
    WorkerGroup,
    WorkerGroupError,
)
from paceline.actors.weights.eagle import new_draft, save_draft

# Records of unequal lengths, and fewer of them than ranks at the end.
BATCHES = [
    make_batch([training_record(n, length=4 + n) for n in range(7)], 64),
    make_batch([training_record(n, length=20 - n) for n in range(4)], 64),
    make_batch([training_record(9)], 64),
    make_batch([training_record(n) for n in range(5)], 64),
]
VARIANTS = {
    "stage 0": DistillerSettings(dtype="float32", device="cpu", zero_stage=0),
    "stage 1": DistillerSettings(dtype="float32", device="cpu", zero_stage=1),
    "stage 2": DistillerSettings(dtype="float32", device="cpu", zero_stage=2),
    "adapters": DistillerSettings(dtype="float32", device="cpu", adapter="lora"),
    "bfloat16": DistillerSettings(dtype="bfloat16", device="cpu"),
    "bfloat16, stage 0": DistillerSettings(dtype="bfloat16", device="cpu", zero_stage=0),
}


def test_the_shares_are_the_whole() -> None:
    for batch in BATCHES:
        shares = split_share(make_shares([batch], ObjectiveSettings())[0], 3)
        assert sum(float(share.weights.sum()) for share in shares) == pytest.approx(1.0)
        seen = [
            (share.batch.input_ids[row].tolist(), int(column), int(token))
            for share in shares
            if len(share.places)
            for row, column, token in zip(
                share.batch.rows, share.batch.columns, share.batch.output_ids, strict=True
            )
        ]
        expected = [
            (batch.input_ids[row].tolist(), int(column), int(token))
            for row, column, token in zip(batch.rows, batch.columns, batch.output_ids, strict=True)
        ]
        assert sorted(seen) == sorted(expected)
        assert all(share.batch.num_records >= 1 for share in shares)


def test_a_stage_that_cannot_work_is_refused_with_the_reason(draft: Path) -> None:
    wrong = DistillerSettings(dtype="float32", device="cpu", zero_stage=3)
    with pytest.raises(ValueError, match="stage 3 splits the weights themselves"):
        Distiller(str(draft), wrong)


class Inline:
    """A worker of a group of one, in this process: its part of a reset is what is looked at."""

    def __init__(self) -> None:
        self.worker = Worker.__new__(Worker)
        self.worker._distillers = {}

    def call(self, method: Callable[..., None], *arguments: Any, **named: Any) -> None:
        method(self.worker, *arguments, **named)

    def stop(self) -> None:
        pass


@pytest.mark.usefixtures("deepspeed")
def test_all_ranks_go_on_with_the_vocabulary_of_the_weights(tmp_path: Path) -> None:
    path = str(tmp_path / "draft")
    save_draft(new_draft(str(TARGET), vocabulary=torch.arange(300, dtype=torch.int32)), path)
    workers, other = WorkerGroup(2, lambda _spec: other, "127.0.0.1", TIMEOUT_S), Inline()
    workers._handles = [other]  # this process has its group
    settings = DistillerSettings(dtype="float32", device="cpu", target_path=str(TARGET))
    one = DistributedDistiller("sql", path, settings, workers)
    grown = torch.arange(100, 400, dtype=torch.int32)
    for act in (lambda: one.set_vocabulary(grown), lambda: one.reset(one.state_dict())):
        act()
        assert one.vocabulary is not None
        assert one.vocabulary.tolist() == grown.tolist()
        theirs = other.worker._distillers["sql"].vocabulary
        assert theirs is not None
        assert theirs.tolist() == grown.tolist()


def _lesson(distiller: Distiller) -> tuple[list[MicroStep], Any]:
    """Some steps, a pause that keeps only weights and optimizer, and the steps after it."""
    figures = [distiller.micro_step(batch) for batch in BATCHES[:2]]
    distiller.scale_rate(0.5)
    figures += [distiller.micro_step(batch) for batch in BATCHES[2:]]
    weights, kept = distiller.state_dict(), distiller.optimizer_state()
    distiller.scale_rate(1.0)
    distiller.reset(weights)
    distiller.resume(kept)  # its share of the rate among it
    assert kept.rate_share == 0.5
    figures += [distiller.micro_step(batch) for batch in BATCHES]
    return figures, (distiller.optimizer_state().tensors, distiller.state_dict())


def _alone_and_together(draft: str) -> dict[str, list[Any]]:
    results: dict[str, list[Any]] = {}
    group.join_group(group.WorkerSpec(0, 1, "127.0.0.1", group.free_port(), "cpu"), TIMEOUT_S)
    for name, settings in VARIANTS.items():
        results[name] = [_lesson(Distiller(draft, settings))]
    group.leave_group()
    workers, _ = worker_group_of(2)
    for name, settings in VARIANTS.items():
        results[name].append(_lesson(DistributedDistiller(name, draft, settings, workers)))
    workers.stop()
    return results


def _failure_in_a_step(draft: str) -> tuple[str, bool]:
    workers, _ = worker_group_of(2)
    distiller = DistributedDistiller("sql", draft, VARIANTS["stage 0"], workers)
    whole = BATCHES[0]
    distiller.micro_step(whole)
    wrong = dataclasses.replace(whole, columns=whole.columns.clone())
    wrong.columns[wrong.rows == 1] = 10_000  # of the second rank's share
    began = time.monotonic()
    try:
        distiller.micro_step(wrong)
    except WorkerGroupError as error:
        return str(error), time.monotonic() - began < TIMEOUT_S / 2
    finally:
        workers.stop()
    return "it went on", False


def _death_in_a_round(draft: str, folder: str) -> dict[str, Any]:
    workers, started = worker_group_of(2)
    client = filled(Path(folder))
    loop = make_loop(trainer_settings(Path(draft), ranks=2), client, workers=workers)
    assert loop.run_round()
    first = client.versions()
    asked: list[int] = []

    def permit() -> bool:
        asked.append(1)
        if len(asked) == 5:
            started[0].stop()
        return True

    client.permitted = permit
    reason = "the round went on without its second rank"
    try:
        loop.run_round()
    except WorkerGroupError as error:
        reason = str(error)
    lost = client.versions()
    client.permitted = lambda: True
    while loop.progress.published < 2 and loop.progress.rounds < 20:
        loop.run_round()
    workers.stop()
    return {
        "first": first,
        "lost": lost,
        "last": client.versions(),
        "asked": len(asked),
        "reason": reason,
        "alive": [worker.process.poll() is None for worker in started],
    }


def _everything(draft: str, folder: str) -> tuple[Any, Any, Any]:
    """All of it in one process, which leaves its group and joins another time after time."""
    return (
        _alone_and_together(draft),
        _failure_in_a_step(draft),
        _death_in_a_round(draft, folder),
    )


@pytest.fixture(scope="module")
def outcome(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """What :func:`_everything` came to."""
    found: tuple[Any, Any, Any] = as_rank_0(
        _everything, str(draft), str(tmp_path_factory.mktemp("client"))
    )
    return found


@pytest.mark.full
@pytest.mark.parametrize("variant", VARIANTS)
def test_two_ranks_learn_what_one_learns(outcome: tuple[Any, ...], variant: str) -> None:
    (alone, (state, weights)), (together, (other_state, other_weights)) = outcome[0][variant]
    exact = "bfloat16" not in variant
    tolerance = 1e-4 if exact else 0.05
    for one, two in zip(alone, together, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=tolerance)
        assert two.expected_acceptance == pytest.approx(one.expected_acceptance, rel=tolerance)
        assert two.positions == one.positions
        assert two.record_losses == pytest.approx(one.record_losses, rel=tolerance)
    assert alone[-1].loss < alone[3].loss
    # what is kept of the optimizer does not depend on the ranks: moments are the gradients' trace
    assert state.keys() == other_state.keys()
    assert {name: t.shape for name, t in state.items()} == {
        name: t.shape for name, t in other_state.items()
    }
    if exact:
        for name in (name for name in state if "exp_avg" in name):
            torch.testing.assert_close(other_state[name], state[name], rtol=1e-3, atol=1e-6)
    assert weights.keys() == other_weights.keys()


@pytest.mark.full
def test_the_death_of_a_rank_costs_the_round_and_nothing_else(outcome: tuple[Any, ...]) -> None:
    facts = outcome[2]
    assert facts["reason"].startswith("another rank failed")
    assert facts["asked"] == 5  # it raised in the very step
    assert sum(facts["first"].values()) == 1
    assert facts["lost"] == facts["first"]
    assert sum(facts["last"].values()) == 2
    assert facts["alive"] == [False, False]  # a second one was started, and stopped at the end


@pytest.mark.full
def test_a_rank_that_fails_does_not_keep_the_others_waiting(outcome: tuple[Any, ...]) -> None:
    reason, at_once = outcome[1]
    assert reason.startswith("another rank failed")
    assert at_once
