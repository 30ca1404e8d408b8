"""Medusa heads against drafts: one engine, one target, the same answers learnt from.

    PYTHONPATH=benchmarks python -m online.medusa --quick --data FOLDER

The general draft as it comes, one draft and a draft per topic, one set of heads and a set per
topic: all but the first have learnt from the same answers in as many passes. On one thread,
seconds are the processor's: other processes then disturb little. Figures go to
out/bench/online/medusa.json, tables beside them; what was taught is kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from cells import Block, Cell, Outcome, make_blocks, run_cell, summary
from expert_cache import DRAFT, TARGET, facts_of
from prompts import Prompt
from rich.console import Console
from runs import Variant
from served import Served
from tqdm import tqdm
from transformers.utils import logging

from online.bench import QUICK, Bench, Sizes
from online.fragments import command_of, published_section, take_published
from online.medusa_tables import section
from online.rows import label
from online.serving import Serving
from online.store import Store
from online.taught import ALL, School, Teaching
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.deploy.demo.prompts import TOPICS

PLAIN = "plain"
GENERAL, ONE_DRAFT, EXPERTS = "general", "one draft", "draft per topic"
ONE_SET, SETS = "one set of heads", "heads per topic"
MAX_TOKENS_LIMIT = 512


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run: prompts of a block, blocks per topic, tokens of an answer, numbers k."""

    block: int
    blocks: int
    max_tokens: int
    ks: tuple[int, ...]
    temperatures: tuple[float, ...]


def draft_names(kind: str) -> Callable[[str], str]:
    """The engine's name of a kind's draft for a topic."""
    named = {GENERAL: lambda _: GENERAL, ONE_DRAFT: lambda _: "one-draft"}
    named |= {ONE_SET: lambda _: "one-set", SETS: lambda topic: f"heads-{topic}"}
    return named.get(kind, lambda topic: topic)


def load(school: School, topics: Sequence[str], threads: int, kinds: str, k: int | None) -> Engine:
    """An engine for one request at a time, with drafts, heads or both."""
    drafts = {GENERAL: DRAFT, "one-draft": school.folder("draft", ALL)}
    drafts |= {topic: school.folder("draft", topic) for topic in topics}
    heads = {"one-set": school.folder("heads", ALL)}
    heads |= {f"heads-{topic}": school.folder("heads", topic) for topic in topics}
    settings = TargetSettings(
        str(TARGET),
        {name: str(path) for name, path in drafts.items()} if "drafts" in kinds else {},
        {name: str(path) for name, path in heads.items()} if "heads" in kinds else {},
        num_threads=threads,
        max_num_seqs=1,
        max_model_len=MAX_TOKENS_LIMIT,
        num_speculative_tokens=k,
        prefix_cache=False,  # a prompt comes back for every variant
        seed=1,
    )
    return build_engine(settings)[0]


def make_variants(
    school: School, topics: Sequence[str], threads: int, ks: Sequence[int]
) -> tuple[list[Variant], list[Engine]]:
    """Plain decoding first; fixed k in one engine, the controllers each in one of its own."""
    both = load(school, topics, threads, "drafts heads", 0)
    clock = time.process_time if threads == 1 else time.perf_counter
    variants: list[Variant] = [Served(PLAIN, both, 0, draft_names(GENERAL), clock)]
    for kind in (GENERAL, ONE_DRAFT, EXPERTS, ONE_SET, SETS):
        variants += [Served(f"{kind}, k={k}", both, k, draft_names(kind), clock) for k in ks]
    drafts, heads = (load(school, topics, threads, kinds, None) for kinds in ("drafts", "heads"))
    for kind, engine in ((EXPERTS, drafts), (SETS, heads)):
        variants.append(Served(f"{kind}, auto", engine, None, draft_names(kind), clock))
    return variants, [both, drafts, heads]


def prompts_of(bench: Bench, topics: Sequence[str]) -> dict[str, list[Prompt]]:
    """The tests' prompts, which nothing was taught on."""
    found: dict[str, list[Prompt]] = {}
    for topic in topics:
        at = sum(map(len, found.values()))
        found[topic] = [
            Prompt(at + i, topic, q.token_ids) for i, q in enumerate(bench.questions(topic).test)
        ]
    return found


