"""Paceline's decoding against transformers' own: same prompts, target, drafts, dtype, threads.

make bench-decode ARGS="--quick"
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import generate
import phases
import torch
from decoding import Cell, Served, Variant, load_engine, make_blocks, run_cell, run_pairs, summary
from expert_cache import TARGET, experts_dir, facts_of, recipe_of
from harness import (
    arguments,
    geometric_mean,
    interval,
    machine,
    peak_rss_mib,
    rss_mib,
    say,
    show,
    topic_rates,
    write,
)
from prompts import MAX_PROMPT_TOKENS, bench_texts, encode, training_texts
from tqdm import tqdm
from transformers.utils import logging

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)
from paceline.actors.weights.eagle import is_eagle
from paceline.cluster.session import thread_environment
from paceline.deploy.config.config import load_config
from paceline.deploy.draft_store import fetch_models

AUTO, OFF, GENERATE = "paceline auto", "paceline off", "generate"
FIXED = (2, 4, 6)
ASSISTED_CONSTANT = range(1, 9)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        batches: prompts at once.
        temperatures: 0 is greedy.
        max_tokens: of an answer.
        prompts: at batch 1, over all topics.
        block: prompts per block, at least one per row.
        blocks: per topic, at larger batches.
        pairs: of auto and off per batch.
        pilot: prompts per topic that choose assisted generation's k.
    """

    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    prompts: int
    block: int
    blocks: int
    pairs: int
    pilot: int


class Bench:
    """Models, variants and prompts of one run."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        self.plan, self.memory = plan, {"start": rss_mib()}
        device = resolve_device("auto")
        self.dtype = resolve_dtype(options.dtype, device)
        target, paths = models(options)
        self.prompts = encode(load_tokenizer(target), bench_texts(options.data))

        def load(path: Path) -> Any:
            return load_causal_lm(path, self.dtype, device, attention="sdpa")

        def engine(k: int | None) -> Engine:
            return load_engine(
                {topic: str(path) for topic, path in paths.items()},
                threads=options.threads,
                k=k,
                target=target,
                dtype=str(self.dtype).removeprefix("torch."),
                max_num_seqs=max(plan.batches),
                max_model_len=MAX_PROMPT_TOKENS + plan.max_tokens + 16,
            )[0]

        self.target = load(target)
        # transformers cannot assist with a draft that reads hidden states
        self.experts = {t: load(path) for t, path in paths.items() if not is_eagle(path)}
        self.memory["with transformers' models"] = rss_mib()
        # An engine for each: rounds of a fixed k must not teach auto's controller.
        fixed, auto = engine(0), engine(None)
        self.memory["with two engines"] = rss_mib()
        self.engines = {AUTO: auto, OFF: fixed}
        self.generate = generate.Generate(self.target)
        self.continuous = generate.Continuous(load(target))
        self.auto, self.off = Served(AUTO, auto, None), Served(OFF, fixed, 0)
        self.fixed = [Served(f"paceline k={k}", fixed, k) for k in FIXED]
        gc.freeze()  # collections between runs can skip what is loaded

    def assisted(self, k: int) -> generate.Assisted:
        """Assisted generation with a constant number of draft tokens."""
        return generate.Assisted(f"assisted k={k}", self.target, self.experts, tokens=k)

    def pilot(self, temperature: float) -> tuple[int, dict[int, float]]:
        """Best constant k of assisted generation on prompts that are not measured, and all."""
        spare = {topic: own[-self.plan.pilot :] for topic, own in self.prompts.items()}
        variants = {k: self.assisted(k) for k in ASSISTED_CONSTANT}
        blocks = make_blocks(spare, self.plan.pilot // 2, 1)
        own = list(variants.values())
        timings = run_cell(Cell(1, temperature), own, blocks, self.plan.max_tokens).timings
        rates = {
            k: geometric_mean(list(topic_rates(timings, variant.name).values()))
            for k, variant in variants.items()
        }
        return max(rates, key=lambda k: rates[k]), rates

    def measure(self, cell: Cell, best_k: int) -> dict[str, Any]:
        """One cell's figures; ``best_k`` is assisted generation's, at batch 1."""
        plan = self.plan
        assisted: list[Variant] = []
        if cell.batch == 1 and self.experts:
            assisted = [self.assisted(best_k)]
        others = assisted or [self.continuous]
        variants: list[Variant] = [self.generate, self.off, self.auto, *self.fixed, *others]
        size = max(plan.block, cell.batch)
        single = -(-plan.prompts // (len(self.prompts) * plan.block))
        per_topic = single if cell.batch == 1 else plan.blocks
        blocks = make_blocks(self.prompts, size, per_topic, mixed=cell.mixed)
        outcome = run_cell(cell, variants, blocks, plan.max_tokens)
        pairs = [(AUTO, GENERATE), (OFF, GENERATE), (AUTO, OFF)]
        pairs += [(AUTO, variant.name) for variant in others]
        return summary(cell, outcome, pairs, GENERATE)

    def phases(self) -> dict[str, Any]:
        """A round's time by phase at batch 1, greedy, with drafts of the controller and none."""
        block = [p for own in self.prompts.values() for p in own[:2]]
        found = {}
        for variant in (self.auto, self.off):
            with phases.watched(self.engines[variant.name]) as clock:
                variant.run(block, 1, 0.0, self.plan.max_tokens)
            split = phases.shares(clock.seconds)
            found[variant.name] = {"shares": split, "overhead": phases.overhead(split)}
        return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "quick", "dtype", "out")
    parser.add_argument("--data", type=Path, help="folder of rows; default: generated prompts")
    parser.add_argument("--target", help="as target.path, with its own draft; default: small")
    parser.add_argument("--experts", type=Path, help="folder of a draft per topic")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-tokens", type=int, help="of an answer (64; quick: 48)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> Plan:
    """Plan of these options."""
    quick, temperatures = options.quick, tuple(options.temperatures)
    batches = tuple(options.batches or ((1, 8) if quick else (1, 4, 8, 16, 32)))
    if quick:
        return Plan(batches, temperatures, options.max_tokens or 48, 16, 2, 1, 4, 2)
    return Plan(batches, temperatures, options.max_tokens or 64, 64, 4, 2, 20, 4)


