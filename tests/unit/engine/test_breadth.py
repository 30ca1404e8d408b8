"""Served architectures: each token for token what transformers generates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, LONGROPE, REFUSED, make
from engines import MAX_LEN, TOKENIZER, engine_of, request, run, served, tokens_of

from paceline.actors.engine.decoders import ModuleDecoder
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.request import GenerationRequest

LAYERS = 3
PROMPTS = [
    TOKENIZER.encode(text, add_special_tokens=False)
    for text in (
        "SELECT name, age FROM people",
        "Write",
        "a",
        "Ann has 12 apples. She buys 30 more.",
        "List all",
        "x y z",
    )
]
COUNTS = [30, 5, 24, 40, 1, 23]


def generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """transformers' own greedy answer."""
    model.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": count}
    ids = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    return [int(i) for i in ids[0, len(prompt) :]]


def answers_of(config: Any, seed: int = 1) -> list[list[int]]:
    model = make(config, seed)
    return [generate(model, p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]


@cache
def answers_of_architecture(name: str) -> list[list[int]]:
    return answers_of(ARCHITECTURES[name](LAYERS))


def requests(draft: str) -> list[GenerationRequest]:
    """Six of them, for four rows; the last without speculation."""
    return [
        request(f"{i}", prompt, max_tokens=n, ignore_eos=True, draft=draft if i < 5 else "off")
        for i, (prompt, n) in enumerate(zip(PROMPTS, COUNTS, strict=True))
    ]


# As others, with more of the same
SLOW = ("qwen3_moe", "gemma3n_text", "qwen2_moe", "gemma2", "gemma4_text", "mixtral", "phi3", "opt")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.full) if n in SLOW else n for n in ARCHITECTURES],
)
def test_greedy_equals_generate(name: str) -> None:
    """Ragged rows that join and leave; a hopeless draft, then the target's twin."""
    config = ARCHITECTURES[name]
    expected = answers_of_architecture(name)
    assert len({tuple(answer[:5]) for answer in expected}) == len(expected)
    assert len({token for answer in expected for token in answer}) >= 20
    drafts = [
        {"other": served(make(config(LAYERS - 1), 2))},
        {"twin": served(make(config(LAYERS), 1))},
    ]
    engine = engine_of(served(make(config(LAYERS), 1)), drafts)
    for draft in ("other", "twin"):
        early, late = requests(draft)[:3], requests(draft)[3:]
        outputs: dict[str, list[Any]] = {}
        for one in early:
            engine.add(one)
        for _ in range(6):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        for request_id, more in run(engine, late).items():
            outputs.setdefault(request_id, []).extend(more)
        assert [tokens_of(outputs[f"{i}"]) for i in range(len(PROMPTS))] == expected
        stats = outputs["3"][-1].chunk.speculative
        share = stats.num_accepted_draft_tokens / stats.num_draft_tokens
        assert share == 1 if draft == "twin" else share < 0.5


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_rounding_refuses_no_architecture(name: str) -> None:
    for seed in range(3):
        model = make(ARCHITECTURES[name](LAYERS), seed).to(torch.bfloat16)
        ModelRunner([served(model)], 2, MAX_LEN)


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 64}),
        ("gemma3_text", {"sliding_window": 64}),
        ("gemma3n_text", {"sliding_window": 64}),
        ("gemma4_text", {"sliding_window": 64}),
        ("gpt_oss", {"sliding_window": 64}),
    ],
)
def test_the_models_show_what_makes_them_special(name: str, without: dict[str, Any]) -> None:
    """The comparison above could not fail if these parts changed no token."""
    changed = ARCHITECTURES[name](LAYERS, **without)
    assert answers_of_architecture(name) != answers_of(changed)


def test_sinks_show_in_the_answers() -> None:
    model = make(ARCHITECTURES["gpt_oss"](LAYERS), 1)
    for layer in model.model.layers:
        layer.self_attn.sinks.fill_(-1e4)
    without = [generate(model, p, n) for p, n in zip(PROMPTS, COUNTS, strict=True)]
    assert without != answers_of_architecture("gpt_oss")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str) -> None:
    config, reason = REFUSED[name]
    model = served(make(config(), 1))
    assert model.config.model_type == name
    with pytest.raises(ValueError, match=f"models of type {name} cannot be served: .*({reason})"):
        ModelRunner([model], 2, MAX_LEN)


def test_a_rotary_embedding_that_the_batch_changes_is_refused_beyond_its_first_length() -> None:
    assert LONGROPE["original_max_position_embeddings"] == MAX_LEN
    config = ARCHITECTURES["phi3"](
        LAYERS, rope_parameters=LONGROPE, original_max_position_embeddings=MAX_LEN
    )
    ModelRunner([served(make(config, 1))], 2, MAX_LEN)
    with pytest.raises(ValueError, match=f"set target.max_model_len to at most {MAX_LEN}"):
        ModelRunner([served(make(config, 1))], 2, MAX_LEN + 1)


def test_a_window_that_the_model_keeps_to_itself_is_refused() -> None:
    """As if the mask alone knew of it: within the first tokens nothing would show."""
    model = served(make(ARCHITECTURES["qwen2"](LAYERS, sliding_window=50), 1))
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    with pytest.raises(ValueError, match="window of 50 tokens does not reach the attention"):
        ModelRunner([model], 2, MAX_LEN)
    ModelRunner([model], 2, 50)


def test_positions_that_a_model_makes_up_are_refused() -> None:
    model = served(make(ARCHITECTURES["gpt2"](LAYERS), 1))
    body = model.transformer.forward
    model.transformer.forward = lambda *a, **more: body(*a, **{**more, "position_ids": None})
    with pytest.raises(ValueError, match="gpt2 cannot be served: its logits in the engine are off"):
        ModelRunner([model], 2, MAX_LEN)


def test_the_documents_table_is_what_is_tested() -> None:
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    served_, refused_ = text.split("## Refused")
    rows = re.findall(r"^\| [^|]+ \| `(\w+)` \| ([^|]+) \| ([^|]+) \|", served_, re.MULTILINE)
    decoders = {FusedDecoder: "fused", ModuleDecoder: "by module"}
    ways = {}
    for name, config in ARCHITECTURES.items():
        model = make(config(LAYERS), 1)
        assert model.config.model_type == name
        ways[name] = decoders[type(ModelRunner([served(model)], 2, MAX_LEN).decoder)]
    assert {name: way.strip() for name, way, _ in rows} == ways
    assert {tested.strip() for _, _, tested in rows} == {"yes"}
    assert set(re.findall(r"^\| [^|]+ \| `(\w+)` \|", refused_, re.MULTILINE)) == set(REFUSED)
