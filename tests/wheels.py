"""A wheel of the tree, built as an operator builds it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SKIP = {
    ".git",
    ".venv",
    ".venv-clients",
    ".typing",
    ".cache",
    "out",
    "build",
    "dist",
    "__pycache__",
}


def build_wheel(folder: Path) -> Path:
    """Build a copy of the tree, so that no stale ``build/`` gets into it, into an empty folder."""
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=lambda _, names: _SKIP.intersection(names))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder)]
    result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built
