"""Count greedy answers that speculation or batching changes, per dtype.

    .venv/bin/python benchmarks/exactness.py --target smollm2 --prompts 200 --max-tokens 96

The same prompts run with speculation off and on, one at a time and eight at once, with drafts that
are swapped for others all the time, and resumed in the middle as after the death of a replica; the
tokens are compared with those of plain decoding eight at once. If an answer differs with
speculation on, the gap of the target's two best logits at the first differing position is printed,
computed in float32: a gap of the dtype's rounding means that a near-tie was rounded differently.

The small target is drafted for by its draft, any other target by `drafts.general: auto`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from decoding import Block, Cell, Served, drive, run_cell
from expert_cache import DRAFT, TARGET
from harness import arguments, differing, write
from prompts import Prompt, chat_ids

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.flat_weights import load_model, unflatten
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.draft_store import fetch_models

_NOISE = 0.02  # standard deviation
_SWAP_EVERY = 40  # chunks
Answers = dict[int, list[int]]


def swapped(engine: Engine, draft: Path, prompts: Sequence[Prompt], max_tokens: int) -> Answers:
    """Answers, eight at once, while the draft alternates with a copy with noise."""
    weights = unflatten(load_model(draft))
    noise = torch.Generator().manual_seed(1)
    others = {
        name: tensor
        if not tensor.is_floating_point()
        else tensor + _NOISE * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
        for name, tensor in weights.items()
    }
    answers: Answers = {prompt.number: [] for prompt in prompts}
    for count, output in enumerate(drive(engine, _requests(prompts, max_tokens), 8)):
        answers[int(output.request_id)] += output.chunk.token_ids
        if count % _SWAP_EVERY == 0:
            version = 1 + count // _SWAP_EVERY
            engine.updates.put(SwapWeights("general", version, others if version % 2 else weights))
    return answers


def resumed(engine: Engine, prompts: Sequence[Prompt], plain: Answers, max_tokens: int) -> Answers:
    """Answers that go on in the middle, after a part of them that another replica made."""
    requests = [
        replace(request, output_token_ids=tuple(own[: 1 + len(own) // 2]), attempt=1)
        for request in _requests(prompts, max_tokens)
        if len(own := plain[int(request.request_id)]) > 2
    ]
    answers = dict(plain) | {int(r.request_id): list(r.output_token_ids) for r in requests}
    for output in drive(engine, requests, 8):
        number = output.request_id.partition("#")[0]
        answers[int(number)] += output.chunk.token_ids
    return answers


def _requests(prompts: Sequence[Prompt], max_tokens: int) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens, temperature=0.0)
    return [
        GenerationRequest(
            str(prompt.number), prompt.token_ids, sampling, num_speculative_tokens=4, store=False
        )
        for prompt in prompts
    ]


def gaps(target: Path, prompts: Sequence[Prompt], left: Answers, right: Answers) -> list[float]:
    """Difference of the target's two best logits at the first tokens that differ."""
    exact, found = load_causal_lm(target, torch.float32, attention="sdpa"), []
    for number in differing(left, right):
        a, b = left[number], right[number]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            logits = exact(torch.tensor([[*prompts[number].token_ids, *a[:at]]])).logits[0, -1]
        best = logits.float().topk(2).values
        found.append(round(float(best[0] - best[1]), 4))
    return sorted(found)


def compare(
    target: Path, draft: Path, dtype: str, count: int, max_tokens: int, threads: int
) -> dict[str, Any]:
    """Differing answers of one dtype."""
    settings = TargetSettings(
        str(target),
        {"general": str(draft)},
        dtype=dtype,
        num_threads=threads,
        max_num_seqs=8,
        max_model_len=1024,
        prefix_cache=False,
        seed=1,
    )
    engine, tokenizer, facts = build_engine(settings)
    variants = [Served(name, engine, k, lambda _: "general") for name, k in (("off", 0), ("on", 4))]
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [Prompt(i, "all", chat_ids(tokenizer, text)) for i, text in enumerate(texts)]
    blocks = [
        Block(1 + at // 8, "all", tuple(prompts[at : at + 8])) for at in range(0, len(prompts), 8)
    ]
    cells = {b: run_cell(Cell(b, 0.0), variants, blocks, max_tokens) for b in (8, 1)}
    answers = {
        f"{state}, batch {batch}": cells[batch].answers[state]
        for state in ("off", "on")
        for batch in (8, 1)
    }
    plain = answers["off, batch 8"]
    answers["on, batch 8, drafts swapped"] = swapped(engine, draft, prompts, max_tokens)
    answers["on, batch 8, resumed"] = resumed(engine, prompts, plain, max_tokens)
    return {
        "target": target.name,
        "dtype": dtype,
        "numerics": facts.numerics,
        "answers": len(prompts),
        "tokens": sum(map(len, plain.values())),
        "differ": {way: len(differing(own, plain)) for way, own in answers.items()},
        "top2_logit_gaps_at_first_difference": gaps(target, prompts, plain, answers["on, batch 8"]),
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
    parser = arguments(__doc__)
    parser.add_argument("--target", help="as target.path; default: the small one")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=104)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/bench/exactness.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, draft = TARGET, DRAFT
    if options.target is not None:
        config = load_config(None, {"target.path": options.target, "router.enabled": False})
        config = fetch_models(config, lambda line: sys.stderr.write(f"{line}\n"))
        target, draft = config.target_path, config.auto_draft
    results = [
        compare(target, draft, dtype, options.prompts, options.max_tokens, options.threads)
        for dtype in options.dtypes
    ]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    write(options.out, results)
    faults = broken(results)
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
