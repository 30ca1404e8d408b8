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
from typing import Any

import numpy as np
import torch
from decoding import MIXED, Block, Cell, Served, load_engine, run_cell, summary
from expert_cache import DRAFT, experts_dir, facts_of
from harness import arguments, interval, machine, say, show, topic_rates, write
from prompts import MAX_PROMPT_TOKENS, Prompt, bench_texts, encode
from transformers.utils import logging

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


def policies(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    classifier: TopicClassifier,
    weights: Mapping[str, Mapping[str, float]],
    lengths: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[int, str]]:
    """Policy to prompt to draft; ``lengths`` is topic to expert to mean acceptance length."""
    least, experts = router_confidence(PacelineConfig()), list(next(iter(lengths.values())))
    probabilities = [classifier.classify(texts[p.number]) for p in prompts]
    rng = np.random.default_rng(0)
    worst = {topic: min(own, key=lambda e: (own[e], e)) for topic, own in lengths.items()}
    drafts = {
        "oracle": [p.topic for p in prompts],
        "router": [route(p, experts, least).draft for p in probabilities],
        "router and Hedge": [route(p, experts, least, weights).draft for p in probabilities],
        GENERAL: [GENERAL] * len(prompts),
        "random": [experts[int(i)] for i in rng.integers(len(experts), size=len(prompts))],
        "anti-oracle": [worst[p.topic] for p in prompts],
        PLAIN: [PLAIN] * len(prompts),
    }
    numbers = [p.number for p in prompts]
    return {name: dict(zip(numbers, own, strict=True)) for name, own in drafts.items()}


def bench(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything."""
    texts, folder = bench_texts(), experts_dir(options.out, None)
    if missing := [topic for topic in texts if facts_of(folder / topic) is None]:
        raise SystemExit(f"no trained expert for {', '.join(missing)}: run make experts first")
    drafts = {GENERAL: str(DRAFT)} | {topic: str(folder / topic) for topic in texts}
    torch.set_num_threads(options.threads)
    engine, tokenizer, _ = load_engine(
        drafts,
        threads=options.threads,
        k=options.tokens,
        dtype=options.dtype,
        max_num_seqs=plan.batch,
        max_model_len=MAX_PROMPT_TOKENS + plan.max_tokens + 16,
    )
    every, cell = encode(tokenizer, texts), Cell(plan.batch, 0.0)
    primer = [p for own in every.values() for p in own[: plan.primer]]
    measured = {t: own[plan.primer : plan.primer + plan.per_topic] for t, own in every.items()}
    flat = [text for own in texts.values() for text in own]
    classifier = TopicClassifier(str(MODELS_DIR / "router"))
    cost = router_cost(classifier, [flat[p.number] for own in measured.values() for p in own])
    experts = [Served(name, engine, None, lambda _, n=name: n) for name in (*drafts, PLAIN)]
    records = experts[0].run(primer, plan.batch, 0.0, plan.max_tokens, store=True).records
    weights, table = hedge_weights(drafts, records)
    topics = [Block(i + 1, t, tuple(own)) for i, (t, own) in enumerate(measured.items())]
    warm_up = Block(0, GENERAL, tuple(primer))
    outcome = run_cell(cell, experts, [warm_up, *topics], plan.max_tokens)
    lengths = {
        topic: {e: outcome.by_topic[e, topic].mean_acceptance_length or 1.0 for e in drafts}
        for topic in measured
    }
    mixed = [p for group in zip(*measured.values(), strict=False) for p in group]
    chosen = policies(mixed, flat, classifier, weights, lengths)
    variants = [
        Served(name, engine, None, lambda p, own=own: own[p.number]) for name, own in chosen.items()
    ]
    alone = variants[0].run(mixed[:8], 1, 0.0, plan.max_tokens).seconds / 8
    size = len(mixed) // plan.blocks
    parts = [mixed[i * size : (i + 1) * size] for i in range(plan.blocks)]
    blocks = [Block(i, MIXED, tuple(part)) for i, part in enumerate(parts, start=1)]
    routed = run_cell(cell, variants, blocks, plan.max_tokens)
    figures = summary(cell, routed, [(name, GENERAL) for name in chosen], PLAIN)
    for name, own in chosen.items():
        figures["variants"][name]["right"] = float(
            np.mean([own[p.number] == p.topic for p in mixed])
        )
    share = cost["p50_ms"] / 1e3 / (alone + cost["p50_ms"] / 1e3)
    return {
        "machine": machine(),
        "settings": asdict(plan) | {"tokens": options.tokens, "threads": options.threads},
        "router": cost | {"share_of_a_request": share},
        "request_alone_s": alone,
        "scorer": table,
        "mean_acceptance_length": lengths,
        "tokens_per_s": {e.name: topic_rates(outcome.timings, e.name) for e in experts},
        "policies": figures,
        "draft_failures": engine.draft_failures,
    }


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__, "quick", "dtype", "out")
    parser.add_argument("--tokens", type=int, default=4, help="drafted per round")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    options = parser.parse_args()
    logging.disable_progress_bar()
    figures = bench(options, Plan(6, 12, 3, 48) if options.quick else Plan(12, 48, 12, 96))
    write(options.out / "routing.json", figures)
    show("Router", [figures["router"]])
    lengths = figures["mean_acceptance_length"]
    show("Acceptance length by expert", [{"prompts": t, **own} for t, own in lengths.items()])
    names = ("tokens_per_s", "mean_acceptance_length", "right", "answers_that_differ")
    rows = [
        {"policy": policy, **{name: own[name] for name in names}}
        | {"over general": interval(figures["policies"]["ratios"][f"{policy} / {GENERAL}"])}
        for policy, own in figures["policies"]["variants"].items()
    ]
    show("Policies", rows)
    say(f"draft failures: {figures['draft_failures']}")


if __name__ == "__main__":
    main()
