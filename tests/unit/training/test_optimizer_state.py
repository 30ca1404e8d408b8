"""The optimizer's state across a restart: real DeepSpeed, real files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, learn, training_record

from paceline.actors.training import optimizer_state
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.weights.flat_weights import flatten

RECORDS = [training_record(number) for number in range(8)]


pytestmark = pytest.mark.usefixtures("deepspeed")


def candidate(folder: Path, dtype: str, *, keep: bool = True, layers: int = 1) -> Candidate:
    path = folder / f"draft-{layers}"
    tiny_llama(0, vocab=TINY_VOCAB, layers=layers).save_pretrained(path)
    settings = TrainerSettings(
        draft_paths={"sql": str(path)},
        # a warm-up longer than the first part: its place must be kept as well
        distiller=DistillerSettings(learning_rate=5e-3, warmup_steps=10, dtype=dtype),
        optimizer_dir=str(folder / "optimizer") if keep else None,
    )
    return Candidate("sql", settings)


def steps(one: Candidate, count: int) -> list[float]:
    return [learn(one, RECORDS[n % 4 : n % 4 + 4]).loss for n in range(count)]


def published(one: Candidate, version: int = 1, stable: int = 0) -> dict[str, torch.Tensor]:
    state = one.compare(RECORDS, lambda: None).state
    one.mark_published(version, state, RECORDS, np.zeros(len(RECORDS)), stable=stable)
    return state


def weights(one: Candidate) -> dict[str, torch.Tensor]:
    return one.compare(RECORDS[:1], lambda: None).state


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_restarted_trainer_goes_on_as_if_nothing_had_happened(tmp_path: Path, dtype: str) -> None:
    first = candidate(tmp_path, dtype)
    steps(first, 5)
    state = published(first)
    expected = steps(first, 8)

    second = candidate(tmp_path, dtype)
    second.load(1, flatten(state))
    assert second.steps == 5
    assert steps(second, 8) == pytest.approx(expected, rel=1e-5)
    for name, weight in weights(first).items():
        torch.testing.assert_close(weights(second)[name], weight)

    # without the file it does not: the test would fail
    third = candidate(tmp_path, dtype, keep=False)
    third.load(1, flatten(state))
    assert third.steps == 0
    assert steps(third, 8) != pytest.approx(expected, rel=1e-3)


def test_the_stable_version_of_a_trial_keeps_its_checkpoint(tmp_path: Path) -> None:
    one = candidate(tmp_path, "float32")
    steps(one, 3)
    first = published(one, 1)
    steps(one, 4)
    published(one, 2, stable=1)  # on trial, and rolled back
    one.load(1, flatten(first))
    assert one.steps == 3
    steps(one, 2)
    published(one, 3, stable=1)
    again = candidate(tmp_path, "float32")
    again.load(1, flatten(first))
    assert again.steps == 3


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_a_full_disk_costs_the_checkpoint_and_not_the_publication(
    tmp_path: Path, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise error("no space left on device")

    monkeypatch.setattr(optimizer_state, "save_file", full)
    one = candidate(tmp_path, "float32")
    steps(one, 1)
    published(one)
    assert one.version == 1


def test_the_file_outlives_the_order_in_which_weights_were_flattened(tmp_path: Path) -> None:
    first = candidate(tmp_path, "float32")
    steps(first, 2)
    state = published(first)
    second = candidate(tmp_path, "float32")
    second.load(1, flatten(dict(reversed(list(state.items())))))
    assert second.steps == 2


@pytest.mark.parametrize("what", ["version", "weights", "torn", "other draft"])
def test_a_file_that_does_not_belong_is_ignored_with_one_line(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = candidate(tmp_path, "float32")
    steps(first, 2)
    state = published(first)
    topic = tmp_path / "optimizer" / "sql"
    second = candidate(tmp_path, "float32", layers=2 if what == "other draft" else 1)
    if what == "weights":
        state = {name: weight + 1 for name, weight in state.items()}
    if what == "torn":
        [file] = topic.glob("1-*/*.safetensors")
        file.write_bytes(file.read_bytes()[:100])
    if what == "other draft":
        state = weights(second)
        kept = first._distiller.optimizer_state()
        optimizer_state.save_checkpoint(topic, kept, 1, flatten(state).digest())
    caplog.clear()
    with caplog.at_level("INFO", logger="paceline.actors.training"):
        second.load(2 if what == "version" else 1, flatten(state))
    assert second.steps == 0
    assert len([r for r in caplog.records if "the optimizer starts fresh" in r.getMessage()]) == 1
    assert steps(second, 1)[0] > 0.0


def test_a_folder_that_cannot_be_written_costs_the_state_and_not_the_publication(
    tmp_path: Path,
) -> None:
    (tmp_path / "optimizer").write_text("a file where the folder should be")
    one = candidate(tmp_path, "float32")
    steps(one, 1)
    published(one)
    assert one.version == 1
