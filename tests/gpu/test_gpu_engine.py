"""The whole engine over the small models on a GPU: text is the target's, however drafted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from engines import run, tokens_of
from fixture_models import DRAFT, TARGET

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.deploy.demo.prompts import TOPICS, generate

TOKENS, PER_TOPIC = 48, 4


def build(**own: Any) -> tuple[Engine, Any]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "num_threads": 1,
        "max_num_seqs": 8,
        "seed": 3,
        "num_speculative_tokens": 4,
    }
    drafts = dict.fromkeys(TOPICS, str(DRAFT))
    engine, tokenizer, facts = build_engine(TargetSettings(str(TARGET), drafts, **settings | own))
    assert facts.device == "cuda"
    return engine, tokenizer


def prompts(tokenizer: Any) -> list[tuple[str, tuple[int, ...]]]:
    asked = []
    for topic in TOPICS:
        for text in generate(topic, PER_TOPIC, 5):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            asked.append((topic, tuple(ids)))
    return asked


def answers(
    engine: Engine,
    tokenizer: Any,
    *,
    off: bool = False,
    seeded: bool = False,
    draft_failures: bool = False,
    rates: list[float] | None = None,
    **sampling: Any,
) -> list[list[int]]:
    """Of all prompts; ``rates`` gets the share of drafted tokens that was accepted."""
    params = {"max_tokens": TOKENS, "temperature": 0.0} | sampling
    asked = [
        GenerationRequest(
            f"{i}",
            ids,
            SamplingParams(**params, seed=i if seeded else None),
            topic=topic,
            draft="off" if off else topic,
        )
        for i, (topic, ids) in enumerate(prompts(tokenizer))
    ]
    outputs = run(engine, asked, draft_failures=draft_failures)
    if rates is not None:
        ends = [outputs[request.request_id][-1].chunk.speculative for request in asked]
        drafted = sum(end.num_draft_tokens for end in ends if end)
        rates.append(sum(end.num_accepted_draft_tokens for end in ends if end) / max(drafted, 1))
    return [tokens_of(outputs[request.request_id]) for request in asked]


def differing(one: list[list[int]], other: list[list[int]]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The target's own answers, one engine without drafts."""
    return answers(*build(num_speculative_tokens=0), off=True)


@pytest.mark.parametrize("k", [1, 4, None])
@pytest.mark.parametrize("graphs", [False, True])
def test_greedy_answers_are_the_targets(graphs: bool, k: int | None, plain: Any) -> None:
    engine, tokenizer = build(cuda_graphs=graphs, num_speculative_tokens=k)
    for _ in range(2):  # the second time what comes often is recorded
        assert answers(engine, tokenizer) == plain
    assert answers(engine, tokenizer, off=True) == plain


def test_a_forward_on_the_gpu_is_one_on_the_cpu() -> None:
    ids = torch.tensor([list(range(5, 85))])
    found, expected = (
        load_causal_lm(TARGET, torch.float32, device, attention="sdpa")(ids.to(device)).logits
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(found.cpu(), expected, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("graphs", [False, True])
def test_bfloat16_answers_follow_the_target_but_for_its_last_bits(graphs: bool) -> None:
    engine, tokenizer = build(dtype="bfloat16", cuda_graphs=graphs)
    off = answers(engine, tokenizer, off=True)
    assert differing(answers(engine, tokenizer), off) <= len(off) // 4


@pytest.mark.parametrize("graphs", [False, True])
def test_seeded_answers_do_not_depend_on_drafts(graphs: bool) -> None:
    engine, tokenizer = build(cuda_graphs=graphs)
    drawn = [
        answers(engine, tokenizer, off=off, seeded=True, temperature=0.8, top_p=0.9)
        for off in (False, True)
    ]
    assert drawn[0] == drawn[1]


def test_new_weights_are_drafted_with_and_change_no_answer(plain: Any) -> None:
    """A draft with broken weights has no token accepted; with its own again it has."""
    engine, tokenizer = build(cuda_graphs=True)
    own = load_causal_lm(DRAFT, torch.float32).state_dict()

    rates: list[float] = []

    def rate(state: Mapping[str, torch.Tensor] | None, version: int) -> float:
        for topic in TOPICS if state is not None else ():
            engine.updates.put(SwapWeights(topic, version, state or {}))
        assert answers(engine, tokenizer, rates=rates) == plain
        return rates[-1]

    generator = torch.Generator().manual_seed(0)
    noise = {k: torch.randn(v.shape, generator=generator) * 0.02 for k, v in own.items()}
    first = rate(None, 0)
    assert rate(noise, 1) < first / 2
    assert rate(own, 2) == pytest.approx(first, abs=0.02)


@pytest.mark.parametrize("graphs", [False, True])
def test_weights_without_numbers_change_no_answer(graphs: bool, plain: Any) -> None:
    engine, tokenizer = build(cuda_graphs=graphs)
    own = load_causal_lm(DRAFT, torch.float32).state_dict()
    broken = {k: torch.full_like(v, torch.nan) for k, v in own.items()}
    engine.updates.put(SwapWeights("sql", 1, broken))
    assert answers(engine, tokenizer, draft_failures=True) == plain
    assert engine.draft_failures > 0
