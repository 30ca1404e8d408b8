"""Decoding with and without CUDA graphs of short forwards; on CPUs both are the same engine.

    .venv/bin/python benchmarks/graphs.py

Greedy tokens per second of the small target with the drafts of ``make experts``, four topics
mixed; every line is the best of its passes, the first of which is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from decoding import drive, load_engine
from expert_cache import DRAFT, experts_dir
from harness import arguments, machine, show, write
from prompts import chat_ids

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.deploy.demo.prompts import TOPICS, generate

MAX_TOKENS = 64


def rate(engine: Engine, tokenizer: Any, per_topic: int, batch: int) -> float:
    """Tokens per second of requests of all topics in turn, ``batch`` of them at once."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    requests = [
        GenerationRequest(
            f"{topic}-{i}", chat_ids(tokenizer, text), sampling, topic=topic, draft=topic
        )
        for i, texts in enumerate(zip(*(generate(t, per_topic, 5) for t in TOPICS), strict=True))
        for topic, text in zip(TOPICS, texts, strict=True)
    ]
    began = time.perf_counter()
    tokens = sum(len(output.chunk.token_ids) for output in drive(engine, requests, batch))
    return tokens / (time.perf_counter() - began)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every k and batch, with graphs and without."""
    folder = experts_dir(options.out, None)
    drafts = {t: str(folder / t if (folder / t).is_dir() else DRAFT) for t in TOPICS}
    rows = []
    for graphs in (False, True):
        for k in (0, 2, 4, None):
            engine, tokenizer, facts = load_engine(
                drafts,
                threads=options.threads,
                k=k,
                dtype=options.dtype,
                cuda_graphs=graphs,
            )
            for batch in options.batches:
                passes = [
                    rate(engine, tokenizer, options.prompts, batch)
                    for _ in range(options.passes + 1)
                ]
                row = {"graphs": graphs, "k": "auto" if k is None else k, "batch": batch}
                row |= {"tokens_per_s": max(passes[1:])}
                rows.append(row | {name: facts[name] for name in ("device", "dtype")})
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write ``graphs.json``."""
    parser = arguments(__doc__, "dtype", "threads", "out")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, default=8, help="of a topic")
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args(argv)
    facts, rows = machine(), measure(options)
    write(options.out / "graphs.json", {"machine": facts, "lines": rows})
    show("CUDA graphs", rows)


if __name__ == "__main__":
    main()
