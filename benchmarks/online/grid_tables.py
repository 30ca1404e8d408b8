"""The grid's figures: means with intervals, differences to the reference, a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.actors.training.gate import student_quantile

_KINDS = ("greedy", "sampled")
_ERROR = 0.025  # on either side of an interval


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean with Student's 95 % interval; without bounds where there are fewer than two."""
    array = np.asarray(values, dtype=np.float64)
    mean = float(array.mean())
    if len(array) < 2:
        return {"mean": mean, "low": None, "high": None}
    spread = float(array.std(ddof=1)) / math.sqrt(len(array))
    reach = student_quantile(_ERROR, len(array) - 1) * spread
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def summary(
    before: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    reference: str,
) -> dict[str, Any]:
    """Figures of a topic.

    A cell differs from the reference in two ways that chance may explain: the order of the
    records (over seeds) and which records judge (over records, each averaged over the seeds).
    It is clearly better or worse where neither does.

    Args:
        before: scores of the held-out records before any teaching, by kind.
        runs: cell to its runs, one per seed in the same order, each with scores by kind.
        reference: the cell that others are compared with.
    """
    cells = {}
    for name, own in runs.items():
        cell: dict[str, Any] = {
            key: float(np.mean([run[key] for run in own])) for key in ("training_s", "positions")
        }
        for kind in _KINDS:
            scores, base = _scores(own, kind), _scores(runs[reference], kind)
            gains = scores - base[: len(scores)]
            seeds, records = interval(gains.mean(1).tolist()), interval(gains.mean(0).tolist())
            cell[kind] = {
                "acceptance": interval(scores.mean(1).tolist()),
                "gain_over_seeds": seeds,
                "gain_over_records": records,
                "clearly": _clearly(seeds, records),
            }
        cells[name] = cell
    return {
        "untaught": {kind: float(np.mean(before[kind])) for kind in _KINDS},
        "reference": reference,
        "cells": cells,
    }


def markdown(figures: Mapping[str, Any], command: str) -> str:
    """Section on losses: a table per topic, the best sampled acceptance first.

    Args:
        figures: of ``grid.json``.
        command: that made it.
    """
    lines = [
        "## Losses and sampling",
        "",
        f"Command: `{command}`",
        "",
        "Every row is the same number of steps of 8 records, from the initial draft, on the same "
        "logged replay in the same orders; half of the records are greedy answers, half sampled at "
        f"temperature 0.8. Rate {figures['learning_rate']:g}, constant after a warm-up. Acceptance "
        "is teacher-forced, as served. **better** and worse: by an interval over seeds and by one "
        "over records, both; many rows are compared and nothing is corrected for that.",
        "",
    ]
    for topic, facts in figures["topics"].items():
        replay = facts["replay"]
        before = ", ".join(f"{kind} {facts['untaught'][kind]:.3f}" for kind in _KINDS)
        lines += [
            f"### {topic}: {figures['steps']} steps, {figures['seeds']} seeds, "
            f"prompts: {figures['data']}",
            "",
            f"{replay['records_train']} records to learn from, {replay['records_test']} to judge "
            f"by; acceptance before: {before}. Acceptance with a 95 % interval over seeds; the "
            f"gain over {facts['reference'].replace('-', ', ')} with one over records.",
            "",
            "| loss, sampling, weighting | greedy | gain | sampled | gain | training, s |",
            "|---|---|---|---|---|---|",
        ]
        order = sorted(
            facts["cells"], key=lambda name: -facts["cells"][name]["sampled"]["acceptance"]["mean"]
        )
        lines += [_row(name, facts["cells"][name]) for name in order]
        lines.append("")
    return "\n".join(lines)


def _row(name: str, cell: Mapping[str, Any]) -> str:
    columns = [name.replace("-", ", ")]
    for kind in _KINDS:
        facts = cell[kind]
        mark = {"better": " **better**", "worse": " worse"}.get(facts["clearly"], "")
        columns += [
            _figure(facts["acceptance"], "{:.3f}"),
            _figure(facts["gain_over_records"], "{:+.3f}") + mark,
        ]
    return f"| {' | '.join([*columns, format(cell['training_s'], '.0f')])} |"


def _figure(facts: Mapping[str, float | None], form: str) -> str:
    mean = form.format(facts["mean"])
    if facts["low"] is None:
        return mean
    return f"{mean} ({form.format(facts['low'])} to {form.format(facts['high'])})"


def _scores(runs: Sequence[Mapping[str, Any]], kind: str) -> NDArray[np.float64]:
    """float64 ``[seeds, records]``."""
    return np.array([run[kind] for run in runs], dtype=np.float64)


def _clearly(*gains: Mapping[str, float | None]) -> str | None:
    lows, highs = ([gain[side] for gain in gains] for side in ("low", "high"))
    if all(low is not None and low > 0.0 for low in lows):
        return "better"
    if all(high is not None and high < 0.0 for high in highs):
        return "worse"
    return None
