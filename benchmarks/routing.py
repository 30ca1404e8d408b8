"""Cost of the router per request, and of a wrong route.

    make bench-routing ARGS="--quick"

One engine holds the general draft and a trained expert per topic (``make experts``). Every topic's
prompts are drafted by every expert; then a mixed stream is routed by several policies, block by
block in turns. k is fixed, so that acceptance compares.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import Run, Served
from expert_cache import DRAFT, TARGET, experts_dir, facts_of
from harness import (
    Timing,
    bootstrap,
    geometric_mean,
    interval,
    machine,
    paired_ratio,
    rotation,
    show,
    topic_rates,
    write,
)
from prompts import MAX_PROMPT_TOKENS, Prompt, bench_texts, encode
from transformers.utils import logging

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.request import SpeculativeStats
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.record import encode as encode_record
from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.policy import GENERAL, route
from paceline.actors.training.expert_evaluation import ExpertEvaluator
from paceline.actors.training.scorer import ScorerSettings, ScoringLoop
from paceline.actors.weights.versions import TopicStatus
from paceline.deploy.config.config import MODELS_DIR, PacelineConfig
from paceline.deploy.config.preflight import router_confidence

PLAIN = "off"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run: ``primer`` prompts per topic train Hedge, the others are measured."""

    primer: int
    per_topic: int
    blocks: int
    max_tokens: int
    batch: int = 8


class _StaticClient:
    """Scorer's client that serves every expert with its initial weights."""

    def __init__(self, experts: Sequence[str]) -> None:
        self._experts = experts

    def acquire_permit(self) -> bool:
        return True

    def versions(self) -> dict[str, int] | None:
        return dict.fromkeys(self._experts, 0)

    def topic_status(self) -> dict[str, TopicStatus] | None:
        return {}

    def weights(self, topic: str) -> tuple[int, None]:  # noqa: ARG002 - the protocol's
        return 0, None


def mean_length(stats: Sequence[SpeculativeStats]) -> dict[str, float | None]:
    """Tokens per speculative round over all requests, with a 95 % bootstrap over requests."""
    columns = [[s.num_spec_steps, s.num_accepted_draft_tokens] for s in stats]
    found = bootstrap(
        lambda steps, taken: float(1.0 + taken.sum() / steps.sum()) if steps.sum() else None,
        *np.array(columns, dtype=np.float64).T,
    )
    return asdict(found)


def router_cost(classifier: TopicClassifier, texts: Sequence[str]) -> dict[str, float]:
    """Milliseconds of one forward of the router, p50 and p99."""
    for text in texts[:5]:
        classifier.classify(text)
    times = []
    for text in texts:
        began = time.perf_counter()
        classifier.classify(text)
        times.append(1e3 * (time.perf_counter() - began))
    limit = 1e3 * PacelineConfig().router.timeout_s
    return {
        "forwards": len(times),
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "timeout_ms": limit,
        "beyond_timeout": float(np.mean(np.array(times) > limit)),
    }


