"""Documents that name code name code that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:actors|benchmarks|cluster|deploy|tests)/[\w/]+\.py)(?::([\w.]+))?`")
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def defined(path: Path) -> set[str]:
    """Names of a module's classes and functions, and of classes' methods as ``Class.method``."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (ast.FunctionDef, ast.AsyncFunctionDef)
            names |= {
                f"{node.name}.{part.name}" for part in node.body if isinstance(part, functions)
            }
    return names


def named(document: Path) -> list[tuple[str, str | None]]:
    """Pairs of file and name."""
    return NAMED.findall(document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_what_documents_name_exists(document: Path) -> None:
    for file, name in named(document):
        assert (ROOT / file).is_file(), f"{document.name}: there is no {file}"
        assert not name or name in defined(ROOT / file), f"{document.name}: no {name} in {file}"


def test_every_step_of_a_life_names_its_code() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## The life of", 1)[1]
    steps = re.split(r"\n(?=\d+\. )", text)[1:]
    assert len(steps) == 22
    for step in steps:
        for part in re.split(r"\n(?= +\d+\.\d* )", step):
            assert re.search(r"`(?:actors|cluster|deploy)/[\w/]+\.py:\w", part), part
