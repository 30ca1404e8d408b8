"""The package list is the tree, and the rules that hold the tree together are in force."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("actors", "cluster", "deploy")


def _pyproject() -> dict[str, dict[str, object]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_package_list_equals_the_tree() -> None:
    tree = {
        "paceline." + ".".join(path.parent.relative_to(ROOT).parts)
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
    }
    setuptools = _pyproject()["tool"]["setuptools"]
    assert isinstance(setuptools, dict)
    listed = setuptools["packages"]
    assert sorted(listed) == sorted(tree)
    assert len(listed) == len(set(listed))


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_the_notice_names_every_folder_of_weights() -> None:
    folders = {
        path.parent.relative_to(ROOT).as_posix()
        for place in ("deploy", "tests/fixtures")
        for path in (ROOT / place).rglob("*.safetensors")
    }
    assert folders >= {"deploy/models/router-minilm", "tests/fixtures/target"}
    assert folders - set((ROOT / "NOTICE").read_text(encoding="utf-8").split()) == set()


def test_bare_imports_are_refused() -> None:
    """``import actors`` would make a second, different class: ruff must not let it pass."""
    banned = "from actors.replay import record\nimport deploy\n\nprint(record, deploy)\n"
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "actors/x.py", "-"]
    result = subprocess.run(command, input=banned, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 1
    assert result.stdout.count("TID251") == 2


def test_lock_pins_every_dependency() -> None:
    lock = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower().replace("_", "-") for line in lock if "==" in line}
    assert len(pinned) == len([line for line in lock if not line.startswith("#")])
    project = _pyproject()["project"]
    groups = _pyproject()["dependency-groups"]
    wanted = [*project["dependencies"], *groups["dev"]]  # type: ignore[misc]
    names = {_name(requirement) for requirement in wanted}
    assert names - pinned == set()


def _name(requirement: str) -> str:
    for mark in "[<>=!~ ;":
        requirement = requirement.split(mark)[0]
    return requirement.lower().replace("_", "-")
