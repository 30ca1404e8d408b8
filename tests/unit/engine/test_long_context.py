"""Contexts beyond the config's length: equal to transformers, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, make
from engines import TOKENIZER, request, run, served, tokens_of

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.compatibility import ModelError, check_models, context_length
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy.api import prompt_encoder

OWN, WANTED = 32, 128
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": OWN,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {
    **YARN,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    **YARN,
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}


def config_of(name: str, rope: dict[str, Any], layers: int) -> Any:
    rope = dict(rope)
    if name == "gpt_neox":  # turns a quarter of a head, and two numbers are too few for NTK
        rope["partial_rotary_factor"] = 0.5
    return ARCHITECTURES[name](layers, max_position_embeddings=OWN, rope_parameters=rope)


def saved(folder: Path, name: str, rope: dict[str, Any], seed: int, layers: int = 2) -> str:
    """A model folder with a rotary embedding of ``OWN`` positions."""
    make(config_of(name, rope, layers), seed).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def settings_of(target: str, drafts: dict[str, str], **more: Any) -> TargetSettings:
    return TargetSettings(
        model_path=target,
        drafts=drafts,
        device="cpu",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=WANTED,
        num_speculative_tokens=4,
        prefill_chunk=16,
        seed=0,
        num_threads=1,
        **more,
    )


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """The greedy answer that transformers gives; of this prompt alone, whatever came before."""
    model.generation_config.eos_token_id = None
    model(torch.zeros(1, 1, dtype=torch.int64))  # a dynamic embedding forgets the last prompt
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=count,
    )
    return [int(token) for token in whole[0, len(prompt) :]]


def prompt_of(length: int) -> list[int]:
    return [1] + [(i * 37 + length) % 290 + 5 for i in range(length - 1)]


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(n, marks=pytest.mark.full) for n in ("gpt_neox", "qwen3"))]
)
@pytest.mark.parametrize("rope", [YARN, LINEAR, DYNAMIC], ids=["yarn", "linear", "dynamic"])
def test_rows_beyond_the_configs_length_equal_generate(
    tmp_path: Path, name: str, rope: dict[str, Any]
) -> None:
    """Short, crossing and long prompts in one batch, drafted by a twin, another model, or not."""
    target = saved(tmp_path / "t", name, rope, 1)
    drafts = {"twin": target, "other": saved(tmp_path / "d", name, rope, 2, layers=1)}
    check_models(target, drafts, WANTED)
    engine, _, facts = build_engine(settings_of(target, drafts))
    assert facts.max_model_len == WANTED == prompt_encoder.context_length(target, WANTED)
    model = make(config_of(name, rope, 2), 1)
    asked = {5: 20, 20: 40, 70: 30, WANTED - 20: 20}
    expected = {n: generated(model, prompt_of(n), count) for n, count in asked.items()}
    for draft in ("off", "twin", "other"):
        outputs = run(
            engine,
            [
                request(f"{draft}{n}", prompt_of(n), max_tokens=count, ignore_eos=True, draft=draft)
                for n, count in asked.items()
            ],
        )
        assert {n: tokens_of(outputs[f"{draft}{n}"]) for n in asked} == expected
        rounds = [one for steps in outputs.values() for step in steps for one in step.chunk.rounds]
        if draft == "twin":  # it computes what the target does, so nothing is rejected
            assert rounds
            assert all(drafted == accepted for drafted, accepted in rounds)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_prompts_with_a_common_prefix_and_other_lengths_equal_generate(
    tmp_path: Path, name: str, prefix_cache: bool
) -> None:
    """A dynamic embedding's keys depend on how long the prompt is: long ones share no blocks."""
    target = saved(tmp_path / "t", name, DYNAMIC, 1)
    whole, model = prompt_of(110), make(config_of(name, DYNAMIC, 2), 1)
    engine, _, _ = build_engine(settings_of(target, {}, prefix_cache=prefix_cache))
    reused = {}
    for length in (100, 20, 110, 30, 60, 32, 33, 100):
        outputs = run(engine, [request("a", whole[:length], max_tokens=15, ignore_eos=True)])
        assert tokens_of(outputs["a"]) == generated(model, whole[:length], 15), length
        reused[length] = sum(step.chunk.num_cached_tokens for step in outputs["a"])
    assert (reused[32] > 0) == prefix_cache  # short ones share, and no angle differs
    assert not any(reused[n] for n in (33, 60, 100, 110))
    together = [request(str(n), whole[:n], max_tokens=15, ignore_eos=True) for n in (100, 30, 40)]
    outputs = run(engine, together)
    for n in (100, 30, 40):
        assert tokens_of(outputs[str(n)]) == generated(model, whole[:n], 15), n


def test_yarn_is_run_fused() -> None:
    config = ARCHITECTURES["llama"](2, max_position_embeddings=OWN, rope_parameters=dict(YARN))
    assert isinstance(ModelRunner([served(make(config, 1))], 2, WANTED).decoder, FusedDecoder)


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": OWN},
        {"max_position_embeddings": OWN, "rope_parameters": {"rope_type": "default"}},
        {"max_position_embeddings": OWN, "rope_parameters": LLAMA3},
        {"max_position_embeddings": OWN, "rope_parameters": LONGROPE},
        {
            "max_position_embeddings": OWN,
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": LINEAR},
        },
        {"n_positions": OWN, "model_type": "gpt2"},
    ],
)
def test_a_length_that_the_positions_do_not_reach_is_refused(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    folder = saved(tmp_path, "llama", LINEAR, 1, layers=1)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, **config}))
    said = rf"target.max_model_len: {OWN + 1} .* {OWN} tokens"
    with pytest.raises(ModelError, match=said):
        check_models(folder, {}, OWN + 1)
    with pytest.raises(ModelError, match=said):
        prompt_encoder.context_length(folder, OWN + 1)
    for wanted in (None, OWN - 1, OWN):
        check_models(folder, {}, wanted)
        assert context_length(config, wanted) == (wanted or OWN)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": YARN},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_parameters": DYNAMIC},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default"},
            }
        },
    ],
)
def test_old_and_new_names_of_a_longer_rope_are_known(rope: dict[str, Any]) -> None:
    assert context_length({"max_position_embeddings": OWN, **rope}, WANTED) == WANTED


def test_a_draft_extends_as_far_as_its_positions(tmp_path: Path) -> None:
    target = saved(tmp_path / "t", "llama", YARN, 1, layers=1)
    plain = saved(tmp_path / "d", "llama", {"rope_type": "default", "rope_theta": 1e4}, 2, 1)
    check_models(target, {"own": target, "plain": plain}, OWN)
    check_models(target, {"own": target}, WANTED)
    with pytest.raises(ModelError, match=f"set target.max_model_len to {OWN} or less"):
        check_models(target, {"plain": plain}, WANTED)
