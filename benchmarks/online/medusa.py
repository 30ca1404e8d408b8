"""Medusa heads against drafts: one engine, one target, the same training answers.

    make bench-medusa ARGS="--quick --data FOLDER"

The general draft, one draft and a draft per topic, one set of heads and a set per topic: all but
the first are trained on the same answers in as many passes. On one thread, seconds are the
processor's. Trained drafts and heads are kept.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import Cell, Served, Variant, load_engine, make_blocks, run_cell, summary
from expert_cache import (
    DRAFT,
    TARGET,
    facts_of,
    is_current,
    note_facts,
    recipe_of,
    save_expert,
)
from harness import Store, arguments, interval, machine, say, show, write
from prompts import Prompt
from torch import Tensor
from transformers.utils import logging

from online.bench import QUICK, Bench, Sizes, prepare
from online.learner import MAX_LENGTH
from online.rows import label
from online.serving import Serving
from online.units import sides_of
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm, resolve_device, resolve_dtype
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.speculation.medusa import HeadsConfig, MedusaHeads, save_heads
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.medusa import (
    HeadTrainingSettings,
    head_accuracy,
    make_dataset,
    train_heads,
)
from paceline.actors.training.settings import DistillerSettings
from paceline.deploy.demo.prompts import TOPICS

ALL, PLAIN = "all", "plain"
GENERAL, ONE_DRAFT, EXPERTS = "general", "one draft", "draft per topic"
ONE_SET, SETS = "one set of heads", "heads per topic"


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts of a block, blocks per topic, tokens of an answer, numbers k, temperatures."""

    block: int
    blocks: int
    max_tokens: int
    ks: tuple[int, ...]
    temperatures: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Training:
    """Training of drafts and heads.

    Attributes:
        answers: of the target per topic, at most.
        passes: over the answers, for drafts and heads alike.
        num_heads: Medusa heads.
        own_output: whether every head has an output matrix of its own, as in the paper.
        learning_rates: of a draft: all passes but the last third, and that third.
        head_learning_rate: of the heads, falling to zero.
        micro_batch: records of a draft's step.
        held_out_fraction: of the prompts, for evaluation.
        seed: of the order.
    """

    answers: int = 1_000
    passes: int = 6
    num_heads: int = 4
    own_output: bool = True
    learning_rates: tuple[float, float] = (1.5e-3, 3e-4)
    head_learning_rate: float = 5e-3
    micro_batch: int = 16
    held_out_fraction: float = 0.1
    seed: int = 0