def is_usable(folder: Path, topic: str, data: Path | None) -> bool:
    """Whether a folder holds an expert of today's prompts and base, trained for any time."""
    recipe = (facts_of(folder) or {}).get("recipe", {})
    settings = recipe.get("settings", {})
    if "answers" not in settings:
        return False
    return bool(recipe == recipe_of(training_texts(settings["answers"], data)[topic], settings))


def models(options: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """Folder of the target, and of each topic's draft."""
    topics, target, folder = bench_texts(options.data), TARGET, options.experts
    if options.target is not None:
        config = fetch_models(load_config(None, {"target.path": options.target}), say)
        target = config.target_path
        if folder is None:
            return target, dict.fromkeys(topics, config.auto_draft)
    folder = folder or experts_dir(options.out, options.data)
    return target, {topic: folder / topic for topic in topics}


def make_experts(options: argparse.Namespace) -> None:
    """Train missing or stale experts in another process: training loads much."""
    if options.target is not None:
        return
    folder = experts_dir(options.out, options.data)
    if options.experts is not None or all(
        is_usable(folder / topic, topic, options.data) for topic in bench_texts(options.data)
    ):
        return
    command = [sys.executable, str(Path(__file__).with_name("experts.py"))]
    command += ["--out", str(options.out), "--threads", str(options.threads)]
    subprocess.run(command + (["--data", str(options.data)] if options.data else []), check=True)


def run(bench: Bench) -> dict[str, Any]:
    """Measure everything, in order."""
    plan, cells = bench.plan, []
    pilots: dict[float, tuple[int, Mapping[int, float]]] = {}
    settings = [
        Cell(batch, temperature, mixed)
        for batch in plan.batches
        for temperature in plan.temperatures
        for mixed in ((False, True) if batch > 1 and temperature == 0 else (False,))
    ]
    for cell in tqdm(settings, desc="cells"):
        if cell.batch == 1 and bench.experts:
            pilots[cell.temperature] = bench.pilot(cell.temperature)
        best_k = pilots[cell.temperature][0] if cell.temperature in pilots else 0
        cells.append(bench.measure(cell, best_k))
    return {
        "assisted_pilot": {f"{t:g}": {"best_k": k, "rates": r} for t, (k, r) in pilots.items()},
        "cells": cells,
        "pairs": [
            run_pairs(bench.auto, bench.off, bench.prompts, Cell(b, t), plan.pairs, plan.max_tokens)
            for t in plan.temperatures
            for b in plan.batches
        ],
        "phases": bench.phases(),
        "draft_failures": sum(engine.draft_failures for engine in bench.engines.values()),
    }


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per cell and variant, with its ratio to the first variant that it was paired with."""
    return [
        {"cell": f"{c['batch']}, {c['temperature']:g}{', mixed' if c['mixed'] else ''}"}
        | {"variant": name}
        | {key: facts[key] for key in ("tokens_per_s", "mean_acceptance_length")}
        | {
            "auto, off / it": "; ".join(
                interval(c["ratios"][r]) for r in c["ratios"] if r.endswith(f"/ {name}")
            )
        }
        | {"differ": facts.get("answers_that_differ")}
        for c in cells
        for name, facts in c["variants"].items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if drafts failed or float32 answers differ."""
    options = parse(argv)
    make_experts(options)
    wanted = thread_environment(options.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)  # read once, by every pool
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    before, bench = machine(), Bench(options, plan_of(options))
    dtype = str(bench.dtype).removeprefix("torch.")
    source = "self-written" if options.data is None else options.data.name
    figures: dict[str, Any] = {
        "machine": before,
        "settings": asdict(bench.plan)
        | {"quick": options.quick, "dtype": dtype, "threads": options.threads, "source": source},
        **run(bench),
        "memory_mib": bench.memory | {"peak": peak_rss_mib()},
        "load_average_after": machine()["load_average"],
    }
    write(options.out / "decode.json", figures)
    show("Decoding: batch, temperature", rows_of(figures["cells"]))
    show("Speculation on (auto) over off, interleaved pairs", figures["pairs"])
    for name, facts in figures["phases"].items():
        say(f"{name}: {facts['overhead']:.1%} of a round outside forwards: {facts['shares']}")
    differ = sum(row["differ"] or 0 for row in rows_of(figures["cells"]))
    say(f"draft failures: {figures['draft_failures']}; answers unlike generate's: {differ}")
    return int((dtype == "float32" and differ > 0) or figures["draft_failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
