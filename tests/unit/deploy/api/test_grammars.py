"""Grammars that explode end within the limits, and others are compiled behind them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from paceline.actors.engine.grammar import GrammarCompiler, GrammarError, tokenizer_json
from paceline.deploy.api.grammar_worker import make_grammar, try_grammar
from paceline.deploy.api.grammars import MAX_SOURCE_CHARS, Grammars, GrammarSource, grammar_source
from paceline.deploy.api.request_schemas import ChatCompletionRequest
from paceline.deploy.errors import ApiError

# Computing time, a new worker, and a machine that is busy with other tests.
LIMIT_S = 30.0


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        properties = {"a": schema}
        schema = {"type": "object", "properties": properties, "required": ["a"]}
    return schema


def doubling(levels: int) -> Any:
    """Every definition names the next one twice: 2 ** levels leaves."""
    one = {"type": "object", "required": ["a", "b"], "additionalProperties": False}
    definitions: dict[str, Any] = {
        f"d{i}": one | {"properties": {key: {"$ref": f"#/$defs/d{i + 1}"} for key in "ab"}}
        for i in range(levels)
    }
    definitions[f"d{levels}"] = {"type": "null"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def lists(definition: str) -> dict[str, Any]:
    items = {"$ref": f"#/$defs/{definition}"}
    return {"anyOf": [{"type": "null"}, {"type": "array", "items": items}]}


def objects(count: int) -> list[Any]:
    """``count`` objects of optional properties, for combinations."""
    return [
        {"properties": {f"p{i}{j}": {"enum": [i, j, f"{i}{j}"]} for j in range(count)}}
        for i in range(count)
    ]


def intersection(count: int) -> str:
    """Lark whose lexer multiplies the states of all of its parts."""
    parts = [f"/(.*[a-z]){{{i}}}[0-9]*{i}.*/" for i in range(count)]
    return "start: A\nA: " + " & ".join(parts)


BAD: dict[str, tuple[str, Any]] = {
    "repetitions of repetitions": ("regex", "((((a{0,99}){0,99}){0,99}){0,99}){0,99}b"),
    "a product of states": ("grammar", intersection(60)),
    "patterns without a word in common": (
        "json",
        {
            "allOf": [
                {"type": "string", "pattern": f"^(a|b|c)*{c}(a|b|c){{{n}}}$"}
                for c, n in zip("abcab", (12, 14, 16, 18, 20), strict=True)
            ]
        },
    ),
    "unknown reference": ("json", {"$ref": "#/$defs/nothing"}),
    "references to each other alone": (
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    "no instance": ("json", {"type": "integer", "minimum": 3, "maximum": 2}),
    "deep": ("json", nested(90)),
    "all of many": ("json", {"allOf": [{"anyOf": objects(9)} for _ in range(9)]}),
    "a pattern within limits": (
        "json",
        {"type": "string", "pattern": "^(a|b)*a(a|b){60}$", "minLength": 200, "maxLength": 9000},
    ),
    "many properties": (
        "json",
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2_000)}},
    ),
    "many choices": ("choice", [f"{i:05}" for i in range(9_000)]),
    "recursion without end": ("grammar", "start: start start"),
    "unknown rule": ("grammar", "start: other"),
    "no grammar": ("grammar", "%"),
}
# They look as bad, and are not.
HARMLESS: dict[str, tuple[str, Any]] = {
    "alternatives under a star": ("regex", "(a|a)*(a|aa)*b"),
    "a state per subset": ("regex", "(a|b)*a(a|b){60}c"),
    "a hundred thousand times": ("regex", "(x[a-f]y?){1,100000}"),
    "twice each": ("json", doubling(10)),
    "references to each other": (
        "json",
        {"$ref": "#/$defs/a", "$defs": {"a": lists("b"), "b": lists("a")}},
    ),
    "long arrays of long arrays": (
        "json",
        {
            "type": "array",
            "minItems": 10**7,
            "items": {"type": "array", "minItems": 10**7, "items": {"type": "string"}},
        },
    ),
    "long strings": ("json", {"type": "string", "minLength": 10**8, "maxLength": 10**9}),
    "many values": ("json", {"enum": list(range(15_000))}),
}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    tokenizer = tiny_tokenizer()
    made = Grammars(lambda: tokenizer_json(tokenizer), len(tokenizer), [2])
    yield made
    made.close()


def compile_(grammars: Grammars, kind: str, source: Any) -> str:
    return asyncio.run(grammars.compile(GrammarSource(json.dumps([kind, source]), "field")))


@pytest.mark.parametrize("name", BAD)
def test_what_explodes_is_refused_within_the_limits(grammars: Grammars, name: str) -> None:
    compile_(grammars, "choice", ["x"])  # the worker is there
    began = time.monotonic()
    with pytest.raises(ApiError) as raised:
        compile_(grammars, *BAD[name])
    assert time.monotonic() - began < LIMIT_S
    assert raised.value.status == 400
    assert raised.value.param == "field"
    assert compile_(grammars, "choice", ["y", name])


def test_a_grammar_that_fails_leaves_nothing_behind() -> None:
    tokenizer = tiny_tokenizer()
    compiler = GrammarCompiler(lambda: tokenizer_json(tokenizer), len(tokenizer), [2])
    grammar = make_grammar(*BAD["recursion without end"])
    compiler.compile(grammar)  # it can be compiled, and allows no answer
    with pytest.raises(GrammarError):
        try_grammar(compiler, grammar)
    assert not compiler._matchers


def test_no_grammar_is_to_blame_for_a_worker_that_was_killed(grammars: Grammars) -> None:
    compile_(grammars, "choice", ["x"])
    assert grammars._worker is not None
    grammars._worker.kill()
    grammars._worker.wait()
    assert compile_(grammars, "choice", ["killed before this one"])


def test_no_grammar_is_to_blame_for_a_worker_that_is_killed_at_it(grammars: Grammars) -> None:
    compile_(grammars, "choice", ["x"])
    worker = grammars._worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, worker.kill)
    timer.start()
    with pytest.raises(ApiError) as raised:
        compile_(grammars, "choice", ["killed at this one"])
    timer.join()
    assert raised.value.status == 500
    assert compile_(grammars, "choice", ["killed at this one"])


@pytest.mark.parametrize("strict", [None, False, True])
def test_only_a_strict_schema_is_refused_for_keywords_that_are_not_known(
    grammars: Grammars, strict: bool | None
) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"tags": tags, "key": {"format": "password"}}}
    asked = {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema, "strict": strict},
        },
    }
    source = grammar_source(ChatCompletionRequest.model_validate(asked))
    assert source is not None
    if not strict:
        assert asyncio.run(grammars.compile(source))
        return
    with pytest.raises(ApiError, match="uniqueItems"):
        asyncio.run(grammars.compile(source))


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_large_but_harmless_is_compiled(grammars: Grammars, name: str) -> None:
    assert compile_(grammars, *HARMLESS[name])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json", {"enum": list(range(10**6))}),
        ("json", {"description": "x" * 10**7}),
        ("choice", ["x" * MAX_SOURCE_CHARS]),
        ("regex", "a" * MAX_SOURCE_CHARS),
    ],
)
def test_what_is_too_long_is_not_even_tried(kind: str, source: Any) -> None:
    message = {"role": "user", "content": "Hello"}
    asked = {"model": "m", "messages": [message], "structured_outputs": {kind: source}}
    with pytest.raises(ApiError, match="more than the 131072 characters") as raised:
        grammar_source(ChatCompletionRequest.model_validate(asked))
    assert raised.value.param == f"structured_outputs.{kind}"


def test_the_same_source_is_tried_once_and_others_do_not_wait_for_it(grammars: Grammars) -> None:
    """Eight requests at once with a source that takes all of its two seconds."""

    async def ask() -> tuple[list[Any], float, int]:
        bad = GrammarSource(json.dumps(["grammar", intersection(61)]), "field")
        known = GrammarSource(json.dumps(["choice", ["x"]]), "field")
        await grammars.compile(known)
        began, ticks = time.monotonic(), 0
        tasks = [asyncio.create_task(grammars.compile(bad)) for _ in range(8)]
        while not all(task.done() for task in tasks):
            await asyncio.wait_for(grammars.compile(known), 1.0)
            await asyncio.sleep(0.02)
            ticks += 1
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return results, time.monotonic() - began, ticks

    results, seconds, ticks = asyncio.run(ask())
    assert {type(result) for result in results} == {ApiError}
    assert seconds < LIMIT_S
    assert ticks > 5


def test_one_client_s_sources_do_not_keep_another_waiting(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes long; only whose turn it is matters here."""
    may_end, tried = threading.Event(), list[str]()

    def compile_slowly(line: str) -> dict[str, str]:
        tried.append(line)
        assert may_end.wait(10)
        return {"grammar": line}

    monkeypatch.setattr(grammars, "_compile", compile_slowly)

    async def asked() -> None:
        many = [grammars.compile(GrammarSource(f"many {n}", ""), "many") for n in range(8)]
        other = [grammars.compile(GrammarSource(f"other {n}", ""), "other") for n in range(2)]
        tasks = [asyncio.ensure_future(call) for call in (*many, *other)]
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(asked())
    assert len(tried) == 10
    assert tried[:4] == ["many 0", "other 0", "many 1", "other 1"]
