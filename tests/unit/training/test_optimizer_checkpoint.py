"""An optimizer's state on disk: real files, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.actors.training import optimizer_state
from paceline.actors.training.optimizer_state import OptimizerState

DIGEST = "5e" * 32


def state(fill: float = 1.0, steps: int = 7) -> OptimizerState:
    """A flat row that no file has room for, a scalar, a matrix, and one of another dtype."""
    row = torch.arange(2_000_000.0) + fill
    return OptimizerState(
        {
            "0.master": row,
            "0.step": torch.tensor(float(steps)),
            "weight.a": torch.full((3, 5), fill),
            "weight.b": torch.full((7,), fill, dtype=torch.bfloat16),
        },
        steps,
        0.25,
    )


def same(one: OptimizerState | None, other: OptimizerState) -> bool:
    return (
        one is not None
        and one.steps == other.steps
        and one.rate_share == other.rate_share
        and one.tensors.keys() == other.tensors.keys()
        and all(torch.equal(one.tensors[n], t) for n, t in other.tensors.items())
        and all(one.tensors[n].dtype == t.dtype for n, t in other.tensors.items())
    )


def folders(topic: Path) -> list[str]:
    return sorted(path.name for path in topic.iterdir())


def test_a_state_is_written_in_files_each_with_a_permit(tmp_path: Path) -> None:
    asked: list[int] = []

    def permit() -> None:
        asked.append(len(list(tmp_path.glob("sql/.partial-*/*.safetensors"))))

    optimizer_state.save_checkpoint(tmp_path / "sql", state(), 3, DIGEST, permit)
    assert asked == [0, 1, 2, 3]  # the last one is before the index
    sizes = [path.stat().st_size for path in tmp_path.glob("sql/3-*/*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 3.1 * 2**20
    assert same(optimizer_state.load_checkpoint(tmp_path / "sql", 3, DIGEST), state())


def test_one_that_fits_a_file_is_read_again_too(tmp_path: Path) -> None:
    small = OptimizerState({"0.master": torch.arange(3.0)}, 1)
    optimizer_state.save_checkpoint(tmp_path, small, 1, DIGEST)
    assert same(optimizer_state.load_checkpoint(tmp_path, 1, DIGEST), small)


def test_the_newest_publication_alone_is_kept(tmp_path: Path) -> None:
    for version in (1, 2, 2):
        optimizer_state.save_checkpoint(tmp_path, state(version), version, DIGEST)
    assert folders(tmp_path) == [f"2-{DIGEST[:16]}"]
    assert optimizer_state.load_checkpoint(tmp_path, 1, DIGEST) is None
    assert optimizer_state.load_checkpoint(tmp_path, 2, "a7" * 32) is None
    assert same(optimizer_state.load_checkpoint(tmp_path, 2, DIGEST), state(2))


def test_the_version_that_a_trial_may_fall_back_to_stays(tmp_path: Path) -> None:
    for version, beside in ((1, 0), (2, 1), (4, 2), (5, 2)):
        optimizer_state.save_checkpoint(tmp_path, state(version), version, DIGEST, beside=beside)
    assert folders(tmp_path) == [f"{version}-{DIGEST[:16]}" for version in (2, 5)]
    assert same(optimizer_state.load_checkpoint(tmp_path, 2, DIGEST), state(2))
    # the same number again, after a registry that had lost its folder
    optimizer_state.save_checkpoint(tmp_path, state(6), 5, "a7" * 32, beside=2)
    assert folders(tmp_path) == [f"2-{DIGEST[:16]}", f"5-{'a7' * 8}"]


def test_rows_that_share_memory_are_kept_each(tmp_path: Path) -> None:
    """Weights under ZeRO are views of one row; a file of one view must not hold them all."""
    row = torch.arange(1_000_000.0)
    views = {"a": row[:10].view(2, 5), "b": row[10:20], "all": row}
    optimizer_state.save_checkpoint(tmp_path, OptimizerState(views, 1), 1, DIGEST)
    assert same(optimizer_state.load_checkpoint(tmp_path, 1, DIGEST), OptimizerState(views, 1))


@pytest.mark.parametrize("files", range(5))
def test_a_stop_between_two_files_keeps_the_checkpoint_before(tmp_path: Path, files: int) -> None:
    optimizer_state.save_checkpoint(tmp_path, state(), 1, DIGEST)
    left = iter(range(files))

    def permit() -> None:
        if next(left, None) is None:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        optimizer_state.save_checkpoint(tmp_path, state(5.0), 2, DIGEST, permit)
    # after the index only what was there before is still to be removed
    assert same(optimizer_state.load_checkpoint(tmp_path, 2, DIGEST), state(5.0)) is (files == 4)
    assert same(optimizer_state.load_checkpoint(tmp_path, 1, DIGEST), state())
    optimizer_state.save_checkpoint(tmp_path, state(9.0), 3, DIGEST)
    assert folders(tmp_path) == [f"3-{DIGEST[:16]}"]


@pytest.mark.parametrize("what", ["torn", "missing", "index", "other"])
def test_a_state_that_is_not_whole_is_not_taken(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer_state.save_checkpoint(tmp_path, state(), 1, DIGEST)
    first, *_ = sorted(tmp_path.glob("1-*/*.safetensors"))
    index = first.with_name("index.json")
    if what == "torn":
        first.write_bytes(first.read_bytes()[:1000])
    elif what == "missing":
        first.unlink()
    elif what == "index":
        index.unlink()
    else:
        index.write_text(index.read_text().replace(DIGEST, DIGEST[:16] + "00" * 24))
    with caplog.at_level("WARNING", logger="paceline.actors.training"):
        assert optimizer_state.load_checkpoint(tmp_path, 1, DIGEST) is None
    assert "the optimizer starts fresh" in caplog.text
