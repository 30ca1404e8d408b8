"""Full copies or adapters: memory of each, and the acceptance that it reaches.

    make bench-adapters ARGS="--quick"

The engine answers every topic's prompts with plain decoding; the general draft is trained on the
records once per variant, each in a process of its own, and evaluated on held-out records as served:
after the same optimizer steps, and after the processor seconds that the full copy took for them.
A variant is ``full``, or ``lora-R`` with R the rank, or ``lora-R+e`` with the tied embedding and
head adapted too; ``@X`` is a learning rate of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_cache import TARGET
from experts import MAX_LENGTH, MICRO_BATCH, ROWS, Lesson, answer
from harness import arguments, digest, machine, rss_mib, show, write
from prompts import encode, training_texts
from transformers.utils import logging

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.record import decode as decode_record
from paceline.actors.replay.record import encode as encode_record
from paceline.actors.replay.shard import Journal
from paceline.actors.training.batches import micro_batches
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.settings import DistillerSettings

_FULL, _HELD_OUT, _MIB = "full", 0.25, 2.0**20
_VARIANTS = (_FULL, *(f"lora-{rank}@0.005" for rank in (4, 8, 16, 32)))


def settings_of(variant: str, learning_rate: float, dtype: str) -> DistillerSettings:
    """Distiller settings of a variant's name."""
    name, _, rate = variant.partition("@")
    own_rate = float(rate) if rate else learning_rate
    if name == _FULL:
        return DistillerSettings(learning_rate=own_rate, dtype=dtype)
    rank, _, embeddings = name.removeprefix("lora-").partition("+")
    return DistillerSettings(
        learning_rate=own_rate,
        dtype=dtype,
        adapter="lora",
        lora_rank=int(rank),
        lora_alpha=2.0 * int(rank),
        lora_embeddings=embeddings == "e",
    )


def train(
    records: Sequence[ReplayRecord],
    settings: DistillerSettings,
    steps: int,
    seconds: float | None,
    seed: int,
) -> dict[str, Any]:
    """Held-out acceptance of a topic's draft after so many steps, and after so many seconds."""
    lesson = Lesson(records, settings, _HELD_OUT)
    distiller, rng = lesson.distiller, np.random.default_rng(seed)
    found: dict[str, Any] = {"before": lesson.evaluate(None)}
    while not {"after_steps", "after_seconds"} <= found.keys():
        for batch in micro_batches(lesson.train, MICRO_BATCH, rng):
            lesson.step(batch, time.process_time)
            if distiller.steps == steps:
                seconds = lesson.seconds if seconds is None else seconds
                found["after_steps"] = lesson.evaluate(distiller.state_dict())
                found["seconds"] = lesson.seconds
            if "after_seconds" not in found and seconds is not None and lesson.seconds >= seconds:
                found["after_seconds"] = lesson.evaluate(distiller.state_dict())
                found["steps_in_seconds"] = distiller.steps
            if {"after_steps", "after_seconds"} <= found.keys():
                break
    names = ("weights_mib", "gradients_mib", "optimizer_mib")
    sizes = zip(names, (size / _MIB for size in distiller.nbytes()), strict=True)
    records_of = {"records_train": len(lesson.train), "records_held_out": len(lesson.held_out)}
    return found | records_of | dict(sizes)


def make_records(options: argparse.Namespace, folder: Path) -> list[str]:
    """Answer every topic's prompts into a file each, unless it is there; return the topics."""
    texts = training_texts(options.answers, options.data)
    topics = [topic for topic in options.topics if topic in texts]
    missing = [topic for topic in topics if not (folder / f"{topic}.records").exists()]
    if missing:
        target = TargetSettings(str(TARGET), num_threads=1, max_num_seqs=ROWS, seed=1)
        engine, tokenizer, _ = build_engine(target)
        prompts = encode(tokenizer, {topic: texts[topic] for topic in missing})
        for topic in missing:
            ids = [prompt.token_ids for prompt in prompts[topic]]
            records = answer(engine, topic, ids, options.max_tokens)
            Journal(folder / f"{topic}.records").rewrite(map(encode_record, records))
    return topics


def run_variant(options: argparse.Namespace, folder: Path, variant: str) -> dict[str, Any]:
    """Train one variant on all topics, in this process."""
    prepare_environment()
    forbid_compiling()
    settings = settings_of(variant, options.learning_rate, options.dtype)
    full = folder / f"{_FULL}.json"
    reference = json.loads(full.read_text())["topics"] if variant != _FULL else {}
    topics: dict[str, Any] = {}
    rss = 0.0
    for topic in options.topics:
        seconds = reference[topic]["seconds"] if reference else None
        records = [decode_record(data) for data in Journal(folder / f"{topic}.records").read()]
        topics[topic] = train(records, settings, options.steps, seconds, options.seed)
        rss = rss or rss_mib()  # with one draft, not with those before it
    return {"variant": variant, "rss_mib": rss, "topics": topics}


def row_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """Means over topics."""
    topics = list(result["topics"].values())
    names = ("weights_mib", "gradients_mib", "optimizer_mib", "seconds")
    names += ("before", "after_steps", "after_seconds")
    means = {name: float(np.mean([topic[name] for topic in topics])) for name in names}
    return {"variant": result["variant"], "rss_mib": result["rss_mib"]} | means


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "quick", "dtype")
    parser.add_argument("--data", type=Path, help="folder of *_train.jsonl.gz; default: generated")
    parser.add_argument("--topics", nargs="+", default=["math", "code", "sql", "shell"])
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS))
    parser.add_argument("--answers", type=int, default=400, help="per topic")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a variant")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/bench/adapters"))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.answers, options.steps = min(options.answers, 160), min(options.steps, 120)
        options.topics = [t for t in options.topics if t in ("sql", "shell")] or options.topics[:1]
    return options


def folder_of(options: argparse.Namespace) -> Path:
    """Folder of these options' results: all that decides a figure is in its name."""
    names = ("answers", "steps", "max_tokens", "learning_rate", "dtype", "seed", "topics")
    facts = {name: getattr(options, name) for name in names}
    facts["data"] = str(options.data.resolve()) if options.data else None
    source = options.data.name if options.data else "generated"
    fixed = {"rows": ROWS, "batch": MICRO_BATCH, "length": MAX_LENGTH, "held_out": _HELD_OUT}
    mark = digest(facts | fixed | {"distiller": asdict(DistillerSettings())})
    return Path(options.out) / f"{source}-{options.answers}-{options.steps}-{mark}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder = folder_of(options)
    folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        write(folder / f"{options.only}.json", run_variant(options, folder, options.only))
        return 0
    options.topics = make_records(options, folder)
    variants = [_FULL, *(v for v in options.variants if v != _FULL)]
    for variant in variants:
        if not (folder / f"{variant}.json").exists():
            command = [sys.executable, __file__, *arguments, "--only", variant]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = [json.loads((folder / f"{variant}.json").read_text()) for variant in variants]
    report = {"machine": machine(), "command": arguments, "results": results}
    write(options.out / "adapters.json", report)
    show("Held-out acceptance after the same steps and seconds", map(row_of, results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
