"""The demo deletes its own state folder only."""

from pathlib import Path

import pytest

from paceline.deploy.cli.main import main
from paceline.deploy.demo.main import fresh_state
from paceline.deploy.errors import ConfigError


def test_a_state_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    state = fresh_state(tmp_path / "demo")
    (state / "weights").mkdir()
    (state / "weights" / "old").touch()
    assert fresh_state(tmp_path / "demo") == state
    assert not (state / "weights").exists()


def test_a_folder_that_no_demo_made_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    precious = tmp_path / "state" / "weights" / "7.safetensors"
    precious.parent.mkdir(parents=True)
    precious.write_text("months of work")
    with pytest.raises(ConfigError, match="not made by a demo"):
        fresh_state(tmp_path)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "not made by a demo" in capsys.readouterr().err
    assert precious.read_text() == "months of work"


def test_an_out_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(ConfigError, match="--out"):
        fresh_state(tmp_path / "out")