def measure(
    cell: Cell, variants: Sequence[Variant], blocks: Sequence[Block], max_tokens: int
) -> dict[str, Any]:
    """A cell's figures, with acceptance by topic and by drafted position."""
    with tqdm(total=len(blocks) * len(variants), desc=cell.label) as bar:
        outcome: Outcome = run_cell(cell, variants, blocks, max_tokens, lambda: bar.update())
    pairs = [(variant.name, PLAIN) for variant in variants if variant.name != PLAIN]
    figures = summary(cell, outcome, pairs, PLAIN)
    for name, facts in figures["variants"].items():
        facts["position_rates"] = outcome.drafted[name].position_rates()
        facts["rounds"] = outcome.drafted[name].rounds
        facts["mean_acceptance_length_by_topic"] = {
            topic: drafted.mean_acceptance_length
            for (variant, topic), drafted in outcome.by_topic.items()
            if variant == name
        }
    return figures


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer answers, passes and prompts")
    parser.add_argument("--data", help="folder of rows, or hf; default: generated prompts")
    parser.add_argument("--topics", nargs="+", default=list(TOPICS))
    parser.add_argument("--answers", type=int, help="taught on, per topic (1000; quick: 200)")
    parser.add_argument("--passes", type=int, help="over them (6; quick: 4)")
    parser.add_argument("--shared-output", action="store_true", help="heads use the target's")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="results go to online/ in it"
    )
    take_published(parser, "medusa", "heads and drafts")
    parser.add_argument("--teach", action="store_true", help="only teach what is missing")
    return parser.parse_args(argv)


def bench_of(options: argparse.Namespace, say: Callable[[str], None]) -> tuple[Bench, Teaching]:
    """Where answers come from, and what is done with them."""
    sizes = QUICK if options.quick else Sizes()
    teaching = Teaching(
        answers=options.answers or sizes.stream,
        passes=options.passes or (4 if options.quick else Teaching().passes),
        own_output=not options.shared_output,
    )
    store = Store(options.out / "online")
    return Bench(store, options.data, sizes, Serving(), threads=options.threads, say=say), teaching


def plan_of(options: argparse.Namespace) -> Plan:
    """What is measured."""
    temperatures = tuple(options.temperatures)
    if options.quick:
        return Plan(2, 2, 48, (2, 4), temperatures)
    return Plan(4, 6, 64, (1, 2, 3, 4), temperatures)


def teach(school: School, threads: int) -> None:
    """Teach in this process."""
    torch.set_num_threads(threads)
    prepare_environment()
    forbid_compiling()
    school.teach()


def facts_taught(school: School, topics: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What is known of everything that was taught."""
    found = {}
    for kind in ("draft", "heads"):
        for topic in (*topics, ALL):
            facts = facts_of(school.folder(kind, topic))
            assert facts is not None
            found[f"{kind} {topic}"] = facts["figures"]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Teach what is missing, measure, write; 1 where drafts failed."""
    options, console = parse(argv), Console()
    if (kept := published_section("medusa", options.published)) is not None:
        console.print(f"{kept} is there: nothing is run", soft_wrap=True)
        return 0
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    bench, teaching = bench_of(options, console.print)
    school = School(bench, options.topics, teaching)
    if options.teach:
        teach(school, options.threads)
        return 0
    if school.missing():  # training loads much that a bench must not
        arguments = list(sys.argv[1:] if argv is None else argv)
        subprocess.run([sys.executable, "-m", "online.medusa", *arguments, "--teach"], check=True)
    torch.set_num_threads(options.threads)
    before, plan = machine.facts(), plan_of(options)
    prompts = prompts_of(bench, options.topics)
    variants, engines = make_variants(school, options.topics, options.threads, plan.ks)
    gc.freeze()
    blocks = make_blocks(prompts, plan.block, plan.blocks)
    figures: dict[str, Any] = {
        "machine": before,
        "settings": asdict(plan)
        | {"teaching": asdict(teaching), "source": label(options.data), "threads": options.threads},
        "taught": facts_taught(school, options.topics),
        "cells": [
            measure(Cell(1, t), variants, blocks, plan.max_tokens) for t in plan.temperatures
        ],
        "draft_failures": sum(engine.draft_failures for engine in engines),
    }
    figures["machine"]["load_average_after"] = [round(value, 2) for value in os.getloadavg()]
    path = options.out / "online" / "medusa.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    text = section(figures, command_of("bench-medusa", argv))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, soft_wrap=True)
    return int(figures["draft_failures"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
