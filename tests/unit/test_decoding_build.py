"""Engines built from model folders and settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import request, run, tokens_of
from tiny_models import save_tiny

from paceline.actors.decoding.build import build_engine
from paceline.actors.decoding.settings import TargetSettings


@pytest.mark.parametrize("max_model_len", [4, 8, 12, None])
def test_a_short_context_is_served_with_k_left_to_the_engine(
    tmp_path: Path, max_model_len: int | None
) -> None:
    target, draft = save_tiny(tmp_path / "t", 1), save_tiny(tmp_path / "d", 2, layers=1)
    settings = TargetSettings(
        str(target),
        {"general": str(draft), "sql": str(draft)},
        dtype="float32",
        num_threads=1,
        max_num_seqs=3,
        max_model_len=max_model_len,
        max_speculative_tokens=32,
    )
    engine, _, facts = build_engine(settings)
    assert facts["max_model_len"] == (max_model_len or 128)
    asked = [
        request(f"r{i}", [5, 6], draft=draft, max_tokens=99, ignore_eos=True)
        for i, draft in enumerate(("sql", "general", "sql@0", "general@0", "off"))
    ]
    answers = [tokens_of(o) for o in run(engine, asked).values()]
    assert {len(a) for a in answers} == {(max_model_len or 101) - 2}
    assert all(a == answers[0] for a in answers)
