"""Every unit of the benchmark of learning, over the small models and very few prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Store
from online import units
from online.__main__ import collect, draw, report
from online.bench import Bench, Sizes
from online.learner import NEVER, Learning, Synthetic
from online.serving import Serving
from online.units import EXPERTS, ONE, ORDER, SAME, Offline

LEARNING = Learning(requests_per_round=8, micro_steps=3, held_out_fraction=0.4)
OFFLINE = Offline(learning_rates=(3e-3,), look_every=6, patience=1, held_out_fraction=0.3)
SYNTHETIC = Synthetic(
    per_record=2.0,
    micro_steps=4,
    held_out_fraction=0.3,
    rate_hold_steps=2,
    average_decay=0.9,
    min_gain=0.002,
    at_once=4,
    dtype="float32",
)
SIZES = Sizes(stream=16, test=4, phase=4, ceiling=20, window=4, checkpoints=(0, 8))


@pytest.mark.full
@pytest.mark.usefixtures("deepspeed")
def test_units_resume_and_become_figures_and_pictures(tmp_path: Path) -> None:
    def bench() -> Bench:
        return Bench(Store(tmp_path / "online"), None, SIZES, Serving(max_tokens=10))

    first = bench()
    stream = units.stream(first, "sql", LEARNING)
    assert stream is not None
    # seconds of both twins are of a pass of their own, none of answers that lie on disk
    assert not list((tmp_path / "online" / "answers").glob("*-train-*"))
    assert [r[3] for r in stream["frozen"]] == [r[3] for r in stream["online"]]  # the same texts
    ceiling = units.ceiling(first, "sql", OFFLINE)
    same = units.ceiling(first, "sql", OFFLINE, SAME)
    assert ceiling is not None
    assert same is not None
    assert same["records"] == SIZES.stream
    for system in (ONE, EXPERTS):
        units.shift(first, "abrupt", system, LEARNING)
        units.shift(first, "abrupt", system, replace(LEARNING, seed=1), rehearsed=True)
    rests = {u["settings"]["learning"]["max_rejections"] for u in first.store.every("shift-")}
    assert rests == {NEVER}
    units.rehearsal(first, "sql", replace(LEARNING, seed=1))
    imagined = units.synthetic(first, "sql", LEARNING, SYNTHETIC)
    assert imagined is not None
    assert 0 < imagined["imagined"]["made"] <= SYNTHETIC.per_record * SIZES.stream
    assert set(imagined["checkpoints"]) == {"0", "8", "16"}
    assert set(stream["checkpoints"]) == {"0", "8", "16"}
    assert 0 < stream["learning"]["micro_steps"] <= 2 * LEARNING.micro_steps
    assert len(stream["online"]) == len(stream["frozen"]) == 16
    assert ceiling["records"] == 20

    again = bench()
    again.engine = None  # type: ignore[assignment]  # nothing is served again
    assert units.stream(again, "sql", LEARNING) == stream
    assert units.ceiling(again, "sql", OFFLINE) == ceiling
    assert units.ceiling(again, "sql", OFFLINE, SAME) == same
    assert units.synthetic(again, "sql", LEARNING, SYNTHETIC) == imagined
    figures = collect(again, LEARNING, OFFLINE, [SYNTHETIC])
    assert figures["topics"]["sql"]["requests"] == 16
    assert len(figures["topics"]["sql"]["seeds"]) == 2
    assert set(figures["shifts"]) == {f"abrupt, {ONE}", f"abrupt, {EXPERTS}"}
    for facts in figures["shifts"].values():
        (rehearsed,) = facts["seeds"]
        assert set(facts["matrix"]["code"]) == set(rehearsed["matrix"]["code"]) == set(ORDER)
    json.dumps(figures, allow_nan=False)
    report(figures)
    draw(figures, tmp_path)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "online.png",
        "imagined.png",
        "shift.png",
    }
