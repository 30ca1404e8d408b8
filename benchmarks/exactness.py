"""How often does speculation change a greedy answer, per dtype, and why?

    .venv/bin/python benchmarks/exactness.py --dtypes float32 bfloat16 --prompts 104

Runs the same prompts through the engine with speculation off and on and compares the tokens.
Where an answer differs, the target's two best logits at the first differing position are
printed, computed in float32 over the whole text: a gap of the size of the dtype's rounding
says that a forward over one row and one over several rounded a near-tie differently.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.actors.decoding.build import build_engine
from paceline.actors.decoding.engine import Engine
from paceline.actors.decoding.loading import load_causal_lm
from paceline.actors.decoding.request import GenerationRequest, SamplingParams
from paceline.actors.decoding.settings import TargetSettings
from paceline.deploy.config import MODELS_DIR
from paceline.deploy.demo.prompts import TOPICS, generate

TARGET, DRAFT = MODELS_DIR / "target", MODELS_DIR / "draft-general"


def answers(engine: Engine, prompts: list[list[int]], max_tokens: int, k: int) -> list[list[int]]:
    """Greedy answers to all prompts, batched as the engine likes."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        engine.add(
            GenerationRequest(
                str(i), tuple(prompt), sampling, num_speculative_tokens=k, store=False
            )
        )
    while engine.has_work:
        for output in engine.step():
            found[output.request_id].extend(output.chunk.token_ids)
    return list(found.values())


def top_gap(model: Any, tokens: list[int]) -> float:
    """Difference of the two best next-token logits after ``tokens``."""
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def compare(dtype: str, count: int, max_tokens: int, threads: int) -> dict[str, Any]:
    """Count differing answers of one dtype."""
    settings = TargetSettings(
        str(TARGET), {"general": str(DRAFT)}, dtype=dtype, num_threads=threads, max_num_seqs=8
    )
    engine, tokenizer, _ = build_engine(settings)
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    off = answers(engine, prompts, max_tokens, 0)
    on = answers(engine, prompts, max_tokens, 4)
    exact = load_causal_lm(TARGET, torch.float32, attention="sdpa")
    gaps = []
    for prompt, left, right in zip(prompts, off, on, strict=True):
        if left != right:
            at = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
            gaps.append(round(top_gap(exact, [*prompt, *left[:at]]), 4))
    return {
        "dtype": dtype,
        "answers": len(prompts),
        "tokens": sum(map(len, off)),
        "differ": len(gaps),
        "top2_logit_gaps_at_first_difference": sorted(gaps),
    }


def main() -> int:
    """Compare and print one JSON object per dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=104)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/bench/exactness.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = [
        compare(dtype, options.prompts, options.max_tokens, options.threads)
        for dtype in options.dtypes
    ]
    for result in results:
        sys.stdout.write(json.dumps(result) + "\n")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
