"""Every unit of the benchmark of learning, over the embedded models and very few prompts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from online.bench import Bench, Sizes
from online.ceiling import SAME, Offline, ceiling_unit
from online.imagined import imagined_unit
from online.learning import NEVER, Imagining, Learning
from online.results import collect, write
from online.serving import Serving
from online.shifts import EXPERTS, ONE, ORDER, shift_unit
from online.shifts import rehearsal_unit as shift_rehearsal_unit
from online.store import Store
from online.streams import rehearsal_unit, stream_unit

LEARNING = Learning(requests_per_round=8, micro_steps=3, held_out_fraction=0.4)
OFFLINE = Offline(learning_rates=(3e-3,), look_every=6, patience=1, held_out_fraction=0.3)
IMAGINING = Imagining(
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
def test_units_resume_and_their_figures_become_a_page(tmp_path: Path) -> None:
    def bench() -> Bench:
        return Bench(Store(tmp_path / "online"), None, SIZES, Serving(max_tokens=10))

    first = bench()
    stream = stream_unit(first, "sql", LEARNING)
    # seconds of both twins are of a pass of their own, none of answers that lie on disk
    assert not list((tmp_path / "online" / "answers").glob("*-train-*"))
    assert [r[3] for r in stream["frozen"]] == [r[3] for r in stream["online"]]  # the same texts
    ceiling = ceiling_unit(first, "sql", OFFLINE)
    same = ceiling_unit(first, "sql", OFFLINE, SAME)
    assert same["records"] == SIZES.stream
    for system in (ONE, EXPERTS):
        shift_unit(first, "abrupt", system, LEARNING)
        shift_rehearsal_unit(first, "abrupt", system, replace(LEARNING, seed=1))
    rests = {u["settings"]["learning"]["max_rejections"] for u in first.store.every("shift-")}
    assert rests == {NEVER}
    rehearsal_unit(first, "sql", replace(LEARNING, seed=1))
    imagined = imagined_unit(first, "sql", LEARNING, IMAGINING)
    assert 0 < imagined["imagined"]["made"] <= IMAGINING.per_record * SIZES.stream
    assert set(imagined["checkpoints"]) == {"0", "8", "16"}
    assert set(stream["checkpoints"]) == {"0", "8", "16"}
    assert 0 < stream["learning"]["micro_steps"] <= 2 * LEARNING.micro_steps
    assert len(stream["online"]) == len(stream["frozen"]) == 16
    assert ceiling["records"] == 20

    again = bench()
    again.engine = None  # type: ignore[assignment]  # nothing is served again
    assert stream_unit(again, "sql", LEARNING) == stream
    assert ceiling_unit(again, "sql", OFFLINE) == ceiling
    assert ceiling_unit(again, "sql", OFFLINE, SAME) == same
    assert imagined_unit(again, "sql", LEARNING, IMAGINING) == imagined
    figures = collect(again, LEARNING, OFFLINE, [IMAGINING], "make bench-online")
    assert figures["topics"]["sql"]["requests"] == 16
    assert len(figures["topics"]["sql"]["seeds"]) == 2
    assert set(figures["shifts"]["abrupt"]) == {ONE, EXPERTS}
    for facts in figures["shifts"]["abrupt"].values():
        served, rehearsed = facts["seeds"]
        assert served["at_the_end"].keys() == rehearsed["at_the_end"].keys() == set(ORDER)
    json.dumps(figures, allow_nan=False)
    docs = tmp_path / "docs" / "results.md"
    written = write(figures, tmp_path, docs)
    assert docs in written
    assert all(path.stat().st_size > 0 for path in written)
    page = docs.read_text(encoding="utf-8")
    published = tmp_path / "published"
    published.mkdir()
    (tmp_path / "online" / "grid.md").write_text("## The grid\n", encoding="utf-8")
    write(figures, tmp_path, docs, published)
    write(figures, tmp_path / "elsewhere", docs, published)  # the section comes from there
    assert "## The grid" in docs.read_text(encoding="utf-8")
    (tmp_path / "online" / "grid.png").write_bytes(b"a picture")
    assert docs.with_name("grid.png") in write(figures, tmp_path, docs, published)
    assert "![grid](grid.png)" in docs.read_text(encoding="utf-8")
    quick = "## A short run\n\nCommand: `make bench-grid --quick`\n"
    (tmp_path / "online" / "grid.md").write_text(quick, encoding="utf-8")
    (tmp_path / "online" / "grid.png").write_bytes(b"another")
    write(figures, tmp_path, docs, published)  # what is published stays
    assert "## The grid" in docs.read_text(encoding="utf-8")
    assert docs.with_name("grid.png").read_bytes() == b"a picture"
    assert "## When the topic shifts" in page
    assert "| system | micro-steps |" in page
    assert "| system | mean over tests at the end | tests at the end |" in page
    assert "| sql | 2 | 4 | 64 |" in page
    assert "](imagined.png)" in page
    assert "None" not in page
