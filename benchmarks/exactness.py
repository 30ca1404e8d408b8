"""Count greedy answers that speculation or batching changes, per dtype.

    .venv/bin/python benchmarks/exactness.py --target smollm2 --prompts 200 --max-tokens 96

The same prompts run with speculation off, on, and as the engine chooses, for which suffix drafts
know all the answers by then; one at a time and eight at once; with drafts that are swapped for
others all the time, and resumed in the middle as after the death of a replica. The tokens are
compared with those of plain decoding eight at once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decoding import Served, answers
from harness import arguments, differing, machine, say, write, written
from models import find_models, load_engine
from prompts import Prompt, chat_ids

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.flat_weights import load_model, unflatten
from paceline.deploy.demo.prompts import TOPICS, generate

_NOISE = 0.02  # standard deviation
Answers = dict[str, list[int]]


def swapped(engine: Engine, draft: Path, prompts: Sequence[Prompt], max_tokens: int) -> Answers:
    """Answers, eight at once; whenever one ends, a copy with noise takes the draft's place."""
    weights = unflatten(load_model(draft))
    noise = torch.Generator().manual_seed(1)
    others = {
        name: tensor
        if not tensor.is_floating_point()
        else tensor + _NOISE * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in weights.items()
    }
    found: Answers = {}
    for version, answer in enumerate(answers(engine, _requests(prompts, max_tokens), 8), start=1):
        found[answer.key] = list(answer.token_ids)
        engine.updates.put(SwapWeights("general", version, others if version % 2 else weights))
    return found


def resumed(engine: Engine, prompts: Sequence[Prompt], plain: Answers, max_tokens: int) -> Answers:
    """Answers that go on in the middle, after a part of them that another replica made."""
    requests = [
        replace(request, output_token_ids=tuple(own[: 1 + len(own) // 2]), attempt=1)
        for request in _requests(prompts, max_tokens)
        if len(own := plain[request.request_id]) > 2
    ]
    begun = {request.run_id: request for request in requests}
    found = dict(plain)
    for answer in answers(engine, requests, 8):
        request = begun[answer.key]
        found[request.request_id] = [*request.output_token_ids, *answer.token_ids]
    return found


def _requests(prompts: Sequence[Prompt], max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens, temperature=0.0)
    options = {"num_speculative_tokens": 4, "store": False}
    return [GenerationRequest(p.key, p.token_ids, sampling, **options) for p in prompts]


def compare(
    target: Path, draft: Path, dtype: str, count: int, max_tokens: int, threads: int
) -> dict[str, Any]:
    """Differing answers of one dtype."""
    own = {"dtype": dtype, "threads": threads, "max_num_seqs": 8, "max_model_len": 1024}
    own |= {"suffix": "topic"}
    engine, tokenizer, facts = load_engine({"general": str(draft)}, target=target, **own)
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [Prompt(f"{i:04d}", "all", chat_ids(tokenizer, t)) for i, t in enumerate(texts)]
    keys, found = [prompt.key for prompt in prompts], {}
    for name, k in (("off", 0), ("on", 4), ("auto", None)):
        served = Served(name, engine, k, lambda _: "general")
        for batch in (8, 1):
            run = served.run(prompts, batch, 0.0, max_tokens)
            found[f"{name}, batch {batch}"] = dict(zip(keys, run.outputs, strict=True))
        if (store := engine.draft_runner.suffix_store) is not None and name == "off":
            for prompt, output in zip(prompts, run.outputs, strict=True):
                store.add(prompt.topic, "", prompt.key, [*prompt.token_ids, *output])
    plain = found["off, batch 8"]
    found["on, batch 8, drafts swapped"] = swapped(engine, draft, prompts, max_tokens)
    found["on, batch 8, resumed"] = resumed(engine, prompts, plain, max_tokens)
    return {
        "target": target.name,
        "dtype": dtype,
        "numerics": facts.numerics,
        "answers": len(prompts),
        "tokens": sum(map(len, plain.values())),
        "differ": {way: len(differing(own, plain)) for way, own in found.items()},
    }


def broken(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Answers that differ although the numerics are invariant."""
    return [
        f"{result['dtype']}, {way}: {count} of {result['answers']} answers differ"
        for result in results
        if result["numerics"] == INVARIANT
        for way, count in result["differ"].items()
        if count
    ]


def main() -> int:
    """Compare and print one JSON object per dtype; 1 if a promise is broken."""
    parser = arguments(__doc__, "target", "threads", "out", threads=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=104)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, draft = find_models(options.target)
    amount = options.prompts, options.max_tokens, options.threads
    results = [compare(target, draft, dtype, *amount) for dtype in options.dtypes]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    figures = {"machine": machine(), "settings": written(options), "results": results}
    write(options.out / "exactness.json", figures)
    for fault in (faults := broken(results)):
        say(fault)
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
