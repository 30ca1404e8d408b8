"""The command line: options, history, and exit codes before anything starts."""

import json
from pathlib import Path

import pytest

from paceline.deploy.cli import main


def write_history(folder: Path) -> None:
    decisions = [
        {"time": 20.0, "topic": "sql", "outcome": "published", "version": 1,
         "served_expected_acceptance": 0.1, "candidate_expected_acceptance": 0.5},
        {"time": 10.0, "topic": "math", "outcome": "rejected", "version": 0},
    ]  # fmt: skip
    file = folder / "abc" / "history.jsonl"
    file.parent.mkdir(parents=True)
    lines = [json.dumps(decision) for decision in decisions]
    file.write_text("\n".join([*lines, '{"time": 30, "top']))


def test_history_reads_the_decisions_from_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path)
    assert main(["history", "--state-dir", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[2] for row in rows[1:]] == ["math", "sql"]
    assert rows[2].split()[3:] == ["published", "1", "0.100", "0.500"]
    assert main(["history", "--state-dir", str(tmp_path), "--json", "--topic", "sql"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"] == "published"


def test_history_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--state-dir", str(tmp_path)]) == 0
    assert "No decision" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("yaml", "said"),
    [
        ("prot: 9000", "prot: no such key"),
        ("target: {path: /nowhere}", "no model folder at /nowhere"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], yaml: str, said: str
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(yaml)
    assert main(["serve", str(file)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("paceline: ")
    assert error.count("\n") == 1


def test_an_unknown_option_is_2() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "--dtype", "int4"])
    assert caught.value.code == 2
