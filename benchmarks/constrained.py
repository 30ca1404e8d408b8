"""Decoding of answers that follow a JSON schema against free ones, with drafts and without.

    .venv/bin/python benchmarks/constrained.py --quick
    .venv/bin/python benchmarks/constrained.py --target smollm2

The same prompts, in turns. Tokens per round are output tokens per forward of the target; the forced
share is that of the tokens which the grammar alone decides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import harness
import torch
from decoding import Block, Cell, Served, make_blocks, run_cell, summary
from models import find_models, load_engine
from prompts import MAX_PROMPT_TOKENS, measured_prompts, source_of

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.grammar import GrammarCompiler, GrammarState, only_token
from paceline.deploy.api.grammar_worker import make_grammar
from paceline.deploy.demo.prompts import TOPICS

OFF, AUTO = "off", "auto"
FREE, SCHEMA = "free", "schema"
_TEXT = {"type": "string", "minLength": 10, "maxLength": 60}
_FIELDS = {
    "kind": {"enum": ["question", "instruction", "statement"]},
    "answer": _TEXT,
    "steps": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"text": _TEXT, "done": {"type": "boolean"}},
            "required": ["text", "done"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 2,
    },
    "confidence": {"type": "integer", "minimum": 0, "maximum": 100},
}
_OBJECT = {"type": "object", "properties": _FIELDS, "required": list(_FIELDS)}
GRAMMAR = make_grammar("json", _OBJECT | {"additionalProperties": False})


def variant(kind: str, drafts: str, engine: Engine) -> Served:
    """Free answers or those of the schema, with drafts or without."""
    grammar = GRAMMAR if kind == SCHEMA else ""
    k = 0 if drafts == OFF else None
    return Served(f"{kind} {drafts}", engine, k, lambda _: "general", grammar=grammar)


def forced_share(compiler: GrammarCompiler, answers: Sequence[Sequence[int]]) -> float:
    """Share of the tokens at which the grammar allows no other."""
    forced = 0
    for answer in answers:
        state = GrammarState(compiler, GRAMMAR)
        for token in answer:
            forced += only_token(state.mask(())) is not None
            state.append(token)
    return forced / sum(map(len, answers))


def measure(
    engines: dict[str, Engine], cell: Cell, blocks: Sequence[Block], max_tokens: int
) -> dict[str, Any]:
    """Figures of all variants in a cell."""
    variants = [variant(kind, name, engines[name]) for kind in (FREE, SCHEMA) for name in engines]
    outcome = run_cell(cell, variants, blocks, max_tokens)
    pairs = [(f"{SCHEMA} {name}", f"{FREE} {name}") for name in engines]
    pairs += [(f"{kind} {AUTO}", f"{kind} {OFF}") for kind in (FREE, SCHEMA)]
    figures = summary(cell, outcome, pairs, f"{FREE} {OFF}")
    for name, runs in outcome.runs.items():
        own = figures["variants"][name]
        rounds = sum(run.rounds for run in runs)
        own["tokens_per_round"] = sum(run.num_tokens for run in runs) / rounds
        if name.startswith(SCHEMA):
            answers = [answer for run in runs for answer in run.outputs]
            own["forced_share"] = forced_share(engines[OFF].grammars, answers)
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    names = ("quick", "target", "data", "threads", "out")
    parser = harness.arguments(__doc__, *names, threads=os.cpu_count() or 1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--blocks", type=int, default=4, help="per topic")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    quick = {"batches": [1], "blocks": 1, "temperatures": [0.0]}
    options = harness.parsed(parser, argv, **quick)
    torch.set_num_threads(options.threads)
    target, draft = find_models(options.target)
    engines, before = {}, harness.machine()
    for name, k in ((OFF, 0), (AUTO, None)):
        engines[name], tokenizer, _ = load_engine(
            {"general": str(draft)},
            threads=options.threads,
            k=k,
            target=target,
            max_num_seqs=max(options.batches),
            max_model_len=MAX_PROMPT_TOKENS + options.max_tokens + 16,
        )
    prompts = {topic: measured_prompts(options.data, topic, tokenizer) for topic in TOPICS}
    cells = [
        measure(
            engines,
            Cell(batch, temperature),
            make_blocks(prompts, max(batch, 4), options.blocks),
            options.max_tokens,
        )
        for batch in options.batches
        for temperature in options.temperatures
    ]
    settings = harness.written(options) | {"data": source_of(options.data)}
    figures = {"machine": before, "settings": settings, "cells": cells}
    harness.write(options.out / "constrained.json", figures)
    for cell in cells:
        title = str(Cell(cell["batch"], cell["temperature"]))
        keep = ("tokens_per_s", "tokens_per_round", "mean_acceptance_length", "forced_share")
        rows = [
            {"variant": name} | {key: own.get(key) for key in keep}
            for name, own in cell["variants"].items()
        ]
        harness.show(title, rows)
        ratios = cell["ratios"].items()
        harness.show(
            "Speed", [{"pair": pair, "ratio": harness.interval(own)} for pair, own in ratios]
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
