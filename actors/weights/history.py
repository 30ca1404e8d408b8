"""The history of decisions on disk: JSON lines, readable without a server."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

HISTORY_NAME = "history.jsonl"


Outcome = Literal[
    "published",
    "promoted",
    "rolled_back",
    "kept",
    "rejected",
    "refused",
    "restored",
    "added",
    "drift",
    "plateau",
]


class Decision(TypedDict, total=False):
    """An entry of the history; it has the fields of its kind, and None for figures without value.

    Attributes:
        time: unix seconds.
        topic: whose weights are decided about.
        outcome: what was decided, or noted.
        version: weight_version.
        parent: the stable version before.
        reason: in words.
        canary: whether a published version is on trial.
        restored_from: the earlier version whose weights are served again.
        audit: whether the last known good version is tried, see CanarySettings.
        proven: whether a promoted version was shown to be better.
        candidate_expected_acceptance: the gate's, as the next eight; see GateDecision.
        served_expected_acceptance: of the served draft.
        gain_lower_bound: of the candidate's gain.
        gain_upper_bound: likewise.
        records: held-out ones.
        tests: of the candidate's earlier weights.
        train_records: that it learnt from.
        halfway: whether its weights are half way from the served to the trained ones.
        steps: optimizer steps.
        rate_share: share of the learning rate.
        canary_requests: the canary's, as the next eight; drafted ones of the candidate.
        stable_requests: drafted ones of the stable version.
        canary_acceptance: of the candidate.
        stable_acceptance: of the stable version.
        canary_silent: requests that the candidate did not draft for.
        stable_silent: likewise of the stable version.
        looks: at the data.
        difference: of acceptance, candidate minus stable.
        difference_lower_bound: its bounds.
        difference_upper_bound: likewise.
        requests: since a promotion, or seen by the drift monitor.
        acceptance: of these.
        acceptance_before: of the predecessor.
        acceptance_fast: the drift monitor's fast mean.
        acceptance_slow: and its slow one.
    """

    time: float
    topic: str
    outcome: Outcome
    version: int
    parent: int
    reason: str
    canary: bool
    restored_from: int | None
    audit: bool
    proven: bool
    candidate_expected_acceptance: float | None
    served_expected_acceptance: float | None
    gain_lower_bound: float | None
    gain_upper_bound: float | None
    records: int
    tests: int
    train_records: int
    halfway: bool
    steps: int
    rate_share: float
    canary_requests: int
    stable_requests: int
    canary_acceptance: float | None
    stable_acceptance: float | None
    canary_silent: int
    stable_silent: int
    looks: int
    difference: float | None
    difference_lower_bound: float | None
    difference_upper_bound: float | None
    requests: int
    acceptance: float | None
    acceptance_before: float | None
    acceptance_fast: float | None
    acceptance_slow: float | None


def finite(value: Any) -> Any:
    """Replace nan and infinities, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def append_decision(path: Path, decision: Decision) -> None:
    """Append a line, on a new line if a kill cut the last one short."""
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(finite(decision), allow_nan=False).encode() + b"\n")


def read_decisions(path: Path, limit: int | None = None) -> list[Decision]:
    """The last ``limit`` decisions of a file (None: all), oldest first.

    Broken lines are left out; a missing file holds none.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    decisions: list[Decision] = []
    for line in lines if limit is None else lines[-limit:]:
        try:
            decision = json.loads(line)
        except ValueError:
            continue
        if isinstance(decision, dict):
            decisions.append(finite(decision))
    return decisions


def read_all_decisions(folder: Path, topic: str | None = None) -> list[Decision]:
    """All decisions under a folder, of all models it was used with, by time.

    Args:
        folder: a state folder; it may be missing.
        topic: only decisions of this topic; None for all.
    """
    found = [d for file in folder.rglob(HISTORY_NAME) for d in read_decisions(file)]
    return sorted((d for d in found if topic in (None, d.get("topic"))), key=decision_time)


def decision_time(decision: Mapping[str, object]) -> float:
    """Time of a decision, unix seconds; 0 if it has none."""
    time = decision.get("time")
    return float(time) if isinstance(time, int | float) else 0.0
