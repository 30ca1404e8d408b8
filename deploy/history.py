"""The gate's decisions as the registry keeps them on disk: readable without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any


def read_history(state_path: Path, topic: str | None = None) -> list[dict[str, Any]]:
    """Every decision under a state folder, oldest first.

    A line that a crash cut off is skipped.

    Args:
        state_path: as in the config; a folder that is not there has no decisions.
        topic: only of this topic, None for all.
    """
    decisions = []
    for file in state_path.rglob("history.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                decision = json.loads(line)
            except ValueError:
                continue
            if isinstance(decision, dict) and topic in (None, decision.get("topic")):
                decisions.append(decision)
    return sorted(decisions, key=lambda decision: float(decision.get("time") or 0.0))


def table(decisions: Sequence[dict[str, Any]]) -> str:
    """The decisions as lines of text under a heading."""
    heading = f"{'time':19}  {'topic':10}  {'outcome':9}  {'version':>7}  {'served':>7}  {'new':>7}"
    return "\n".join([heading, *map(_row, decisions)])


def _row(decision: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(float(decision.get("time") or 0.0)).astimezone()
    served = decision.get("served_expected_acceptance")
    new = decision.get("candidate_expected_acceptance")
    return (
        f"{when:%Y-%m-%d %H:%M:%S}  {decision.get('topic', '?')!s:10}  "
        f"{decision.get('outcome', '?')!s:9}  {decision.get('version', '-')!s:>7}  "
        f"{_figure(served):>7}  {_figure(new):>7}"
    )


def _figure(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "-"
