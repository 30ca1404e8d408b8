"""How often does what runs beside it change a greedy answer, per dtype, and what does it cost?

    .venv/bin/python benchmarks/exactness.py --dtypes float32 bfloat16 --prompts 104

Runs the same prompts four ways (speculation off and on, one at a time and eight at once) and
compares the tokens with those of plain decoding eight at once. Where an answer differs with
speculation on, the target's two best logits at the first differing position are printed, computed
in float32 over the whole text: a gap of the size of the dtype's rounding says that a forward over
one row and one over several rounded a near-tie differently. Both values of ``target.numerics`` take
turns, prompt group by prompt group: ``cost`` is the geometric mean of invariant's time over auto's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import geometric_mean

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.numerics import INVARIANT
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import Numerics, TargetSettings
from paceline.deploy.config.config import MODELS_DIR
from paceline.deploy.demo.prompts import TOPICS, generate

TARGET, DRAFT = MODELS_DIR / "target", MODELS_DIR / "draft-general"
NUMERICS: tuple[Numerics, ...] = ("auto", "invariant")


@dataclass(frozen=True, slots=True)
class Way:
    """Requests at once, and tokens drafted per round."""

    batch: int
    k: int

    @property
    def label(self) -> str:
        """For people."""
        return f"{'on' if self.k else 'off'}, batch {self.batch}"


WAYS = (Way(8, 0), Way(1, 0), Way(1, 4), Way(8, 4))


def answers(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, way: Way
) -> tuple[list[list[int]], float]:
    """Greedy answers to all prompts, so many at once as the way says, and the seconds it took."""
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    waiting = [
        GenerationRequest(str(i), tuple(p), sampling, num_speculative_tokens=way.k, store=False)
        for i, p in enumerate(prompts)
    ]
    began = time.perf_counter()
    for start in range(0, len(waiting), way.batch):
        for request in waiting[start : start + way.batch]:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                found[output.request_id].extend(output.chunk.token_ids)
    return list(found.values()), time.perf_counter() - began


def top_gap(model: Any, tokens: list[int]) -> float:
    """Difference of the two best next-token logits after ``tokens``."""
    with torch.inference_mode():
        best = model(torch.tensor([tokens])).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def gaps(
    prompts: Sequence[list[int]], left: list[list[int]], right: list[list[int]]
) -> list[float]:
    """The target's two best logits apart, where two sets of answers part."""
    exact, found = load_causal_lm(TARGET, torch.float32, attention="sdpa"), []
    for prompt, a, b in zip(prompts, left, right, strict=True):
        if a != b:
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            found.append(round(top_gap(exact, [*prompt, *a[:at]]), 4))
    return sorted(found)


def load(dtype: str, threads: int) -> tuple[dict[Numerics, Engine], Any, dict[Numerics, str]]:
    """An engine per numerics, the tokenizer, and what the numerics turned out to be."""
    engines: dict[Numerics, Engine] = {}
    turned_out: dict[Numerics, str] = {}
    tokenizer = None
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
        turned_out[numerics] = facts["numerics"]
    return engines, tokenizer, turned_out


@dataclass(slots=True)
class Ran:
    """Answers and seconds of one engine, by way."""

    answers: dict[Way, list[list[int]]] = field(default_factory=lambda: {w: [] for w in WAYS})
    seconds: dict[Way, list[float]] = field(default_factory=lambda: {w: [] for w in WAYS})


def run_all(
    engines: dict[Numerics, Engine], prompts: list[list[int]], max_tokens: int
) -> dict[Numerics, Ran]:
    """Every engine every way, group by group of prompts, the engines taking turns."""
    ran = {numerics: Ran() for numerics in engines}
    for start in range(0, len(prompts), 8):
        for way in WAYS:
            for numerics in NUMERICS if start // 8 % 2 else NUMERICS[::-1]:
                part = prompts[start : start + 8]
                found, took = answers(engines[numerics], part, max_tokens, way)
                ran[numerics].answers[way] += found
                ran[numerics].seconds[way].append(took)
    return ran


def compare(dtype: str, count: int, max_tokens: int, threads: int) -> list[dict[str, Any]]:
    """Count differing answers of one dtype, with each of the two numerics."""
    engines, tokenizer, turned_out = load(dtype, threads)
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=5)]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    ran = run_all(engines, prompts, max_tokens)
    results = []
    for numerics, own in ran.items():
        plain = own.answers[WAYS[0]]
        differ = {
            way.label: sum(a != b for a, b in zip(plain, own.answers[way], strict=True))
            for way in WAYS[1:]
        }
        cost = {
            way.label: geometric_mean(
                [x / y for x, y in zip(own.seconds[way], ran["auto"].seconds[way], strict=True)]
            )
            for way in WAYS
        }
        parted = gaps(prompts, plain, own.answers[WAYS[-1]])
        results.append(
            {
                "dtype": dtype,
                "numerics": numerics,
                "turned_out": turned_out[numerics],
                "answers": len(prompts),
                "tokens": sum(map(len, plain)),
                "differ": differ,
                "cost": cost,
                "top2_logit_gaps_at_first_difference": parted,
            }
        )
    return results


def broken(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """What ``invariant`` promised and did not hold."""
    return [
        f"{result['dtype']}, {way}: {count} of {result['answers']} answers differ"
        for result in results
        if result["turned_out"] == INVARIANT
        for way, count in result["differ"].items()
        if count
    ]


def main() -> int:
    """Compare and print one JSON object per dtype and numerics; 1 where a promise is broken."""
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
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    faults = broken(results)
    sys.stderr.write("".join(f"{fault}\n" for fault in faults))
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
