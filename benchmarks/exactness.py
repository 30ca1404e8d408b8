"""Count greedy answers that speculation or batching changes, per dtype, and time the numerics.

    .venv/bin/python benchmarks/exactness.py --dtypes float32 bfloat16 --prompts 104

The same prompts run four ways (speculation off and on, one at a time and eight at once); the tokens
are compared with those of plain decoding eight at once. If an answer differs with speculation on,
the gap of the target's two best logits at the first differing position is printed, computed in
float32: a gap of the dtype's rounding means that a near-tie was rounded differently. Both values
of ``target.numerics`` take turns: ``cost`` is invariant's time over auto's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding import Block, Cell, Served, load_engine, run_cell
from expert_cache import DRAFT, TARGET
from harness import arguments, differing, paired_ratio, write
from prompts import Prompt, chat_ids

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.settings import Numerics
from paceline.deploy.demo.prompts import TOPICS, generate

NUMERICS: tuple[Numerics, ...] = ("auto", "invariant")
Answers = dict[int, list[int]]


def gaps(prompts: Sequence[Prompt], left: Answers, right: Answers) -> list[float]:
    """Difference of the target's two best logits at the first tokens that differ."""
    exact, found = load_causal_lm(TARGET, torch.float32, attention="sdpa"), []
    for number in differing(left, right):
        a, b = left[number], right[number]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            logits = exact(torch.tensor([[*prompts[number].token_ids, *a[:at]]])).logits[0, -1]
        best = logits.float().topk(2).values
        found.append(round(float(best[0] - best[1]), 4))
    return sorted(found)


def compare(dtype: str, count: int, max_tokens: int, threads: int) -> list[dict[str, Any]]:
    """Differing answers of one dtype, with each of the two numerics."""
    variants, resolved = [], {}
    for numerics in NUMERICS:
        engine, tokenizer, facts = load_engine(
            {"general": str(DRAFT)}, threads=threads, dtype=dtype, max_num_seqs=8, numerics=numerics
        )
        resolved[numerics] = facts["numerics"]
        for name, k in ((f"{numerics}, off", 0), (f"{numerics}, on", 4)):
            variants.append(Served(name, engine, k, lambda _: "general"))
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [Prompt(i, "all", chat_ids(tokenizer, text)) for i, text in enumerate(texts)]
    blocks = [
        Block(1 + at // 8, "all", tuple(prompts[at : at + 8])) for at in range(0, len(prompts), 8)
    ]
    cells = {b: run_cell(Cell(b, 0.0), variants, blocks, max_tokens) for b in (8, 1)}
    results = []
    for numerics in NUMERICS:
        answers = {
            f"{state}, batch {batch}": cells[batch].answers[f"{numerics}, {state}"]
            for state in ("off", "on")
            for batch in (8, 1)
        }
        plain = answers["off, batch 8"]
        cost = {
            way: paired_ratio(
                cells[int(way.split()[-1])].timings,
                f"auto, {way.split(',')[0]}",
                f"{numerics}, {way.split(',')[0]}",
            ).ratio
            for way in (answers if numerics != "auto" else ())
        }
        results.append(
            {
                "dtype": dtype,
                "numerics": numerics,
                "resolved": resolved[numerics],
                "answers": len(prompts),
                "tokens": sum(map(len, plain.values())),
                "differ": {way: len(differing(own, plain)) for way, own in answers.items()},
                "cost": cost,
                "top2_logit_gaps_at_first_difference": gaps(prompts, plain, answers["on, batch 8"]),
            }
        )
    return results


def broken(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Answers that differ although the numerics are invariant."""
    return [
        f"{result['dtype']}, {way}: {count} of {result['answers']} answers differ"
        for result in results
        if result["resolved"] == INVARIANT
        for way, count in result["differ"].items()
        if count
    ]


def main() -> int:
    """Compare and print one JSON object per dtype and numerics; 1 if a promise is broken."""
    parser = arguments(__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=104)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/bench/exactness.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [
        result
        for dtype in options.dtypes
        for result in compare(dtype, options.prompts, options.max_tokens, options.threads)
    ]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    write(options.out, results)
    faults = broken(results)
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
