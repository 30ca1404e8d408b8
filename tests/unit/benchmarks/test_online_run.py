"""Every unit of the studies of learning, over the small models and very few prompts."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import prompts
import pytest
from experts import Offline
from online import shifts, streams
from online.lab import Lab, Sizes, lab_arguments
from online.learner import Learning

SIZES = Sizes(stream=16, test=4, phase=4, ceiling=40, window=4, checkpoints=(0, 8), max_tokens=10)
LEARNING = Learning(requests_per_round=8, micro_steps=3)
OFFLINE = Offline(micro_batch=8, steps_per_look=3, patience=1, held_out_fraction=0.3, max_steps=9)


def lab(out: Path) -> Lab:
    keys = ["replay.held_out_fraction=0.4", "training.average_decay=0.9"]
    line = ["--target", "small", "--dtype", "float32", "--out", str(out), "--set", *keys]
    return Lab(lab_arguments("A lab.").parse_args(line), SIZES)


@pytest.mark.full
@pytest.mark.usefixtures("deepspeed")
def test_units_resume_and_become_figures_and_pictures(tmp_path: Path) -> None:
    seed = replace(LEARNING, seed=1)

    def units(own: Lab) -> list[Any]:
        return [
            streams.stream(own, "sql", LEARNING),
            streams.stream(own, "sql", seed),
            streams.ceiling(own, "sql", OFFLINE),
            *(
                shifts.shift(own, "abrupt", s, replace(LEARNING, rests=False))
                for s in shifts.SYSTEMS
            ),
        ]

    found = units(lab(tmp_path))
    stream, retrained, ceiling, *both = found
    assert set(stream["checkpoints"]) == set(retrained["checkpoints"]) == {"0", "8", "16"}
    assert [r[3] for r in stream["frozen"]] == [r[3] for r in stream["online"]]  # the same texts
    assert 0 < stream["learning"]["micro_steps"] <= 2 * LEARNING.micro_steps
    assert retrained["frozen"] == stream["frozen"]
    assert 0 < stream["learning"]["synthetic"]["made"] <= 4.0 * SIZES.stream
    assert ceiling["records"] == 40
    assert [len(unit["phases"]) for unit in both] == [4, 4]

    again = lab(tmp_path)
    again.engine = None  # type: ignore[assignment]  # nothing is served again
    assert units(again) == found

    figures = streams.topic_summary(stream, ceiling, [retrained], SIZES.window)
    assert figures["requests"] == 16
    json.dumps(figures, allow_nan=False)
    streams.report({"topics": {"sql": figures}})
    streams.draw({"sql": figures}, tmp_path)
    matrix = shifts.summary(both[0], {}, SIZES.window, abrupt=True)
    shifts.draw_shifts(tmp_path / "shifts.png", {"abrupt": matrix})
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"streams.png", "shifts.png"}


def test_the_parts_that_are_not_wanted_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_GENERATED", 400)
    own = lab(tmp_path)
    own.engine = None  # type: ignore[assignment]
    options = argparse.Namespace(parts=(), micro_steps=3, seeds=2, quick=True, topics=["sql"])
    assert streams.topic_figures(own, "sql", options) is None


def test_the_settings_of_a_run_name_its_topics_prompts_and_options(tmp_path: Path) -> None:
    found = lab(tmp_path).run_settings(["sql"])
    assert found["topics"] == ["sql"]
    assert found["prompts"] != lab(tmp_path).run_settings(["sql", "math"])["prompts"]
    assert found["options"]["set"] == ["replay.held_out_fraction=0.4", "training.average_decay=0.9"]
    assert found["sizes"]["stream"] == SIZES.stream
