"""What the README and the documents point at is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")


@pytest.mark.parametrize(
    "document",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))],
)
def test_links_lead_somewhere(document: Path) -> None:
    targets = LINK.findall(document.read_text(encoding="utf-8"))
    assert [t for t in targets if not (document.parent / t).exists()] == []


def test_the_readme_is_wrapped_and_no_default_ends_in_a_blank() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    prose = [line for line in readme if not line.startswith("|")]
    assert [line for line in prose if len(line) > 100 and " " in line.strip()] == []
    defaults = (ROOT / "deploy" / "config" / "default.yaml").read_text(encoding="utf-8")
    assert [line for line in defaults.splitlines() if line != line.rstrip()] == []


def test_clients_have_the_versions_that_are_tested() -> None:
    requirements = (ROOT / "tests" / "clients" / "requirements.txt").read_text(encoding="utf-8")
    named = requirements.split("# What they need.")[0]
    pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", named, re.MULTILINE))
    table = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| ([\w-]+) \| ([\d.]+) \|", table, re.MULTILINE))
    assert rows == pins
    assert len(pins) == 6


def test_documents_name_make_targets_that_exist() -> None:
    text = "\n".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    named = set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    rules = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "serve", "test"} <= named <= rules
