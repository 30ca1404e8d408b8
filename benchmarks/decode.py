"""Paceline's decoding against transformers' own: same prompts, target, drafts, dtype, threads.

make bench-decode ARGS="--quick"
make bench-decode ARGS="--quick --target smollm2"
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import experts
import generate
import harness
import phases
import torch
from decoding import (
    Block,
    Cell,
    Outcome,
    Served,
    Variant,
    make_blocks,
    make_full_blocks,
    run_cell,
    summary,
)
from models import SMALL, TARGET, find_models, load_engine
from prompts import MAX_PROMPT_TOKENS, measured_prompts, source_of
from tqdm import tqdm
from transformers.utils import logging

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import (
    load_causal_lm,
    load_tokenizer,
    resolve_device,
    target_dtype,
)
from paceline.actors.weights.eagle import is_eagle
from paceline.cluster.session import thread_environment
from paceline.deploy.demo.prompts import TOPICS

AUTO, OFF, GENERATE = "paceline auto", "paceline off", "generate"
FIXED = (2, 4, 6)
ASSISTED_CONSTANT = range(1, 9)


class Bench:
    """Models, variants and prompts of one run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        device = resolve_device("auto")
        target, paths = models(options)
        self.dtype = target_dtype(options.dtype, device, target)
        tokenizer = load_tokenizer(target)
        self.prompts = {t: measured_prompts(options.data, t, tokenizer) for t in TOPICS}

        def load(path: Path) -> Any:
            return load_causal_lm(path, self.dtype, device, attention="sdpa")

        def engine(k: int | None) -> Engine:
            return load_engine(
                {topic: str(path) for topic, path in paths.items()},
                threads=options.threads,
                k=k,
                target=target,
                dtype=str(self.dtype).removeprefix("torch."),
                max_num_seqs=max(options.batches),
                max_model_len=MAX_PROMPT_TOKENS + options.max_tokens + 16,
                cuda_graphs=not options.no_cuda_graphs,
                suffix="request",  # as the server for prompts that are not recorded
            )[0]

        self.target = load(target)
        # transformers cannot assist with a draft that reads hidden states
        self.experts = {t: load(path) for t, path in paths.items() if not is_eagle(path)}
        # An engine for each: rounds of a fixed k must not teach auto's controller.
        fixed, auto = engine(0), engine(None)
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
        size = self.options.pilot
        spare = {topic: own[-size:] for topic, own in self.prompts.items()}
        variants = {k: self.assisted(k) for k in ASSISTED_CONSTANT}
        blocks = make_blocks(spare, size // 2, 1)
        outcome = self.run(Cell(1, temperature), list(variants.values()), blocks)
        rates = {
            k: harness.geometric_mean(
                list(harness.topic_rates(outcome.timings, variant.name).values())
            )
            for k, variant in variants.items()
        }
        return max(rates, key=lambda k: rates[k]), rates

    def run(self, cell: Cell, variants: Sequence[Variant], blocks: Sequence[Block]) -> Outcome:
        """Every variant on every block."""
        return run_cell(cell, variants, blocks, self.options.max_tokens)

    def measure(self, cell: Cell, best_k: int) -> dict[str, Any]:
        """One cell's figures; ``best_k`` is assisted generation's, at batch 1."""
        own = self.options
        assisted = cell.batch == 1 and self.experts
        other: Variant = self.assisted(best_k) if assisted else self.continuous
        variants: list[Variant] = [self.generate, self.off, self.auto, *self.fixed, other]
        size, per_topic = max(own.block, cell.batch), own.blocks
        if cell.batch == 1:
            per_topic = -(-own.prompts // (len(self.prompts) * own.block))
        outcome = self.run(cell, variants, make_blocks(self.prompts, size, per_topic))
        pairs = [(AUTO, GENERATE), (OFF, GENERATE), (AUTO, OFF), (AUTO, other.name)]
        return summary(cell, outcome, pairs, GENERATE)

    def pair(self, cell: Cell) -> dict[str, Any]:
        """Ratio of the speed of auto and off, by blocks that keep all rows at work."""
        blocks = make_full_blocks(self.prompts, cell.batch, self.options.pairs)
        outcome = self.run(cell, [self.auto, self.off], blocks)
        return asdict(cell) | asdict(harness.paired_ratio(outcome.timings, AUTO, OFF))

    def phases(self) -> dict[str, Any]:
        """A round's time by phase at batch 1, greedy, with drafts of the controller and none."""
        block = [p for own in self.prompts.values() for p in own[:2]]
        found = {}
        for variant in (self.auto, self.off):
            with phases.watched(self.engines[variant.name]) as clock:
                variant.run(block, 1, 0.0, self.options.max_tokens)
            split = phases.shares(clock.seconds)
            found[variant.name] = {"shares": split, "overhead": phases.overhead(split)}
        return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.arguments(__doc__, "quick", "target", "data", "dtype", "out")
    add = parser.add_argument
    add("--experts", type=Path, help="folder of a draft per topic")
    add("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32], help="prompts at once")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="0 is greedy")
    add("--max-tokens", type=int, default=64, help="of an answer")
    add("--threads", type=int, default=os.cpu_count() or 1)
    add("--prompts", type=int, default=64, help="at batch 1, over all topics")
    add("--block", type=int, default=4, help="prompts of a block, at least one per row")
    add("--blocks", type=int, default=2, help="per topic, at larger batches")
    add("--pairs", type=int, default=20, help="of auto and off per batch")
    add("--pilot", type=int, default=4, help="prompts per topic that choose assisted's k")
    add("--no-cuda-graphs", action="store_true", help="launch kernels one by one")
    quick = {"batches": [1, 8], "max_tokens": 48, "prompts": 16, "block": 2, "blocks": 1}
    return harness.parsed(parser, argv, **quick, pairs=4, pilot=2)


def models(options: argparse.Namespace) -> tuple[Path, dict[str, Path]]:
    """Folder of the target, and of each topic's draft."""
    target, folder = TARGET, options.experts or experts.folder_of(options.out, options.data)
    if options.target != SMALL:
        target, draft = find_models(options.target)
        if options.experts is None:
            return target, dict.fromkeys(TOPICS, draft)
    return target, {topic: folder / topic for topic in TOPICS}


def make_experts(options: argparse.Namespace) -> None:
    """Train missing or stale experts in another process: training loads much."""
    if options.target != SMALL or options.experts is not None:
        return
    folder = experts.folder_of(options.out, options.data)
    if all(experts.is_usable(folder / topic, topic, options.data) for topic in TOPICS):
        return
    command = [sys.executable, experts.__file__]
    command += ["--out", str(options.out), "--threads", str(options.threads)]
    subprocess.run(command + (["--data", str(options.data)] if options.data else []), check=True)


def run(bench: Bench) -> dict[str, Any]:
    """Measure everything, in order."""
    cells, pilots = [], {}
    own = bench.options
    every = [Cell(batch, temperature) for batch in own.batches for temperature in own.temperatures]
    for cell in tqdm(every, desc="cells"):
        best_k, rates = 0, {}
        if cell.batch == 1 and bench.experts:
            best_k, rates = bench.pilot(cell.temperature)
            pilots[f"{cell.temperature:g}"] = {"best_k": best_k, "rates": rates}
        cells.append(bench.measure(cell, best_k))
    return {
        "assisted_pilot": pilots,
        "cells": cells,
        "pairs": [bench.pair(cell) for cell in sorted(every, key=lambda c: c.temperature)],
        "phases": bench.phases(),
    }


def rows_of(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per cell and variant, with its ratio to the first variant that it was paired with."""
    return [
        {"cell": f"{c['batch']}, {c['temperature']:g}"}
        | {"variant": name}
        | {key: facts[key] for key in ("tokens_per_s", "mean_acceptance_length")}
        | {
            "auto, off / it": "; ".join(
                harness.interval(c["ratios"][r]) for r in c["ratios"] if r.endswith(f"/ {name}")
            )
        }
        | {"differ": facts.get("answers_that_differ")}
        for c in cells
        for name, facts in c["variants"].items()
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if float32 answers differ."""
    options = parse(argv)
    make_experts(options)
    wanted = thread_environment(options.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)  # read once, by every pool
        os.execv(sys.executable, [sys.executable, *sys.argv])
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    before, bench = harness.machine(), Bench(options)
    dtype = str(bench.dtype).removeprefix("torch.")
    figures: dict[str, Any] = {
        "machine": before,
        "settings": harness.written(options) | {"data": source_of(options.data), "dtype": dtype},
        **run(bench),
        "load_average_after": harness.machine()["load_average"],
    }
    harness.write(options.out / "decode.json", figures)
    harness.show("Decoding: batch, temperature", rows_of(figures["cells"]))
    harness.show("Speculation on (auto) over off, interleaved pairs", figures["pairs"])
    for name, facts in figures["phases"].items():
        harness.say(
            f"{name}: {facts['overhead']:.1%} of a round outside forwards: {facts['shares']}"
        )
    differ = sum(row["differ"] or 0 for row in rows_of(figures["cells"]))
    harness.say(f"answers unlike generate's: {differ}")
    return int(dtype == "float32" and differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
