"""What replaying short forwards from CUDA graphs brings on a GPU: the engine with and without.

    .venv/bin/python benchmarks/graphs.py

Greedy tokens per second of the embedded target with the drafts of ``make experts``, four topics
mixed, in this process; every line is the best of its passes, the first of which is not counted.
On a machine without a GPU both columns are the same engine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
from expert_cache import DRAFT, TARGET, experts_dir
from rich.console import Console

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy.demo.prompts import TOPICS, generate

MAX_TOKENS = 64


def questions(tokenizer: Any, per_topic: int) -> list[GenerationRequest]:
    """Requests of all topics in turn, which end at ``MAX_TOKENS``."""
    asked = []
    for number, texts in enumerate(zip(*(generate(t, per_topic, 5) for t in TOPICS), strict=True)):
        for topic, text in zip(TOPICS, texts, strict=True):
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
            name = f"{topic}-{number}"
            asked.append(GenerationRequest(name, tuple(ids), sampling, topic=topic, draft=topic))
    return asked


def rate(engine: Engine, asked: Sequence[GenerationRequest], batch: int) -> dict[str, float]:
    """Tokens per second and per round, ``batch`` requests at once."""
    waiting, tokens, rounds, began = list(asked), 0, 0, time.perf_counter()
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < batch:
            engine.add(waiting.pop(0))
        tokens += sum(len(output.chunk.token_ids) for output in engine.step())
        rounds += 1
    seconds = time.perf_counter() - began
    return {"tokens_per_s": tokens / seconds, "tokens_per_round": tokens / rounds}


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every k and batch, with graphs and without."""
    folder = experts_dir(options.out, None)
    drafts = {t: str(folder / t if (folder / t).is_dir() else DRAFT) for t in TOPICS}
    found = []
    for graphs in (False, True):
        for k in (0, 2, 4, None):
            settings = TargetSettings(
                str(TARGET),
                drafts,
                dtype=options.dtype,
                num_threads=options.threads,
                num_speculative_tokens=k,
                prefix_cache=False,
                cuda_graphs=graphs,
                warm_up=True,
                seed=1,
            )
            engine, tokenizer, facts = build_engine(settings)
            for batch in options.batches:
                asked = questions(tokenizer, options.prompts)
                passes = [rate(engine, asked, batch) for _ in range(options.passes + 1)][1:]
                best = max(passes, key=lambda one: one["tokens_per_s"])
                line = {"graphs": graphs, "k": "auto" if k is None else k, "batch": batch, **best}
                found.append(line | {"device": facts["device"], "dtype": facts["dtype"]})
                Console().print(found[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write ``graphs.json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--prompts", type=int, default=8, help="of a topic")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(argv)
    figures = {"machine": machine.facts(), "lines": measure(options)}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "graphs.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
