"""Medusa heads against drafts: one engine, one target, the same training answers.

    make bench-medusa ARGS="--quick --data FOLDER"

The general draft, one draft and a draft per topic, one set of heads and a set per topic: all but
the first are trained on the same answers in at most as many passes. On one thread, seconds are the
processor's. Trained drafts and heads are kept.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import experts
import torch
from decoding import Block, Cell, Served, Variant, make_blocks, run_cell, summary
from harness import interval, machine, parsed, say, show, write
from models import load_engine
from prompts import Prompt, source_of

from online.head_training import (
    HeadTrainingSettings,
    head_accuracy,
    make_dataset,
    train_heads,
)
from online.heads import HeadsConfig, MedusaHeads, save_heads, stacks_of
from online.lab import QUICK, Lab, Sizes, lab_arguments
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_causal_lm, resolve_device, resolve_dtype
from paceline.actors.replay.record import MAX_LENGTH, ReplayRecord
from paceline.actors.training.deepspeed_config import training_dtype
from paceline.actors.training.distiller import Distiller
from paceline.deploy.demo.prompts import TOPICS

ALL, PLAIN = "all", "plain"
GENERAL, ONE_DRAFT, EXPERTS = "general", "one draft", "draft per topic"
ONE_SET, SETS = "one set of heads", "heads per topic"
DRAFT, HEADS = "draft", "heads"
_NUM_HEADS, _HELD_OUT, _MICRO_BATCH = 4, 0.1, 16
_HEAD_RATE = 5e-3  # falls to zero


class Drafts:
    """Drafts and heads as folders, trained if they are missing."""

    def __init__(self, lab: Lab, topics: Sequence[str], answers: int, passes: int) -> None:
        self._lab, self._topics, self._answers, self._passes = lab, topics, answers, passes
        self.wanted = [(kind, t) for kind in (DRAFT, HEADS) for t in (*topics, ALL)]

    def folder(self, kind: str, topic: str) -> Path:
        """Folder of a draft or of heads; ``topic`` may be ``ALL``."""
        parts = self._lab.target.name, source_of(self._lab.data), kind, topic, str(self._answers)
        return self._lab.store.folder / "trained" / "-".join(parts)

    def missing(self) -> list[tuple[str, str]]:
        """(kind, topic) of those that were not trained with these settings."""
        return [w for w in self.wanted if not experts.is_current(self.folder(*w), self._recipe(*w))]

    def train(self) -> None:
        """Train what is missing; the process must have been made ready for DeepSpeed."""
        for kind, topic in self.missing():
            topics = self._topics if topic == ALL else [topic]
            records = [r for t in topics for r in self._lab.stream_records(t, self._answers)]
            make, began = self._draft if kind == DRAFT else self._heads, time.process_time()
            figures = make(self.folder(kind, topic), records)
            figures |= {"records": len(records), "seconds": round(time.process_time() - began, 1)}
            experts.note_facts(self.folder(kind, topic), self._recipe(kind, topic), figures)
            say(f"{kind} for {topic}: {figures}")

    def _recipe(self, kind: str, topic: str) -> dict[str, Any]:
        """All that decides the weights."""
        topics = self._topics if topic == ALL else [topic]
        prompts = [p for own in topics for p in self._lab.stream(own, self._answers)]
        settings = {"kind": kind, "passes": self._passes, **self._lab.settings((), {})}
        return experts.recipe_of(prompts, settings, (self._lab.target, self._lab.draft))

    def _draft(self, folder: Path, records: Sequence[ReplayRecord]) -> dict[str, Any]:
        steps = -(-len(records) // _MICRO_BATCH) * self._passes
        offline = experts.Offline(_MICRO_BATCH, max(1, steps // 8), max_steps=steps)
        distiller = Distiller(str(self._lab.draft), self._lab.trainer(()).distiller)
        state, figures = experts.distil(records, distiller, offline)
        experts.save_expert(folder, state, {}, {}, self._lab.draft)
        return figures

    def _heads(self, folder: Path, records: Sequence[ReplayRecord]) -> dict[str, Any]:
        device = resolve_device("auto")
        dtype = resolve_dtype("auto", device)
        target = load_causal_lm(self._lab.target, dtype, attention="sdpa")
        texts = (
            [(r.prompt_token_ids.tolist(), r.output_token_ids.tolist()) for r in side]
            for side in experts.split_records(records, _HELD_OUT)
        )
        dataset, test = (make_dataset(target, own, _NUM_HEADS, MAX_LENGTH) for own in texts)
        output = target.get_output_embeddings().weight
        # an output matrix for every head, as in the paper
        config = HeadsConfig(_NUM_HEADS, output.shape[1], output.shape[0], True)
        heads = MedusaHeads(config, output)
        trained = training_dtype("auto", device)
        settings: dict[str, Any] = {"learning_rate": _HEAD_RATE, "dtype": trained, "seed": 0}
        positions = HeadTrainingSettings(steps=1, **settings).positions
        steps = -(-len(dataset.labels) // positions) * self._passes
        train_heads(heads, dataset, HeadTrainingSettings(steps=steps, **settings))
        shutil.rmtree(folder, ignore_errors=True)
        save_heads(folder, config, {k: v.to(dtype) for k, v in heads.state_dict().items()})
        return {
            "held_out_accuracy": [round(share, 4) for share in head_accuracy(heads, test)],
            "steps": steps,
            "parameters": sum(p.numel() for p in heads.parameters()),
        }


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
    lab: Lab, trained: Drafts, topics: Sequence[str], ks: Sequence[int]
) -> list[Variant]:
    """Plain decoding first; fixed k in one engine, the controllers each in one of its own."""
    drafts = {GENERAL: str(lab.draft), "one-draft": str(trained.folder(DRAFT, ALL))}
    drafts |= {topic: str(trained.folder(DRAFT, topic)) for topic in topics}
    heads = {"one-set": trained.folder(HEADS, ALL)}
    heads |= {f"heads-{topic}": trained.folder(HEADS, topic) for topic in topics}

    def engine(drafts: dict[str, str], heads: dict[str, Path], k: int | None) -> Engine:
        own: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 512}
        own |= {"beside": partial(stacks_of, heads)} if heads else {}
        return load_engine(drafts, threads=lab.threads, k=k, target=lab.target, **own)[0]

    both = engine(drafts, heads, 0)
    clock = time.process_time if lab.threads == 1 else time.perf_counter
    variants: list[Variant] = [Served(PLAIN, both, 0, draft_names(GENERAL), clock)]
    for kind in (GENERAL, ONE_DRAFT, EXPERTS, ONE_SET, SETS):
        variants += [Served(f"{kind}, k={k}", both, k, draft_names(kind), clock) for k in ks]
    own = {EXPERTS: engine(drafts, {}, None), SETS: engine({}, heads, None)}
    for kind, auto in own.items():
        variants.append(Served(f"{kind}, auto", auto, None, draft_names(kind), clock))
    return variants


def measure(
    cell: Cell, variants: Sequence[Variant], blocks: Sequence[Block], max_tokens: int
) -> dict[str, Any]:
    """A cell's figures, with ratios to plain decoding, which are printed."""
    outcome = run_cell(cell, variants, blocks, max_tokens)
    pairs = [(variant.name, PLAIN) for variant in variants if variant.name != PLAIN]
    found = summary(cell, outcome, pairs, PLAIN)
    names = ("tokens_per_s", "mean_acceptance_length", "answers_that_differ")
    rows = [
        {"variant": name, **{key: facts.get(key) for key in names}}
        | {"over plain": interval(found["ratios"].get(f"{name} / {PLAIN}", {}))}
        for name, facts in found["variants"].items()
    ]
    show(f"Temperature {cell.temperature:g}", rows)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_arguments(__doc__)
    add = parser.add_argument
    add("--topics", nargs="+", default=list(TOPICS))
    add("--answers", type=int, default=1_000, help="for training, per topic")
    add("--passes", type=int, default=6, help="over the answers")
    add("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    add("--ks", type=int, nargs="+", default=[1, 2, 3, 4], help="drafted tokens")
    add("--block", type=int, default=4, help="prompts of a block")
    add("--blocks", type=int, default=6, help="per topic")
    add("--train", action="store_true", help="only train what is missing")
    return parsed(parser, argv, answers=96, passes=4, ks=[2, 4], block=2, blocks=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing, measure, write."""
    options = parse(argv)
    lab = Lab(options, QUICK if options.quick else Sizes())
    trained = Drafts(lab, options.topics, options.answers, options.passes)
    if options.train:
        experts.prepare(options.threads)
        trained.train()
        return 0
    if trained.missing():  # training loads much that a bench must not
        given = list(sys.argv[1:] if argv is None else argv)
        subprocess.run([sys.executable, "-m", "online.medusa", *given, "--train"], check=True)
    torch.set_num_threads(options.threads)
    before, variants = machine(), make_variants(lab, trained, options.topics, options.ks)
    gc.freeze()
    prompts = {topic: lab.test_prompts(topic) for topic in options.topics}
    blocks = make_blocks(prompts, options.block, options.blocks)
    found = {f"{kind} {t}": experts.facts_of(trained.folder(kind, t)) for kind, t in trained.wanted}
    figures: dict[str, Any] = {
        "machine": before,
        "settings": lab.run_settings(options.topics),
        "trained": {name: facts["figures"] for name, facts in found.items() if facts},
        "cells": [
            measure(Cell(1, temperature), variants, blocks, lab.sizes.max_tokens)
            for temperature in options.temperatures
        ],
        "load_average_after": machine()["load_average"],
    }
    write(options.out / "medusa.json", figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
