"""Count greedy answers that speculation or batching changes, per dtype.

    .venv/bin/python benchmarks/exactness.py --target smollm2 --prompts 200 --max-tokens 96

The same prompts run four ways (speculation off and on, one at a time and eight at once); the tokens
are compared with those of plain decoding eight at once. If an answer differs with speculation on,
the gap of the target's two best logits at the first differing position is printed, computed in
float32: a gap of the dtype's rounding means that a near-tie was rounded differently.

The small target is drafted for by its draft, any other target by its own first two layers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding import Block, Cell, Served, run_cell
from expert_cache import DRAFT, TARGET
from harness import arguments, differing, write
from prompts import Prompt, chat_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy import model_store
from paceline.deploy.demo.prompts import TOPICS, generate

_LAYERS = 2
Answers = dict[int, list[int]]


def first_layers(target: Path, folder: Path) -> Path:
    """A draft of a target's first layers, written once."""
    if not folder.is_dir():
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        model.model.layers = model.model.layers[:_LAYERS]
        model.config.num_hidden_layers = _LAYERS
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


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
    return {
        "target": target.name,
        "dtype": dtype,
        "numerics": facts["numerics"],
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
        target = model_store.fetch(options.target, lambda line: sys.stderr.write(f"{line}\n"))
        draft = first_layers(target, options.out.parent / f"first-layers-{target.name}")
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
