"""What the router costs per request, and what a wrong route costs.

    make bench-routing ARGS="--quick"

One engine holds the general draft and a trained expert per topic (``make experts``). Every topic's
prompts are drafted by every expert; then a mixed stream is routed by several policies, block by
block in turns. k is fixed, so that acceptance compares. Figures go to out/bench/routing.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from expert_cache import DRAFT, TARGET, experts_dir, facts_of
from measure import Timing, geometric_mean, paired_ratio, rotation, topic_rates
from prompts import MAX_PROMPT_TOKENS, Prompt, bench_texts, encode
from rich.console import Console
from rich.table import Table
from routed import Routed, Runner, mean_length
from transformers.utils import logging

from paceline.actors.engine.build import build_engine
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
    """How much is run: ``primer`` prompts per topic teach Hedge, the others are measured."""

    primer: int
    per_topic: int
    blocks: int
    max_tokens: int
    batch: int = 8

    @property
    def needed(self) -> int:
        """Prompts per topic."""
        return self.primer + self.per_topic


class _Static:
    """A client that serves every expert with its initial weights."""

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
    box = 1e3 * PacelineConfig().router.timeout_s
    return {
        "forwards": len(times),
        "p50_ms": float(np.percentile(times, 50)),
        "p99_ms": float(np.percentile(times, 99)),
        "time_box_ms": box,
        "beyond_time_box": float(np.mean(np.array(times) > box)),
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
    while scoring.run_once(_Static(list(drafts)), evaluator):
        pass
    table = scoring.table()
    return table["weights"], table | {"seconds": time.perf_counter() - began}


def matrix(
    runner: Runner, prompts: Mapping[str, Sequence[Prompt]], experts: Sequence[str], batch: int
) -> dict[str, dict[str, Any]]:
    """Topic to expert to acceptance and speed, experts in turn on the same prompts."""
    found: dict[str, dict[str, Any]] = {}
    for number, (topic, own) in enumerate(prompts.items()):
        warm_up = own[:batch]
        runner.run(warm_up, [GENERAL] * len(warm_up), batch)
        found[topic] = {}
        for expert in rotation([*experts, PLAIN], number):
            run = runner.run(own, [expert] * len(own), batch)
            found[topic][expert] = run.facts()
    return found


def policies(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    classifier: TopicClassifier,
    experts: Sequence[str],
    weights: Mapping[str, Mapping[str, float]],
    lengths: Mapping[str, Mapping[str, float]],
) -> dict[str, list[str]]:
    """Policy to the draft of every prompt."""
    least = router_confidence(PacelineConfig())
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
    runner: Runner, prompts: Sequence[Prompt], drafts: Mapping[str, Sequence[str]], plan: Plan
) -> dict[str, Any]:
    """Every policy on every block of the mixed stream, in turning order."""
    size = len(prompts) // plan.blocks
    timings: list[Timing] = []
    runs: dict[str, list[Routed]] = {name: [] for name in drafts}
    for number in range(plan.blocks):
        part = slice(number * size, (number + 1) * size)
        for name in rotation(list(drafts), number):
            run = runner.run(prompts[part], drafts[name][part], plan.batch)
            runs[name].append(run)
            timings.append(Timing(name, number, "mixed", run.num_tokens, run.seconds))
    found = {}
    for name, own in runs.items():
        stats = [s for run in own for s in run.stats]
        found[name] = {
            "tokens_per_s": geometric_mean(list(topic_rates(timings, name).values())),
            "speed_to_general": asdict(paired_ratio(timings, name, GENERAL)),
            "mean_acceptance_length": mean_length(stats),
            "right": float(np.mean([d == p.topic for d, p in zip(drafts[name], prompts)])),  # noqa: B905
            "answers_that_differ": sum(
                a != b
                for run, plain in zip(own, runs[PLAIN], strict=True)
                for a, b in zip(run.outputs, plain.outputs, strict=True)
            ),
        }
    return found


def bench(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Everything; returns the figures."""
    texts = bench_texts()
    folder = experts_dir(options.out, None)
    missing = [topic for topic in texts if facts_of(folder / topic) is None]
    if missing:
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
    runner = Runner(engine, plan.max_tokens)
    every = {topic: own[: plan.needed] for topic, own in encode(tokenizer, texts).items()}
    primer = [p for own in every.values() for p in own[: plan.primer]]
    measured = {topic: own[plan.primer :] for topic, own in every.items()}
    flat = [text for own in texts.values() for text in own]
    classifier = TopicClassifier(str(MODELS_DIR / "router"))
    cost = router_cost(classifier, [flat[p.number] for own in measured.values() for p in own])
    records = runner.run(primer, [GENERAL] * len(primer), plan.batch, store=True).records
    weights, table = hedge_weights(drafts, records)
    found = matrix(runner, measured, list(drafts), plan.batch)
    lengths = {
        topic: {e: own[e]["mean_acceptance_length"]["mean"] for e in own if e != PLAIN}
        for topic, own in found.items()
    }
    mixed = [p for group in zip(*measured.values(), strict=False) for p in group]
    chosen = policies(mixed, flat, classifier, list(drafts), weights, lengths)
    alone = runner.run(mixed[:8], chosen["oracle"][:8], 1)
    seconds = alone.seconds / 8
    return {
        "machine": machine.facts(),
        "settings": asdict(plan) | {"tokens": options.tokens, "threads": options.threads},
        "router": cost
        | {"share_of_a_request": cost["p50_ms"] / 1e3 / (seconds + cost["p50_ms"] / 1e3)},
        "request_alone_s": seconds,
        "scorer": table,
        "matrix": found,
        "policies": stream(runner, mixed, chosen, plan),
        "draft_failures": engine.draft_failures,
    }


