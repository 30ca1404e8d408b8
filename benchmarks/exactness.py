"""Count greedy answers that speculation or batching changes, per dtype, and time the numerics.

    .venv/bin/python benchmarks/exactness.py --dtypes float32 bfloat16 --prompts 104

Runs the same prompts four ways (speculation off and on, one at a time and eight at once) and
compares the tokens with those of plain decoding eight at once. If an answer differs with
speculation on, the gap of the target's two best logits at the first differing position is printed,
computed in float32: a gap of the dtype's rounding means that a near-tie was rounded differently.
Both values of ``target.numerics`` take turns, prompt group by prompt group: ``cost`` is the
geometric mean of invariant's time over auto's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding import drive
from expert_cache import DRAFT, TARGET
from harness import geometric_mean, write
from prompts import chat_ids

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import Numerics, TargetSettings
from paceline.deploy.demo.prompts import TOPICS, generate

NUMERICS: tuple[Numerics, ...] = ("auto", "invariant")
# Name -> (requests at once, tokens drafted per round); the first is the reference.
WAYS = {
    "off, batch 8": (8, 0),
    "off, batch 1": (1, 0),
    "on, batch 1": (1, 4),
    "on, batch 8": (8, 4),
}
_PLAIN, _LAST = next(iter(WAYS)), list(WAYS)[-1]


def answers(
    engine: Engine, prompts: Sequence[tuple[int, ...]], max_tokens: int, way: str
) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts, and the seconds it took."""
    batch, k = WAYS[way]
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = [
        GenerationRequest(str(i), p, sampling, num_speculative_tokens=k, store=False)
        for i, p in enumerate(prompts)
    ]
    began = time.perf_counter()
    for output in drive(engine, requests, batch):
        found[output.request_id].extend(output.chunk.token_ids)
    return list(found.values()), time.perf_counter() - began


def gaps(
    prompts: Sequence[tuple[int, ...]], left: list[list[int]], right: list[list[int]]
) -> list[float]:
    """Difference of the target's two best logits at the first tokens that differ."""
    exact, found = load_causal_lm(TARGET, torch.float32, attention="sdpa"), []
    for prompt, a, b in zip(prompts, left, right, strict=True):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            with torch.inference_mode():
                logits = exact(torch.tensor([[*prompt, *a[:at]]])).logits[0, -1]
            best = logits.float().topk(2).values
            found.append(round(float(best[0] - best[1]), 4))
    return sorted(found)


def compare(dtype: str, count: int, max_tokens: int, threads: int) -> list[dict[str, Any]]:
    """Differing answers of one dtype, with each of the two numerics."""
    engines: dict[Numerics, Engine] = {}
    resolved: dict[Numerics, str] = {}
    for numerics in NUMERICS:
        settings = TargetSettings(
            str(TARGET),
            {"general": str(DRAFT)},
            dtype=dtype,
            num_threads=threads,
            max_num_seqs=8,
            numerics=numerics,
            prefix_cache=False,
        )
        engines[numerics], tokenizer, facts = build_engine(settings)
        resolved[numerics] = facts["numerics"]
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [chat_ids(tokenizer, text) for text in texts]
    ran: dict[tuple[str, str], list[list[int]]] = {(n, w): [] for n in NUMERICS for w in WAYS}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in ran}
    for start in range(0, len(prompts), 8):
        for way in WAYS:
            for numerics in NUMERICS if start // 8 % 2 else NUMERICS[::-1]:
                part = prompts[start : start + 8]
                found, took = answers(engines[numerics], part, max_tokens, way)
                ran[numerics, way] += found
                seconds[numerics, way].append(took)
    results = []
    for numerics in NUMERICS:
        plain = ran[numerics, _PLAIN]
        differ = {
            way: sum(a != b for a, b in zip(plain, ran[numerics, way], strict=True))
            for way in WAYS
            if way != _PLAIN
        }
        ratios = {
            way: [x / y for x, y in zip(seconds[numerics, way], seconds["auto", way], strict=True)]
            for way in WAYS
        }
        results.append(
            {
                "dtype": dtype,
                "numerics": numerics,
                "resolved": resolved[numerics],
                "answers": len(prompts),
                "tokens": sum(map(len, plain)),
                "differ": differ,
                "cost": {way: geometric_mean(own) for way, own in ratios.items()},
                "top2_logit_gaps_at_first_difference": gaps(prompts, plain, ran[numerics, _LAST]),
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
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
