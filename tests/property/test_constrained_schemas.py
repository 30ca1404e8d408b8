"""Every answer to a JSON schema is an instance of it, whatever is drafted."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from engines import run, tokens_of
from fixture_models import DRAFT, TARGET
from grammars import SCHEMAS, json_grammar
from hypothesis import HealthCheck, assume, given, settings
from jsonschema import Draft202012Validator as Validator
from jsonschema import FormatChecker

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.grammar import GrammarError, GrammarState, allowed_tokens
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings

FORMATS = FormatChecker(())
FORMATS.checkers = dict(Validator.FORMAT_CHECKER.checkers)  # of this draft of JSON Schema


@FORMATS.checks("date")
def is_date(value: object) -> bool:
    """Whether it is a date of RFC 3339, which has a year 0000 where Python has none."""
    if isinstance(value, str) and value.startswith("0000-"):
        value = "2000-" + value[5:]
    return Validator.FORMAT_CHECKER.conforms(value, "date")


MAX_TOKENS = 72
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.2, "seed": 3},
    "sampled": {"temperature": 1.0, "top_p": 0.95},
}


@cache
def engine_and_tokenizer() -> tuple[Engine, Any]:
    settings = TargetSettings(
        str(TARGET),
        {"general": str(DRAFT)},
        dtype="float32",
        num_threads=1,
        max_num_seqs=6,
        max_model_len=128,
    )
    return build_engine(settings)[:2]


def requests(grammar: str, prompt: list[int]) -> list[GenerationRequest]:
    """Every sampling with drafts and without."""
    return [
        GenerationRequest(
            f"{name} {k}",
            tuple(prompt),
            SamplingParams(MAX_TOKENS, **sampling),
            num_speculative_tokens=k,
            store=False,
            grammar=grammar,
        )
        for name, sampling in SAMPLINGS.items()
        for k in (4, 0)
    ]


@pytest.mark.parametrize(
    "count", [12, pytest.param(500, marks=[pytest.mark.full, pytest.mark.timeout(1200)])]
)
def test_answers_are_instances_of_their_schemas(count: int) -> None:
    engine, tokenizer = engine_and_tokenizer()
    prompt = tokenizer.encode("List people with their age, as JSON: ")
    passed: dict[str, int] = {}

    @given(SCHEMAS)
    @settings(max_examples=2 * count, deadline=None, suppress_health_check=list(HealthCheck))
    def check(schema: Any) -> None:
        key = json.dumps(schema)
        if key in passed or len(passed) == count:
            return
        try:
            grammar = json_grammar(schema)
            GrammarState(engine.grammars, grammar)
        except GrammarError:
            assume(False)  # not every schema has instances
        validator = Validator(schema, format_checker=FORMATS)
        found = run(engine, requests(grammar, prompt))
        whole = 0
        for outputs in found.values():
            text = "".join(o.chunk.text for o in outputs)
            if outputs[-1].chunk.finish_reason == "stop":
                validator.validate(json.loads(text))
                whole += 1
                continue
            assert outputs[-1].chunk.finish_reason == "length"
            state = GrammarState(engine.grammars, grammar)
            for token in tokens_of(outputs):
                state.append(token)
            assert allowed_tokens(state.mask(()))
        for name in ("greedy", "seeded"):
            assert tokens_of(found[f"{name} 4"]) == tokens_of(found[f"{name} 0"])
        passed[key] = whole

    check()
    assert len(passed) == count
    assert sum(passed.values()) > 0.7 * len(passed) * len(requests("", prompt))
