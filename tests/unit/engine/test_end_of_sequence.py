"""End-of-sequence tokens, by all that a model folder declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make
from engines import TOKENIZER, request, run, tokens_of

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.settings import TargetSettings

PROMPT = [1, 5, 9, 33, 77, 120]
COUNT = 40


def answer(model: Any, eos: list[int] | None = None) -> list[int]:
    ids = torch.tensor([PROMPT])
    model.generation_config.eos_token_id = eos
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=COUNT,
    )
    return [int(token) for token in whole[0, len(PROMPT) :]]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json", "nowhere", "empty list"])
def test_every_declared_end_of_sequence_token_ends_an_answer(tmp_path: Path, file: str) -> None:
    """A list of them, in either file; ``config.json`` counts if there is no generation config."""
    model = make(ARCHITECTURES["llama"](2), 1)
    whole = answer(model)
    late = sorted({token: whole.index(token) for token in whole}.items(), key=lambda pair: pair[1])
    stops = [late[-1][0], late[-2][0]]  # first seen as late as can be
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    if file != "generation_config.json":
        (tmp_path / "generation_config.json").unlink()
    if file in ("generation_config.json", "config.json"):
        content = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps(content | {"eos_token_id": stops}))
    if file == "empty list":
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": []}')
    settings = TargetSettings(
        model_path=str(tmp_path),
        drafts={},
        device="cpu",
        dtype="float32",
        max_num_seqs=1,
        max_model_len=96,
        prefill_chunk=16,
        seed=0,
        num_threads=1,
    )
    engine, _, _ = build_engine(settings)
    found = tokens_of(run(engine, [request("a", PROMPT, max_tokens=COUNT)])["a"])
    expected = answer(model, stops) if file.endswith(".json") else whole
    assert found == expected
    assert (len(found) < COUNT) == file.endswith(".json")