def show(console: Console, figures: dict[str, Any]) -> None:
    """Tables for people."""
    cost = figures["router"]
    console.print(
        f"router: p50 {cost['p50_ms']:.1f} ms, p99 {cost['p99_ms']:.1f} ms a request, "
        f"{cost['share_of_a_request']:.1%} of one of {figures['request_alone_s']:.2f} s alone; "
        f"{cost['beyond_time_box']:.1%} beyond the time box of {cost['time_box_ms']:.0f} ms"
    )
    experts = list(next(iter(figures["matrix"].values())))
    for name, cell in (
        ("mean acceptance length", lambda f: _spread(f["mean_acceptance_length"])),
        ("tokens/s", lambda f: f"{f['tokens_per_s']:.0f}"),
    ):
        _print_matrix(console, name, experts, figures["matrix"], cell)
    table = Table("policy", "acceptance length", "tokens/s", "to general", "right", "differ")
    for name, facts in figures["policies"].items():
        ratio = facts["speed_to_general"]
        bounds = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
        table.add_row(
            name,
            _spread(facts["mean_acceptance_length"]),
            f"{facts['tokens_per_s']:.0f}",
            f"{ratio['ratio']:.2f}{bounds}",
            f"{facts['right']:.0%}",
            str(facts["answers_that_differ"]),
        )
    console.print(table)
    console.print(f"draft failures: {figures['draft_failures']}")


def _print_matrix(
    console: Console,
    name: str,
    experts: Sequence[str],
    rows: Mapping[str, Mapping[str, Any]],
    cell: Callable[[Any], str],
) -> None:
    table = Table(f"{name}: topic", *sorted(experts))
    for topic, own in rows.items():
        table.add_row(topic, *(cell(own[expert]) for expert in sorted(experts)))
    console.print(table)


def _spread(facts: Mapping[str, float]) -> str:
    if facts["mean"] == 0.0:
        return ""
    half = max(facts["high"] - facts["mean"], facts["mean"] - facts["low"])
    return f"{facts['mean']:.2f} ±{half:.2f}"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few prompts, short answers")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=4, help="drafted per round")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    logging.disable_progress_bar()
    plan = (
        Plan(primer=6, per_topic=12, blocks=3, max_tokens=48)
        if options.quick
        else Plan(primer=12, per_topic=48, blocks=12, max_tokens=96)
    )
    figures = bench(options, plan)
    show(Console(), figures)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "routing.json"
    file.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    Console().print(f"figures: {file}")


if __name__ == "__main__":
    main()