def hedge_weights(
    drafts: Mapping[str, str], records: Sequence[ReplayRecord]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """The scorer's weights after these records, and its whole table."""
    settings = ScorerSettings(dict(drafts), dict.fromkeys(drafts, ""), retention_s=1e12)
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    for record in records:
        scoring.offer(encode_record(record))
    began = time.perf_counter()
    while scoring.run_once(_StaticClient(list(drafts)), evaluator):
        pass
    table = scoring.table()
    return table["weights"], table | {"seconds": time.perf_counter() - began}


def matrix(
    served: Served, prompts: Mapping[str, Sequence[Prompt]], experts: Sequence[str], plan: Plan
) -> dict[str, dict[str, Any]]:
    """Topic to expert to acceptance and speed, experts in turn on the same prompts."""
    found: dict[str, dict[str, Any]] = {}
    for number, (topic, own) in enumerate(prompts.items()):
        served.run(own[: plan.batch], plan.batch, 0.0, plan.max_tokens, [GENERAL] * plan.batch)
        found[topic] = {}
        for expert in rotation([*experts, PLAIN], number):
            run = served.run(own, plan.batch, 0.0, plan.max_tokens, [expert] * len(own))
            found[topic][expert] = {
                "mean_acceptance_length": mean_length(run.stats),
                "acceptance_rate": run.drafted.acceptance_rate,
                "tokens_per_s": run.num_tokens / run.seconds,
            }
    return found


def policies(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    classifier: TopicClassifier,
    weights: Mapping[str, Mapping[str, float]],
    lengths: Mapping[str, Mapping[str, float]],
) -> dict[str, list[str]]:
    """Policy to the draft of every prompt; ``lengths`` is topic to expert to acceptance length."""
    least, experts = router_confidence(PacelineConfig()), list(next(iter(lengths.values())))
    probabilities = [classifier.classify(texts[p.number]) for p in prompts]
    rng = np.random.default_rng(0)
    worst = {topic: min(own, key=lambda e: (own[e], e)) for topic, own in lengths.items()}
    return {
        "oracle": [p.topic for p in prompts],
        "router": [route(p, experts, least).draft for p in probabilities],
        "router and Hedge": [route(p, experts, least, weights).draft for p in probabilities],
        GENERAL: [GENERAL] * len(prompts),
        "random": [experts[int(i)] for i in rng.integers(len(experts), size=len(prompts))],
        "anti-oracle": [worst[p.topic] for p in prompts],
        PLAIN: [PLAIN] * len(prompts),
    }


def stream(
    served: Served, prompts: Sequence[Prompt], drafts: Mapping[str, Sequence[str]], plan: Plan
) -> dict[str, Any]:
    """Every policy on every block of the mixed stream, in turning order."""
    size = len(prompts) // plan.blocks
    timings: list[Timing] = []
    runs: dict[str, list[Run]] = {name: [] for name in drafts}
    for number in range(plan.blocks):
        part = slice(number * size, (number + 1) * size)
        for name in rotation(list(drafts), number):
            run = served.run(prompts[part], plan.batch, 0.0, plan.max_tokens, drafts[name][part])
            runs[name].append(run)
            timings.append(Timing(name, number, "mixed", run.num_tokens, run.seconds))
    return {
        name: {
            "tokens_per_s": geometric_mean(list(topic_rates(timings, name).values())),
            "speed_to_general": asdict(paired_ratio(timings, name, GENERAL)),
            "mean_acceptance_length": mean_length([s for run in own for s in run.stats]),
            "right": float(np.mean([d == p.topic for d, p in zip(drafts[name], prompts)])),  # noqa: B905
            "answers_that_differ": sum(
                a != b
                for run, plain in zip(own, runs[PLAIN], strict=True)
                for a, b in zip(run.outputs, plain.outputs, strict=True)
            ),
        }
        for name, own in runs.items()
    }


def bench(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything."""
    texts, folder = bench_texts(), experts_dir(options.out, None)
    if missing := [topic for topic in texts if facts_of(folder / topic) is None]:
        raise SystemExit(f"no trained expert for {', '.join(missing)}: run make experts first")
    drafts = {GENERAL: str(DRAFT)} | {topic: str(folder / topic) for topic in texts}
    settings = TargetSettings(
        str(TARGET),
        drafts,
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_seqs=plan.batch,
        num_speculative_tokens=options.tokens,
        max_model_len=MAX_PROMPT_TOKENS + plan.max_tokens + 16,
        prefix_cache=False,  # prompts come back in every setting
        seed=1,
    )
    torch.set_num_threads(options.threads)
    engine, tokenizer, _ = build_engine(settings)
    served = Served("", engine, None)
    every = encode(tokenizer, texts)
    primer = [p for own in every.values() for p in own[: plan.primer]]
    measured = {t: own[plan.primer : plan.primer + plan.per_topic] for t, own in every.items()}
    flat = [text for own in texts.values() for text in own]
    classifier = TopicClassifier(str(MODELS_DIR / "router"))
    cost = router_cost(classifier, [flat[p.number] for own in measured.values() for p in own])
    general = [GENERAL] * len(primer)
    primed = served.run(primer, plan.batch, 0.0, plan.max_tokens, general, store=True)
    weights, table = hedge_weights(drafts, primed.records)
    found = matrix(served, measured, list(drafts), plan)
    lengths = {
        topic: {e: own[e]["mean_acceptance_length"]["value"] or 1.0 for e in drafts}
        for topic, own in found.items()
    }
    mixed = [p for group in zip(*measured.values(), strict=False) for p in group]
    chosen = policies(mixed, flat, classifier, weights, lengths)
    alone = served.run(mixed[:8], 1, 0.0, plan.max_tokens, chosen["oracle"][:8]).seconds / 8
    share = cost["p50_ms"] / 1e3 / (alone + cost["p50_ms"] / 1e3)
    return {
        "machine": machine(),
        "settings": asdict(plan) | {"tokens": options.tokens, "threads": options.threads},
        "router": cost | {"share_of_a_request": share},
        "request_alone_s": alone,
        "scorer": table,
        "matrix": found,
        "policies": stream(served, mixed, chosen, plan),
        "draft_failures": engine.draft_failures,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, short answers")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4, help="drafted per round")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    logging.disable_progress_bar()
    figures = bench(options, Plan(6, 12, 3, 48) if options.quick else Plan(12, 48, 12, 96))
    write(options.out / "routing.json", figures)
    show("Router", [figures["router"]])
    lengths = [
        {"prompts": topic}
        | {expert: interval(own[expert]["mean_acceptance_length"]) for expert in sorted(own)}
        for topic, own in figures["matrix"].items()
    ]
    show("Mean acceptance length by expert", lengths)
    rows = [
        {"policy": name, **own}
        | {key: interval(own[key]) for key in ("speed_to_general", "mean_acceptance_length")}
        for name, own in figures["policies"].items()
    ]
    show(f"Policies; draft failures: {figures['draft_failures']}", rows)


if __name__ == "__main__":
    main()
