"""Rows, examples and the small numbers of the router's recipe."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from fixtures.recipes import checkpoints, router

from paceline.deploy.recipes import data
from paceline.deploy.recipes.data import DataError, Row, read_rows, write_rows


def row(identity: str, topic: str = "math") -> Row:
    return Row(identity, topic, f"question {identity}", f"answer {identity}")


def test_only_known_sources_pass_and_their_topic_is_the_source_s(tmp_path: Path) -> None:
    rows = [row("gsm8k-1", "whatever"), row("alpaca-1"), row("tldr-en-x", "lang-en: tldr")]
    write_rows(tmp_path / "mixed_train.jsonl.gz", rows)
    assert [(r.id, r.topic) for r in read_rows(tmp_path)] == [
        ("gsm8k-1", "math"),
        ("tldr-en-x", "shell"),
    ]
    assert [r.id for r in read_rows(tmp_path, any_source=True)] == ["alpaca-1"]


def test_a_split_never_reads_the_other_s_file(tmp_path: Path) -> None:
    write_rows(tmp_path / "a_train.jsonl.gz", [row("gsm8k-1")])
    write_rows(tmp_path / "a_test.jsonl.gz", [row("gsm8k-2")])
    assert [r.id for r in read_rows(tmp_path, split="train")] == ["gsm8k-1"]
    assert [r.id for r in read_rows(tmp_path, split="test")] == ["gsm8k-2"]


def test_a_source_without_a_usable_row_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no row of math"):
        read_rows(tmp_path)


def test_sampling_rows_does_not_depend_on_their_order() -> None:
    rows = [row(f"gsm8k-{i}") for i in range(30)]
    picked = data.sample_rows(rows, 5, seed=3)
    assert picked == data.sample_rows(rows[::-1], 5, seed=3)
    assert len(picked) == 5
    assert picked != data.sample_rows(rows, 5, seed=4)


def test_the_schedule_warms_up_and_ends_at_zero() -> None:
    line = [checkpoints.linear_to_zero(s, 100, 10) for s in range(101)]
    assert line[9] == 1
    assert line[100] == 0
    assert all(a >= b for a, b in pairwise(line[10:]))


def test_router_examples_hold_no_row_s_answer_and_every_topic() -> None:
    rows = [row(f"x{i}", topic) for topic in router.LABELS for i in range(3)]
    examples = router.router_examples(rows, 20, seed=1)
    assert {topic for _, topic in examples} == set(router.LABELS)
    assert examples == router.router_examples(rows, 20, seed=1)
    assert not any("answer x" in text for text, _ in examples)


def test_what_a_topic_needs_keeps_nearly_all_of_its_own_texts() -> None:
    general = router.LABELS.index("general")
    sure, unsure, wrong = [9.0, 0, 0, 0, 0], [1.5, 0, 0, 0, 0], [0, 9.0, 0, 0, 0]
    labels = torch.zeros(100, dtype=torch.long)
    assert router.least_confidence(torch.tensor([sure] * 100), labels) == 0.99
    half = torch.tensor([sure] * 50 + [unsure] * 50)
    kept = float(torch.tensor(unsure).softmax(-1)[0])
    assert router.least_confidence(half, labels) == pytest.approx(kept, abs=1e-3)
    one_wrong = torch.tensor([sure] * 99 + [wrong])  # a misclassified text keeps nothing
    assert router.least_confidence(one_wrong, labels) == 0.99
    of_no_topic = torch.full((100,), general)
    assert router.least_confidence(torch.tensor([sure] * 100), of_no_topic) == 0.5


def test_calibration_error_and_temperature() -> None:
    labels = torch.tensor([0, 1] * 50)
    sure = torch.tensor([[0.9, 0.1]] * 100)
    assert router.calibration_error(sure, labels) == pytest.approx(0.4)
    logits = torch.tensor([[8.0, 0.0]] * 75 + [[0.0, 8.0]] * 25)
    targets = torch.zeros(100, dtype=torch.long)
    temperature = router.fit_temperature(logits, targets)
    assert temperature > 4
