"""Grammars for tests: schemas made by hypothesis, and a few of every other kind."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from llguidance import LLMatcher

from paceline.actors.engine.grammar import GrammarCompiler, tokenizer_json
from paceline.deploy.api.grammar_worker import make_grammar

_NAMES = st.sampled_from(["name", "age", "sql", "tags", "Käse", "id", "a b", 'q"t', "naïve", ""])
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.fixed_dictionaries({"const": st.sampled_from([0, "red", None, True, [1], {"a": 1.5}])}),
    st.builds(
        lambda values: {"enum": values},
        st.lists(
            st.sampled_from(["red", "green", 'a"b', 7, -1.5, None, "漢"]), min_size=1, max_size=4
        ),
    ),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(
        lambda least, more: {"type": "string", "minLength": least, "maxLength": least + more},
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "pattern": "^(ab|ba)*x$", "maxLength": 7},
            {"type": "string", "format": "date"},
            {"type": "string", "format": "uuid"},
            {"type": "string", "format": "time"},
            {"type": "string", "format": "ipv4"},
            {"type": "string", "format": "email", "maxLength": 20},
            {"type": "number", "minimum": -1.5, "exclusiveMaximum": 20},
            {"type": "integer", "exclusiveMinimum": -3, "maximum": 1000},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 70},
            {"type": ["boolean", "null"]},
        ]
    ),
)


def _objects(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def schema(properties: dict[str, Any], optional: set[str]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name not in optional],
            "additionalProperties": False,
        }

    return st.builds(schema, st.dictionaries(_NAMES, parts, max_size=4), st.sets(_NAMES))


def _arrays(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def schema(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(schema, parts, st.integers(0, 2), st.integers(0, 2))


def _unions(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda schemas: {"anyOf": schemas}, st.lists(parts, min_size=1, max_size=3))


def _defined(part: Any, most: int) -> dict[str, Any]:
    ref = {"$ref": "#/$defs/part"}
    pair = {"one": ref, "more": {"type": "array", "items": ref, "maxItems": most}}
    own = {"type": "object", "properties": pair, "required": ["one"]}
    return own | {"additionalProperties": False, "$defs": {"part": part}}


def _tree(value: Any) -> dict[str, Any]:
    """Values below each other: a schema that refers to itself."""
    below = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    own = {"type": "object", "properties": {"below": below, "value": value}}
    node = own | {"required": ["value"], "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


_PLAIN = st.recursive(
    _LEAVES, lambda parts: st.one_of(_objects(parts), _arrays(parts), _unions(parts)), max_leaves=6
)
# Schemas of which most instances are short: a random model comes to an end.
SCHEMAS = st.one_of(
    _PLAIN, st.builds(_defined, _PLAIN, st.integers(0, 2)), st.builds(_tree, _LEAVES)
)

OTHERS = st.sampled_from(
    [
        LLMatcher.grammar_from_regex(r"(yes|no|may ?be)+[0-9]{1,3}"),
        LLMatcher.grammar_from_regex(r"\d{3}-[^\s]{1,5}!"),
        'start: "red" | "green" | "rede"',
        'start: e\ne: t (("+" | "-") t)*\nt: NUMBER | "(" e ")"\nNUMBER: /[0-9]{1,2}/',
        'start: SELECT " " NAME (", " NAME)* " FROM " NAME\nSELECT: /select/i\nNAME: /[a-z]{1,6}/',
    ]
)


def json_grammar(schema: Any) -> str:
    return make_grammar("json", schema)


GRAMMARS = st.one_of(SCHEMAS.map(json_grammar), OTHERS)


def compiler_of(tokenizer: Any, eos: int = 2) -> GrammarCompiler:
    """A compiler for a transformers fast tokenizer."""
    return GrammarCompiler(lambda: tokenizer_json(tokenizer), len(tokenizer), [eos])
