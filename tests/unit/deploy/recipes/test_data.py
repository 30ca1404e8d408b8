"""Rows, packing, the standard library's functions and the small numbers of the recipes."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.deploy.recipes import checkpoints, data, router, router_data
from paceline.deploy.recipes.answers import loops
from paceline.deploy.recipes.data import BlockStream, DataError, Row, read_rows, write_rows
from paceline.deploy.recipes.stdlib import library_rows


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


def test_packing_keeps_every_token_but_the_remainder() -> None:
    sequences = [np.full(n, n, dtype=np.int32) for n in (3, 4, 5)]
    packed = data.pack(sequences, 5, np.random.default_rng(0))
    assert packed.shape == (2, 5)
    values, counts = np.unique(packed, return_counts=True)
    assert all(count <= value for value, count in zip(values, counts, strict=True))
    with pytest.raises(DataError, match="12 tokens"):
        data.pack(sequences, 13, np.random.default_rng(0))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    sequences = [np.arange(i, i + 7, dtype=np.int32) for i in range(20)]
    walked = BlockStream(sequences, block=10, batch=3, seed=5)
    batches = [walked.at(step) for step in range(10)]
    for step in (9, 0, 4):
        jumped = BlockStream(sequences, block=10, batch=3, seed=5).at(step)
        assert np.array_equal(jumped, batches[step])


LIBRARY = '''
def plain(x):
    """Return x."""
    return x


class Box:
    def get(self):
        """Return what is
        in the box."""
        return self._content

    def bare(self):
        return 1

    def empty(self):
        """Nothing but a text."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name in ("one.py", "two.py", "three.py", "test/four.py"):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(LIBRARY.replace("x)", f"{path.stem})").replace("_content", path.stem))
    (tmp_path / "lib" / "broken.py").write_text("def (")
    return tmp_path / "lib"


def test_documented_functions_become_rows(library: Path) -> None:
    rows = library_rows([], root=library, min_functions=1)
    assert {r.id.split(":")[0] for r in rows} == {"stdlib-one", "stdlib-two", "stdlib-three"}
    get = next(r for r in rows if r.id == "stdlib-one:get:8")
    assert get.prompt.endswith("doc:\nReturn what is\nin the box.")
    assert get.response.startswith("def get(self):\n    ")
    assert not any(":bare" in r.id or ":empty" in r.id for r in rows)


def test_held_out_modules_and_texts_are_never_learnt(library: Path) -> None:
    whole = library_rows([], root=library, min_functions=1)
    module = Row("cpython313-two:other:1", "code", "else", "else")
    kept = library_rows([module], root=library, min_functions=1)
    assert {r.id for r in whole} - {r.id for r in kept} == {
        r.id for r in whole if r.id.startswith("stdlib-two:")
    }
    text = Row("elsewhere-1", "code", "else", "  ".join(whole[0].response.split(" ")))
    assert whole[0] not in library_rows([text], root=library, min_functions=1)


def test_small_modules_in_neither_list_are_left_out(library: Path) -> None:
    known = Row("cpython313-one:else:1", "code", "else", "else")
    rows = library_rows([], [known], root=library, min_functions=5)
    assert {r.id.split(":")[0] for r in rows} == {"stdlib-one"}


def test_loops_are_found() -> None:
    assert loops([1, 2, 3] * 8)
    assert not loops(range(100))
    assert not loops([1] * 9)
    assert loops([1] * 10)


def test_schedules_warm_up_and_end_where_they_should() -> None:
    line = [checkpoints.linear_to_zero(s, 100, 10) for s in range(101)]
    wave = [checkpoints.cosine(s, 100, 10) for s in range(101)]
    assert line[9] == wave[9] == 1
    assert line[100] == 0
    assert wave[100] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(line[10:]))


def test_router_examples_hold_no_row_s_answer_and_every_topic() -> None:
    rows = [row(f"x{i}", topic) for topic in router.LABELS for i in range(3)]
    examples = router_data.router_examples(rows, 20, seed=1)
    assert {topic for _, topic in examples} == set(router.LABELS)
    assert examples == router_data.router_examples(rows, 20, seed=1)
    assert not any("answer x" in text for text, _ in examples)


def test_what_a_topic_needs_keeps_nearly_all_of_its_own_texts() -> None:
    general = router.LABELS.index("general")
    sure, unsure, wrong = [9.0, 0, 0, 0, 0], [1.5, 0, 0, 0, 0], [0, 9.0, 0, 0, 0]
    labels = torch.zeros(100, dtype=torch.long)
    assert router.least_confidence(torch.tensor([sure] * 100), labels) == 0.99
    half = torch.tensor([sure] * 50 + [unsure] * 50)
    kept = float(torch.tensor(unsure).softmax(-1)[0])
    assert router.least_confidence(half, labels) == pytest.approx(kept, abs=1e-3)
    one_wrong = torch.tensor([sure] * 99 + [wrong])  # a text that is told wrong keeps nothing
    assert router.least_confidence(one_wrong, labels) == 0.99
    nobodys = torch.full((100,), general)
    assert router.least_confidence(torch.tensor([sure] * 100), nobodys) == 0.5


def test_calibration_error_and_temperature() -> None:
    labels = torch.tensor([0, 1] * 50)
    sure = torch.tensor([[0.9, 0.1]] * 100)
    assert router.calibration_error(sure, labels) == pytest.approx(0.4)
    logits = torch.tensor([[8.0, 0.0]] * 75 + [[0.0, 8.0]] * 25)
    targets = torch.zeros(100, dtype=torch.long)
    temperature = router.fit_temperature(logits, targets)
    assert temperature > 4
