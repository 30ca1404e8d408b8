"""The history of decisions on disk: JSON lines, readable without a server."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HISTORY_NAME = "history.jsonl"


def finite(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def append_decision(path: Path, decision: Mapping[str, Any]) -> None:
    """Append a line, on a new line if a kill cut the last one short."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(finite(decision), allow_nan=False).encode() + b"\n")


def read_decisions(path: Path, limit: int | None = None) -> list[dict[str, Any]]:
    """The last ``limit`` decisions of a file (None: all), oldest first.

    Broken lines are left out; a missing file holds none.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    decisions = []
    for line in lines if limit is None else lines[-limit:]:
        try:
            decision = json.loads(line)
        except ValueError:
            continue
        if isinstance(decision, dict):
            decisions.append(finite(decision))
    return decisions


def read_all_decisions(folder: Path, topic: str | None = None) -> list[dict[str, Any]]:
    """All decisions under a folder, of all models it was used with, by time.

    Args:
        folder: a state folder; it may be missing.
        topic: only decisions of this topic; None for all.
    """
    found = [d for file in folder.rglob(HISTORY_NAME) for d in read_decisions(file)]
    return sorted((d for d in found if topic in (None, d.get("topic"))), key=decision_time)


def decision_time(decision: Mapping[str, Any]) -> float:
    """Time of a decision, unix seconds; 0 if it has none."""
    time = decision.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
