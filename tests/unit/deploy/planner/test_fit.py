"""Fit of a machine to measured steps, and the benchmark's step table."""

import json
import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import steps as step_bench
from fixture_models import DRAFT, TARGET
from planner_models import LARGE, SMALL

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.roofline import (
    Fit,
    Hardware,
    Precision,
    StepTable,
    Work,
    error_summary,
    fit_models,
    predict,
    read_steps,
    step_time,
    step_work,
    step_works,
)

TRUE = Hardware("true", bandwidth=2.5e11, flops=4e13, overhead_s=3e-5)


def made_by(machine: Hardware, noise: float = 0.0) -> StepTable:
    """Steps of a known machine, in both regimes; times off by up to ``noise``."""
    rng = random.Random(1)
    keys = {(rows, column): 1.0 for rows in (1, 4, 16, 64) for column in (1, 2, 5, 9)}
    works = step_works(LARGE, SMALL, StepTable(512, Precision(), keys, keys))

    def seconds(model: str) -> dict[tuple[int, int], float]:
        return {
            (rows, column): step_time(work, machine).seconds * (1.0 + rng.uniform(-noise, noise))
            for (own, rows, column), (work, _) in works.items()
            if own == model
        }

    return StepTable(512, Precision(), seconds("target"), seconds("draft"))


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_machine_is_recovered_from_its_steps(overlaps: bool) -> None:
    true = replace(TRUE, overlaps=overlaps)
    fit = fit_models(LARGE, SMALL, made_by(true))
    assert fit.hardware.overlaps == overlaps
    assert fit.hardware.bandwidth == pytest.approx(true.bandwidth, rel=0.01)
    assert fit.hardware.flops == pytest.approx(true.flops, rel=0.01)
    assert fit.hardware.overhead_s == pytest.approx(true.overhead_s, rel=0.2)
    for points in (fit.points, fit.unseen):
        errors = error_summary(points)
        assert {kind: found["count"] for kind, found in errors.items()} == {
            "target": 16, "draft": 16, "speed-up": 12,
        }  # fmt: skip
        # Without the largest batch no step may be bound by FLOPs: its error is not bounded.
        assert all(found["median"] < 0.01 for found in errors.values())
    assert all(found["largest"] < 0.01 for found in error_summary(fit.points).values())


def test_errors_are_those_of_the_noise() -> None:
    fit: Fit = fit_models(LARGE, SMALL, made_by(TRUE, noise=0.2))
    assert fit.hardware.bandwidth == pytest.approx(TRUE.bandwidth, rel=0.15)
    seen, unseen = error_summary(fit.points), error_summary(fit.unseen)
    for kind in ("target", "draft"):
        assert 0.03 < seen[kind]["median"] < 0.2
        assert seen[kind]["median"] <= seen[kind]["largest"] < 0.4
    assert unseen["target"]["median"] != seen["target"]["median"]


def test_speed_ups_follow_from_the_steps() -> None:
    work: Work = step_work(SMALL, Precision(), 4, 1, 8)
    steps = {("target", 4, 1): 10.0, ("target", 4, 3): 14.0, ("draft", 4, 1): 2.0}
    points = predict(TRUE, {at: (work, seconds) for at, seconds in steps.items()})
    assert [(point.kind, point.rows, point.column) for point in points[3:]] == [("speed-up", 4, 2)]
    # a plain step against 2 draft steps and a verification, per expected token: 10 / (4 + 14);
    # by the same work for all three, 1 / 3
    assert points[3].measured == pytest.approx(10 / 18)
    assert points[3].predicted == pytest.approx(1 / 3)
    assert points[3].error == pytest.approx(-0.4)


GOOD = {
    "context": 8,
    "precision": {"weight": 2, "kv": 4, "activation": 2},
    "target": {"1,1": 0.5, "2,3": 1},
    "draft": {"1,1": 0.25},
}


def test_a_table_is_read(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({**GOOD, "threads": 2}))
    table = read_steps(file)
    assert table.target == {(1, 1): 0.5, (2, 3): 1.0}
    assert table.draft == {(1, 1): 0.25}
    assert (table.context, table.precision) == (8, Precision(2.0, 4.0, 2.0))


@pytest.mark.parametrize(
    "change",
    [
        {"context": None}, {"precision": {"weights": 2}}, {"target": {}}, {"target": [1]},
        {"target": {"1": 0.5}}, {"target": {"1,0": 0.5}}, {"draft": {"1,1": -1.0}},
        {"draft": {"1,1": "fast"}},
    ],
)  # fmt: skip
def test_an_invalid_table_is_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "steps.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ConfigError, match=r"steps\.json: not a step table") as caught:
        read_steps(file)
    assert "\n" not in str(caught.value)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="not a step table"):
        read_steps(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_steps(tmp_path / "none.json")


def test_the_benchmark_writes_a_table_of_the_small_models(tmp_path: Path) -> None:
    found = step_bench.measure(
        Namespace(
            target=TARGET, draft=DRAFT, dtype="float32",
            device="cpu", rows=2, experts=2, k=2, context=16, repeats=1,
        )
    )  # fmt: skip
    file = tmp_path / "steps.json"
    file.write_text(json.dumps(found))
    table = read_steps(file)
    assert set(table.target) == {(b, t) for b in (1, 2) for t in (1, 2, 3)}
    assert set(table.draft) == {(b, e) for b in (1, 2) for e in (1, 2)}
    assert table.precision == Precision(4.0, 4.0, 4.0)
    assert table.target[1, 1] > table.draft[1, 1] > 0.0
