"""Drafts of every kind change no constrained answer, nor the free ones beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import DEVICE, TOKENIZER, engine_of, make_engine, request, run, served, tokens_of
from engines import twin_engine as twin
from grammars import json_grammar
from llguidance import LLMatcher
from online.heads import HeadsConfig, HeadStack
from pools import VOCAB, attached, pool_engine, serving
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.grammar import GrammarState
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.eagle import EagleRunner, EagleStack, kept_hidden
from paceline.actors.weights.eagle import load_draft, new_draft, save_draft

ROWS = 6
GRAMMARS = {
    "words": LLMatcher.grammar_from_regex("(e|o|en|on){1,6}"),
    "forced": LLMatcher.grammar_from_regex("The number is [0-9]{2}, (not|and) [a-c]{3}"),
    "person": json_grammar(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["Ann", "Zoë"]},
                "ages": {"type": "array", "items": {"enum": [1, 2.5]}, "maxItems": 3},
            },
            "required": ["name", "ages"],
            "additionalProperties": False,
        }
    ),
    "free": "",
}


def padded(draft: int) -> Engine:
    drafts = {"a": served(tiny_llama(2, layers=1, vocab=draft))}
    return engine_of(served(tiny_llama(1)), [drafts], max_num_seqs=ROWS)


def medusa() -> Engine:
    config = HeadsConfig(3, 32, VOCAB)
    generator = torch.Generator().manual_seed(3)
    shapes = config.shapes().items()
    state = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes}
    target = served(tiny_llama(1))
    output = target.get_output_embeddings().weight

    def beside(runner: ModelRunner) -> list[HeadStack]:
        return [HeadStack("a", config, state, output, runner.kv)]

    return engine_of(target, [], beside=beside, max_num_seqs=ROWS)


def eagle(folder: Path, vocabulary: torch.Tensor | None) -> Engine:
    tiny_llama(1).save_pretrained(folder / "target")
    TOKENIZER.save_pretrained(folder / "target")
    save_draft(new_draft(folder / "target", vocabulary=vocabulary), folder / "draft")

    def beside(runner: ModelRunner) -> list[EagleStack]:
        own = load_draft(folder / "draft", folder / "target", torch.float32, DEVICE)
        models = [own.eval().requires_grad_(False)]
        eagles = EagleRunner(models, ROWS, runner.max_model_len, None, vocab_size=VOCAB)
        return [EagleStack(eagles, ["a"], ROWS, kept_hidden(runner.kv), 8)]

    target = load_causal_lm(folder / "target", torch.float32, DEVICE)
    return engine_of(target, [], beside=beside, max_num_seqs=ROWS, record_hidden=True)


@contextmanager
def pool(**options: Any) -> Iterator[Engine]:
    with serving(("a",), **options) as servers:
        proposer = attached(servers)
        yield pool_engine(proposer)
        assert proposer.stats()["a"]["lost"] == 0


KINDS: dict[str, Callable[[Path], AbstractContextManager[Engine]]] = {
    "model": lambda _: nullcontext(make_engine(max_num_seqs=ROWS)),
    "twin": lambda _: nullcontext(twin(max_num_seqs=ROWS)),
    "smaller vocabulary": lambda _: nullcontext(padded(VOCAB - 40)),
    "larger vocabulary": lambda _: nullcontext(padded(VOCAB + 20)),
    "medusa": lambda _: nullcontext(medusa()),
    "eagle": lambda folder: nullcontext(eagle(folder, None)),
    "eagle of few tokens": lambda folder: nullcontext(eagle(folder, torch.arange(3, 250, 2))),
    "pool": lambda _: pool(),
    "pool ahead": lambda _: pool(draft_ahead="on"),
    "pool of a larger vocabulary": lambda _: pool(vocab=VOCAB + 20),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_every_kind_change_no_constrained_answer(kind: str, tmp_path: Path) -> None:
    samplings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.2, "seed": 4},
        {"temperature": 0.8, "seed": 5, "top_p": 0.9},
        {"presence_penalty": 1.0, "logit_bias": ((9, 2.0),), "min_tokens": 3},
    ]
    asked = [
        (f"{name} {i}", {"grammar": grammar, "max_tokens": 30, **sampling})
        for i, sampling in enumerate(samplings)
        for name, grammar in GRAMMARS.items()
    ]
    with KINDS[kind](tmp_path) as engine:
        answers = []
        for more in ({"draft": "off"}, {"num_speculative_tokens": 4}):
            found = run(engine, [request(n, [5, len(n)], **own, **more) for n, own in asked])
            answers.append({name: tokens_of(outputs) for name, outputs in found.items()})
            assert all(o[-1].record is not None for o in found.values())
        assert answers[0] == answers[1]
        drafted = [o[-1].chunk.speculative for n, o in found.items() if n.startswith("free")]
        assert sum(s.num_draft_tokens for s in drafted if s is not None) > 0
        for name, own in asked:
            if own["grammar"] and found[name][-1].chunk.finish_reason == "stop":
                state = GrammarState(engine.grammars, own["grammar"])
                for token in answers[0][name]:
                    state.append(token)
        # Unseeded answers are others, within the grammar.
        sampled = [request(n, [5], temperature=1.0, grammar=g) for n, g in GRAMMARS.items() if g]
        for name, outputs in run(engine, sampled).items():
            assert outputs[-1].chunk.finish_reason in {"stop", "length"}
            state = GrammarState(engine.grammars, GRAMMARS[name])
            for token in tokens_of(outputs):
                state.append(token)