class Drafts:
    """Drafts and heads as folders, trained if they are missing."""

    def __init__(self, bench: Bench, topics: Sequence[str], training: Training) -> None:
        self._bench, self._topics, self._training = bench, list(topics), training

    def folder(self, kind: str, topic: str) -> Path:
        """Folder of a ``draft`` or of ``heads``; ``topic`` may be ``ALL``."""
        name = f"{label(self._bench.data)}-{kind}-{topic}-{self._training.answers}"
        return self._bench.store.folder / "taught" / name

    def recipe(self, kind: str, topic: str) -> dict[str, Any]:
        """All that decides the weights."""
        training = self._training
        keys = [q.key for t in self._own(topic) for q in self._bench.stream(t, training.answers)]
        settings = {"kind": kind, **asdict(training), "serving": asdict(self._bench.serving)}
        settings["learning_rates"] = list(training.learning_rates)
        return recipe_of(keys, settings)

    def wanted(self) -> list[tuple[str, str]]:
        """(kind, topic) of all drafts and heads."""
        return [(kind, t) for kind in ("draft", "heads") for t in (*self._topics, ALL)]

    def missing(self) -> list[tuple[str, str]]:
        """(kind, topic) of those that were not trained with these settings."""
        every = self.wanted()
        return [(k, t) for k, t in every if not is_current(self.folder(k, t), self.recipe(k, t))]

    def train(self) -> None:
        """Train what is missing; the process must have been made ready for DeepSpeed."""
        for kind, topic in self.missing():
            answers = [
                a for t in self._own(topic) for a in self._bench.frozen(t, self._training.answers)
            ]
            records = [answer.record for answer in answers]
            held_out, train = sides_of(records, self._training.held_out_fraction)
            make = self._draft if kind == "draft" else self._heads
            say(f"{kind} for {topic}: {make(topic, train, held_out)}")

    def _own(self, topic: str) -> list[str]:
        return self._topics if topic == ALL else [topic]

    def _draft(
        self, topic: str, train: Sequence[ReplayRecord], held_out: Sequence[ReplayRecord]
    ) -> dict[str, Any]:
        evaluator = self._bench.evaluator
        began = time.process_time()
        state = _distilled(train, self._training)
        seconds = round(time.process_time() - began, 1)
        before, after = (
            float(evaluator.score(s, held_out).acceptance.mean()) for s in (None, state)
        )
        figures = {"held_out_acceptance_before": before, "held_out_acceptance": after}
        figures |= {"records": len(train), "seconds": seconds}
        save_expert(self.folder("draft", topic), state, self.recipe("draft", topic), figures)
        return figures

    def _heads(
        self, topic: str, train: Sequence[ReplayRecord], held_out: Sequence[ReplayRecord]
    ) -> dict[str, Any]:
        training = self._training
        dtype = resolve_dtype("auto", resolve_device("auto"))
        target = load_causal_lm(TARGET, dtype, attention="sdpa")
        began = time.process_time()
        dataset, test = (
            make_dataset(
                target,
                [(r.prompt_token_ids.tolist(), r.output_token_ids.tolist()) for r in side],
                training.num_heads,
                MAX_LENGTH,
            )
            for side in (train, held_out)
        )
        output = target.get_output_embeddings().weight
        sizes = output.shape[1], output.shape[0]
        config = HeadsConfig(training.num_heads, *sizes, training.own_output)
        heads = MedusaHeads(config, output)
        settings: dict[str, Any] = {
            "learning_rate": training.head_learning_rate,
            "dtype": dtype,
            "seed": training.seed,
        }
        positions = HeadTrainingSettings(steps=1, **settings).positions
        steps = -(-len(dataset.labels) // positions) * training.passes
        train_heads(heads, dataset, HeadTrainingSettings(steps=steps, **settings))
        figures = {
            "held_out_accuracy": [round(share, 4) for share in head_accuracy(heads, test)],
            "records": len(train),
            "positions": len(dataset.labels),
            "steps": steps,
            "parameters": sum(p.numel() for p in heads.parameters()),
            "seconds": round(time.process_time() - began, 1),
        }
        folder = self.folder("heads", topic)
        shutil.rmtree(folder, ignore_errors=True)
        save_heads(folder, config, {k: v.to(dtype) for k, v in heads.state_dict().items()})
        note_facts(folder, self.recipe("heads", topic), figures)
        return figures


def _distilled(train: Sequence[ReplayRecord], training: Training) -> Mapping[str, Tensor]:
    """The general draft's weights after all passes over the records."""
    rng = np.random.default_rng(training.seed)
    last = max(1, training.passes // 3)
    state: dict[str, Tensor] | None = None
    for rate, passes in zip(training.learning_rates, (training.passes - last, last), strict=True):
        distiller = Distiller(str(DRAFT), DistillerSettings(learning_rate=rate))
        distiller.reset(state)
        for _ in range(passes):
            for batch in micro_batches(train, training.micro_batch, rng):
                distiller.micro_step(make_batch(batch, MAX_LENGTH))
        state = distiller.state_dict()
    assert state is not None
    return state


def draft_names(kind: str) -> Callable[[Prompt], str]:
    """Prompt to the engine's name of a kind's draft."""
    named: dict[str, Callable[[Prompt], str]] = {
        GENERAL: lambda _: GENERAL,
        ONE_DRAFT: lambda _: "one-draft",
        ONE_SET: lambda _: "one-set",
        SETS: lambda prompt: f"heads-{prompt.topic}",
    }
    return named.get(kind, lambda prompt: prompt.topic)


def make_variants(
    trained: Drafts, topics: Sequence[str], threads: int, ks: Sequence[int]
) -> tuple[list[Variant], list[Engine]]:
    """Plain decoding first; fixed k in one engine, the controllers each in one of its own."""
    drafts = {GENERAL: str(DRAFT), "one-draft": str(trained.folder("draft", ALL))}
    drafts |= {topic: str(trained.folder("draft", topic)) for topic in topics}
    heads = {"one-set": str(trained.folder("heads", ALL))}
    heads |= {f"heads-{topic}": str(trained.folder("heads", topic)) for topic in topics}

    def engine(drafts: dict[str, str], heads: dict[str, str], k: int | None) -> Engine:
        own: dict[str, Any] = {"heads": heads, "max_num_seqs": 1, "max_model_len": 512}
        return load_engine(drafts, threads=threads, k=k, **own)[0]

    both = engine(drafts, heads, 0)
    clock = time.process_time if threads == 1 else time.perf_counter
    variants: list[Variant] = [Served(PLAIN, both, 0, draft_names(GENERAL), clock)]
    for kind in (GENERAL, ONE_DRAFT, EXPERTS, ONE_SET, SETS):
        variants += [Served(f"{kind}, k={k}", both, k, draft_names(kind), clock) for k in ks]
    own = {EXPERTS: engine(drafts, {}, None), SETS: engine({}, heads, None)}
    for kind, auto in own.items():
        variants.append(Served(f"{kind}, auto", auto, None, draft_names(kind), clock))
    return variants, [both, *own.values()]


def prompts_of(bench: Bench, topics: Sequence[str]) -> dict[str, list[Prompt]]:
    """Prompts of the tests."""
    found: dict[str, list[Prompt]] = {}
    for topic in topics:
        at, test = sum(map(len, found.values())), bench.questions(topic).test
        found[topic] = [Prompt(at + i, topic, q.token_ids) for i, q in enumerate(test)]
    return found


def measure(
    cell: Cell, variants: Sequence[Variant], blocks: Sequence[Any], max_tokens: int
) -> dict[str, Any]:
    """A cell's figures, with ratios to plain decoding."""
    outcome = run_cell(cell, variants, blocks, max_tokens)
    pairs = [(variant.name, PLAIN) for variant in variants if variant.name != PLAIN]
    return summary(cell, outcome, pairs, PLAIN)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "quick", "data", "threads", "out")
    parser.add_argument("--topics", nargs="+", default=list(TOPICS))
    parser.add_argument("--answers", type=int, help="for training, per topic (1000; quick: 200)")
    parser.add_argument("--passes", type=int, help="over them (6; quick: 4)")
    parser.add_argument("--shared-output", action="store_true", help="heads use the target's")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--published", type=Path, help="ignored: drafts are too large to publish")
    parser.add_argument("--train", action="store_true", help="only train what is missing")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, measure, write; 1 if drafts failed."""
    options = parse(argv)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    sizes = QUICK if options.quick else Sizes()
    training = Training(
        answers=options.answers or sizes.stream,
        passes=options.passes or (4 if options.quick else 6),
        own_output=not options.shared_output,
    )
    store = Store(options.out / "online")
    bench = Bench(store, options.data, sizes, Serving(), threads=options.threads)
    trained = Drafts(bench, options.topics, training)
    if options.train:
        prepare(options.threads)
        trained.train()
        return 0
    if trained.missing():  # training loads much that a bench must not
        arguments = list(sys.argv[1:] if argv is None else argv)
        subprocess.run([sys.executable, "-m", "online.medusa", *arguments, "--train"], check=True)
    torch.set_num_threads(options.threads)
    temperatures = tuple(options.temperatures)
    plan = Plan(4, 6, 64, (1, 2, 3, 4), temperatures)
    if options.quick:
        plan = Plan(2, 2, 48, (2, 4), temperatures)
    before, prompts = machine(), prompts_of(bench, options.topics)
    variants, engines = make_variants(trained, options.topics, options.threads, plan.ks)
    gc.freeze()
    blocks = make_blocks(prompts, plan.block, plan.blocks)
    named = {f"{k} {t}": facts_of(trained.folder(k, t)) for k, t in trained.wanted()}
    cells = [measure(Cell(1, t), variants, blocks, plan.max_tokens) for t in temperatures]
    failures = sum(engine.draft_failures for engine in engines)
    figures: dict[str, Any] = {
        "machine": before,
        "settings": asdict(plan)
        | {"training": asdict(training), "source": label(options.data), "threads": options.threads},
        "trained": {name: facts["figures"] for name, facts in named.items() if facts},
        "cells": cells,
        "draft_failures": failures,
        "load_average_after": machine()["load_average"],
    }
    write(options.out / "online" / "medusa.json", figures)
    show("Trained", [{"": name, **facts} for name, facts in figures["trained"].items()])
    for cell in cells:
        names = ("tokens_per_s", "mean_acceptance_length", "answers_that_differ")
        rows = [
            {"variant": name, **{key: facts.get(key) for key in names}}
            | {"over plain": interval(cell["ratios"].get(f"{name} / {PLAIN}", {}))}
            for name, facts in cell["variants"].items()
        ]
        show(f"Temperature {cell['temperature']:g}; draft failures: {failures}", rows)
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main())
