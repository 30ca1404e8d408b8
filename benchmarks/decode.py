"""Paceline's decoding against transformers' own: same prompts, target, drafts, dtype, threads.

    make bench-decode ARGS="--quick"

Figures go to out/bench/decode.json, a chart beside them. docs/performance.md says what is
measured and how.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import peers
import phases
import torch
from cells import Cell, make_blocks, run_cell, run_pairs, summary
from expert_cache import TARGET, experts_dir, facts_of, recipe_of
from measure import geometric_mean, topic_rates
from prompts import MAX_PROMPT_TOKENS, Prompt, bench_texts, encode, training_texts
from report import AUTO, GENERATE, OFF, differing_answers, draw, show
from rich.console import Console
from runs import Variant
from served import Served, load_engine
from tqdm import tqdm
from transformers.utils import logging

from paceline.actors.engine.model_loader import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
)

FIXED = (2, 4, 6)
ASSISTED_CONSTANT = range(1, 9)
_EXPERTS = Path(__file__).with_name("experts.py")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    ``prompts`` is that of batch 1; larger batches have blocks of one prompt per row at least,
    ``blocks`` of them per topic.
    """

    batches: tuple[int, ...]
    temperatures: tuple[float, ...]
    max_tokens: int
    prompts: int
    block: int
    blocks: int
    pairs: int
    pilot: int

    def size(self, batch: int) -> int:
        """Prompts per block."""
        return max(self.block, batch)

    def per_topic(self, batch: int, topics: int) -> int:
        """Blocks per topic."""
        return -(-self.prompts // (topics * self.block)) if batch == 1 else self.blocks


class Bench:
    """Models, variants and prompts of one run."""

    def __init__(self, options: argparse.Namespace, plan: Plan) -> None:
        """Load everything; memory is noted on the way."""
        self.plan, self.memory = plan, {"start": machine.rss_mib()}
        device = resolve_device("auto")
        self.dtype = resolve_dtype(options.dtype, device)
        folder = options.experts or experts_dir(options.out, options.data)
        self.prompts = encode(load_tokenizer(TARGET), bench_texts(options.data))
        paths = {topic: folder / topic for topic in self.prompts}
        self.target = load_causal_lm(TARGET, self.dtype, device, attention="sdpa")
        self.experts = {
            topic: load_causal_lm(path, self.dtype, device, attention="sdpa")
            for topic, path in paths.items()
        }
        self.memory["with transformers' models"] = machine.rss_mib()
        limits: dict[str, Any] = {
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": options.threads,
            "rows": max(plan.batches),
            "max_model_len": MAX_PROMPT_TOKENS + plan.max_tokens + 16,
        }
        # An engine for each: what fixed k's rounds show must not teach auto's controller.
        fixed = load_engine(TARGET, paths, **limits, k=0)
        self.memory["with an engine"] = machine.rss_mib()
        auto = load_engine(TARGET, paths, **limits, k=None)
        self.memory["with two engines"] = machine.rss_mib()
        self.engines = {AUTO: auto, OFF: fixed}
        self.generate = peers.Generate(self.target)
        self.continuous = peers.Continuous(
            load_causal_lm(TARGET, self.dtype, device, attention="sdpa")
        )
        self.auto, self.off = Served(AUTO, auto, None), Served(OFF, fixed, 0)
        self.fixed = [Served(f"paceline k={k}", fixed, k) for k in FIXED]
        gc.freeze()  # what is loaded by now stays: the collections between runs can skip it

    def assisted(self, k: int) -> peers.Assisted:
        """Assisted generation with a constant number of draft tokens."""
        return peers.Assisted(f"assisted k={k}", self.target, self.experts, tokens=k)

    def assisted_schedules(self) -> list[Variant]:
        """Assisted generation's own two ways to choose the number."""
        both = (self.target, self.experts)
        return [
            peers.Assisted("assisted heuristic", *both, tokens=5, schedule="heuristic"),
            peers.Assisted("assisted default", *both, tokens=20, threshold=0.4),
        ]

    def pilot(self, temperature: float) -> tuple[int, dict[int, float]]:
        """The best constant k of assisted generation on prompts that are not measured."""
        rates = {}
        spare = {topic: own[-self.plan.pilot :] for topic, own in self.prompts.items()}
        cell = Cell(1, temperature)
        variants = {k: self.assisted(k) for k in ASSISTED_CONSTANT}
        blocks = make_blocks(spare, self.plan.pilot // 2, 1)
        with tqdm(total=len(blocks) * len(variants), desc="pilot", leave=False) as bar:
            out = run_cell(
                cell, list(variants.values()), blocks, self.plan.max_tokens, lambda: bar.update()
            )
        for k, variant in variants.items():
            rates[k] = geometric_mean(list(topic_rates(out.timings, variant.name).values()))
        return max(rates, key=lambda k: rates[k]), rates

    def measure(self, cell: Cell, best_k: int) -> dict[str, Any]:
        """One cell's figures; ``best_k`` is assisted generation's, at batch 1."""
        variants: list[Variant] = [self.generate, self.off, self.auto, *self.fixed]
        if cell.batch > 1:
            variants.append(self.continuous)
        assisted = [] if cell.batch > 1 else [self.assisted(best_k), *self.assisted_schedules()]
        variants += assisted
        size, topics = self.plan.size(cell.batch), len(self.prompts)
        per_topic = self.plan.per_topic(cell.batch, topics)
        blocks = make_blocks(self.prompts, size, per_topic, mixed=cell.mixed)
        with tqdm(total=len(blocks) * len(variants), desc=cell.label, leave=False) as bar:
            outcome = run_cell(cell, variants, blocks, self.plan.max_tokens, lambda: bar.update())
        pairs = [(AUTO, GENERATE), (OFF, GENERATE), (AUTO, OFF)]
        pairs += [(AUTO, variant.name) for variant in assisted]
        pairs += [(AUTO, self.continuous.name)] if cell.batch > 1 else []
        figures = summary(cell, outcome, pairs, GENERATE)
        if assisted:
            found = figures["variants"]
            best = max(assisted, key=lambda v: float(found[v.name]["tokens_per_s"])).name
            figures["best_assisted"] = best
        return figures

    def pairs(self, cell: Cell) -> dict[str, Any]:
        """Auto against off, many short pairs."""
        count = self.plan.pairs
        with tqdm(total=2 * (count + 1), desc=f"pairs, {cell.label}", leave=False) as bar:
            return run_pairs(
                self.auto,
                self.off,
                self.prompts,
                cell,
                count,
                self.plan.max_tokens,
                lambda: bar.update(),
            )

    def phases(self) -> dict[str, Any]:
        """A round's time by phase at batch 1, greedy, with drafts of the controller and none."""
        block: list[Prompt] = [p for own in self.prompts.values() for p in own[:2]]
        found = {}
        for variant in (self.auto, self.off):
            with phases.watched(self.engines[variant.name]) as clock:
                variant.run(block, 1, 0.0, self.plan.max_tokens)
            split = phases.shares(clock.seconds)
            found[variant.name] = {
                "seconds": clock.seconds,
                "shares": split,
                "overhead": phases.overhead(split),
            }
        return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batches 1 and 8, fewer prompts")
    parser.add_argument("--data", type=Path, help="folder of rows; default: generated prompts")
    parser.add_argument("--experts", type=Path, help="folder of a draft per topic")
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--max-tokens", type=int, help="of an answer (64; quick: 48)")
    parser.add_argument("--prompts", type=int, help="at batch 1, over all topics (64)")
    parser.add_argument("--pairs", type=int, help="of auto and off per batch (20)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    return parser.parse_args(argv)


def plan_of(options: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    quick = options.quick
    return Plan(
        batches=tuple(options.batches or ((1, 8) if quick else (1, 4, 8, 16, 32))),
        temperatures=tuple(options.temperatures),
        max_tokens=options.max_tokens or (48 if quick else 64),
        prompts=options.prompts or (16 if quick else 64),
        block=2 if quick else 4,
        blocks=1 if quick else 2,
        pairs=options.pairs or (4 if quick else 20),
        pilot=2 if quick else 4,
    )


def stands(folder: Path, topic: str, data: Path | None) -> bool:
    """Whether an expert is there that its own settings would give again, of whatever length."""
    recipe = (facts_of(folder) or {}).get("recipe", {})
    settings = recipe.get("settings", {})
    if "answers" not in settings:
        return False
    return bool(recipe == recipe_of(training_texts(settings["answers"], data)[topic], settings))


def make_experts(options: argparse.Namespace) -> None:
    """Have experts made that are missing or stale: training loads much that a bench must not."""
    if options.experts is not None:
        return
    folder = experts_dir(options.out, options.data)
    if all(stands(folder / topic, topic, options.data) for topic in bench_texts(options.data)):
        return
    command = [sys.executable, str(_EXPERTS), "--out", str(options.out)]
    command += ["--threads", str(options.threads)]
    subprocess.run(command + (["--data", str(options.data)] if options.data else []), check=True)


def run(bench: Bench) -> dict[str, Any]:
    """Everything, in order."""
    plan, cells = bench.plan, []
    pilots: dict[float, tuple[int, Mapping[int, float]]] = {}
    settings = [
        Cell(batch, temperature, mixed)
        for batch in plan.batches
        for temperature in plan.temperatures
        for mixed in ((False, True) if batch > 1 and temperature == 0 else (False,))
    ]
    for cell in tqdm(settings, desc="cells"):
        if cell.batch == 1:
            pilots[cell.temperature] = bench.pilot(cell.temperature)
        best_k = pilots[cell.temperature][0] if cell.batch == 1 else 0
        cells.append(bench.measure(cell, best_k))
    return {
        "assisted_pilot": {f"{t:g}": {"best_k": k, "rates": r} for t, (k, r) in pilots.items()},
        "cells": cells,
        "pairs": [bench.pairs(Cell(b, t)) for t in plan.temperatures for b in plan.batches],
        "phases": bench.phases(),
        "draft_failures": sum(engine.draft_failures for engine in bench.engines.values()),
    }


def _fix_threads(threads: int) -> None:
    """Start over where OpenMP read another number: threads that peers start go by it."""
    if os.environ.get("OMP_NUM_THREADS") != str(threads):
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(threads)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 where drafts failed or float32 answers differ."""
    options = parse(argv)
    plan = plan_of(options)
    make_experts(options)
    _fix_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    before = machine.facts()
    bench = Bench(options, plan)
    dtype = str(bench.dtype).removeprefix("torch.")
    figures: dict[str, Any] = {
        "machine": before,
        "settings": asdict(plan)
        | {
            "quick": options.quick,
            "dtype": dtype,
            "threads": options.threads,
            "source": "self-written" if options.data is None else options.data.name,
        },
        **run(bench),
    }
    figures["memory_mib"] = bench.memory | {"peak": machine.peak_rss_mib()}
    figures["machine"]["load_average_after"] = machine.facts()["load_average"]
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "decode.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    draw(path.with_suffix(".png"), figures)
    show(Console(), figures)
    wrong = dtype == "float32" and differing_answers(figures["cells"])[0] > 0
    return int(wrong or figures["draft_failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
