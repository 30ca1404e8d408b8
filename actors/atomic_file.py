"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically: ``path`` is the old one or the whole new one, after a crash too.

    Args:
        path: of the file; its folder exists.
        write: writes the path that it is given, ``.<name>.<pid>.partial`` beside ``path``.

    Raises:
        OSError: it cannot be written; ``path`` is as it was. What ``write`` raises is raised too.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(partial)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by a text in UTF-8, see :func:`replace_file`."""
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
