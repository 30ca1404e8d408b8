"""Full copies or adapters: what each costs in memory, and what acceptance it reaches.

    make bench-adapters ARGS="--quick"

The project's own engine answers every topic's prompts with plain decoding; from these records
the general draft is taught once per variant, each in a process of its own, and judged on held-out
records as served: after the same number of optimizer steps, and after the seconds of processor
time that the full copy took for them. A variant is ``full``, or ``lora-R`` with R the rank, or
``lora-R+e`` with the tied embedding and head adapted too; ``@X`` is a learning rate of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from expert_cache import DRAFT, TARGET
from experts import answer
from online.store import digest
from prompts import encode, training_texts
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay import record as records_format
from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.training.batches import make_batch, micro_batches, usable
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.settings import DistillerSettings

_ROWS, _MICRO_BATCH, _MAX_LENGTH, _HELD_OUT = 16, 8, 512, 0.25
_VARIANTS = ("full", *(f"lora-{rank}@0.005" for rank in (4, 8, 16, 32)))
_FULL = "full"
_MIB = 2.0**20


def settings_of(variant: str, learning_rate: float, seed_dtype: str) -> DistillerSettings:
    """A variant by its name."""
    name, _, rate = variant.partition("@")
    own_rate = float(rate) if rate else learning_rate
    if name == _FULL:
        return DistillerSettings(learning_rate=own_rate, dtype=seed_dtype)
    rank, _, embeddings = name.removeprefix("lora-").partition("+")
    return DistillerSettings(
        learning_rate=own_rate,
        dtype=seed_dtype,
        adapter="lora",
        lora_rank=int(rank),
        lora_alpha=2.0 * int(rank),
        lora_embeddings=embeddings == "e",
    )


def taught(
    path: Path, settings: DistillerSettings, steps: int, seconds: float | None, seed: int
) -> dict[str, Any]:
    """One topic's draft after ``steps`` and, where given, after ``seconds`` of processor time.

    Args:
        path: file of the topic's records.
        settings: of the variant.
        steps: optimizer steps of the first look.
        seconds: of the second; None takes those of the first.
        seed: of the order of the batches.
    """
    distiller = Distiller(str(DRAFT), settings)
    good = [r for r in read(path) if usable(r, distiller.vocab_size)]
    held_out = [r for r in good if is_held_out(r.prompt_token_ids, _HELD_OUT)]
    names = {r.request_id for r in held_out}
    train = [r for r in good if r.request_id not in names]
    before = judged(distiller, None, held_out)
    rng, spent = np.random.default_rng(seed), 0.0
    at_steps = at_seconds = None
    while at_steps is None or at_seconds is None:
        for batch in micro_batches(train, _MICRO_BATCH, rng):
            began = time.process_time()
            distiller.micro_step(make_batch(batch, _MAX_LENGTH))
            spent += time.process_time() - began
            if distiller.steps == steps:
                at_steps = (judged(distiller, distiller.state_dict(), held_out), spent)
                seconds = spent if seconds is None else seconds
            if at_seconds is None and seconds is not None and spent >= seconds:
                at_seconds = (judged(distiller, distiller.state_dict(), held_out), distiller.steps)
            if at_steps is not None and at_seconds is not None:
                break
    return {
        "before": before,
        "after_steps": at_steps[0],
        "seconds": at_steps[1],
        "after_seconds": at_seconds[0],
        "steps_in_seconds": at_seconds[1],
        "records_train": len(train),
        "records_held_out": len(held_out),
    } | memory_of(distiller)


def judged(
    distiller: Distiller, state: dict[str, torch.Tensor] | None, records: Sequence[ReplayRecord]
) -> float:
    """Mean held-out acceptance of these weights as they would be served."""
    draft = distiller.served(state)
    return float(score_records(draft, records, max_length=_MAX_LENGTH).mean())


def memory_of(distiller: Distiller) -> dict[str, float]:
    """MiB of weights, of gradients in the weights' dtype, and of masters and moments."""
    weights, gradients, optimizer = distiller.nbytes()
    return {
        "weights_mib": weights / _MIB,
        "gradients_mib": gradients / _MIB,
        "optimizer_mib": optimizer / _MIB,
    }


def write(path: Path, records: Sequence[ReplayRecord]) -> None:
    """Records one after the other, each after its length."""
    with path.open("wb") as file:
        for one in records:
            data = records_format.encode(one)
            file.write(len(data).to_bytes(4, "little") + data)


def read(path: Path) -> list[ReplayRecord]:
    """What :func:`write` wrote."""
    return list(_decoded(path.read_bytes()))


def _decoded(data: bytes) -> Iterator[ReplayRecord]:
    at = 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        yield records_format.decode(data[at + 4 : end])
        at = end


def make_records(options: argparse.Namespace, folder: Path) -> list[str]:
    """Every topic's answers in a file each, where they are not there; the topics."""
    texts = training_texts(options.answers, options.data)
    topics = [topic for topic in options.topics if topic in texts]
    missing = [topic for topic in topics if not (folder / f"{topic}.records").exists()]
    if missing:
        target = TargetSettings(str(TARGET), num_threads=1, max_num_seqs=_ROWS, seed=1)
        engine, tokenizer, _ = build_engine(target)
        prompts = encode(tokenizer, {topic: texts[topic] for topic in missing})
        for topic in missing:
            ids = [prompt.token_ids for prompt in prompts[topic]]
            records = answer(engine, topic, ids, options.max_tokens)
            write(folder / f"{topic}.records", records)
    return topics


def run_variant(options: argparse.Namespace, folder: Path, variant: str) -> dict[str, Any]:
    """In this process: all topics of one variant."""
    prepare_environment()
    forbid_compiling()
    settings = settings_of(variant, options.learning_rate, options.dtype)
    full = folder / f"{_FULL}.json"
    reference = json.loads(full.read_text())["topics"] if variant != _FULL else {}
    topics: dict[str, Any] = {}
    rss = 0.0
    for topic in options.topics:
        seconds = reference[topic]["seconds"] if reference else None
        path = folder / f"{topic}.records"
        topics[topic] = taught(path, settings, options.steps, seconds, options.seed)
        rss = rss or machine.rss_mib()  # with one draft, not with those before it
    return {"variant": variant, "rss_mib": rss, "topics": topics}


def table(results: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of the comparison, its heading first."""
    rows = [["variant", "weights", "gradients", "optimizer", "RSS, MiB"]]
    rows[0] += ["s CPU per topic", "acceptance, same steps", "same seconds"]
    for result in results:
        topics = list(result["topics"].values())
        first = topics[0]
        mean = {k: float(np.mean([t[k] for t in topics])) for k in first}
        row = [result["variant"]]
        row += [f"{first[f'{part}_mib']:.1f}" for part in ("weights", "gradients", "optimizer")]
        row += [f"{result['rss_mib']:.0f}", f"{mean['seconds']:.1f}"]
        row += [f"{mean['after_steps']:.3f}", f"{mean['after_seconds']:.3f}"]
        rows.append(row)
    before = np.mean([t["before"] for t in results[0]["topics"].values()])
    return [*rows, ["untrained", *[""] * 5, f"{before:.3f}", f"{before:.3f}"]]


def show(console: Console, rows: Sequence[Sequence[str]]) -> None:
    """On the terminal."""
    shown = Table(*rows[0])
    for row in rows[1:]:
        shown.add_row(*row)
    console.print(shown)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of *_train.jsonl.gz; default: generated")
    parser.add_argument("--quick", action="store_true", help="fewer answers, steps and topics")
    parser.add_argument("--topics", nargs="+", default=["math", "code", "sql", "shell"])
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS))
    parser.add_argument("--answers", type=int, default=400, help="per topic")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of a variant")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/bench/adapters"))
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.quick:
        options.answers, options.steps = min(options.answers, 160), min(options.steps, 120)
        options.topics = [t for t in options.topics if t in ("sql", "shell")] or options.topics[:1]
    return options


def folder_of(options: argparse.Namespace) -> Path:
    """Where results of these options lie: all that decides a figure is in the name."""
    names = ("answers", "steps", "max_tokens", "learning_rate", "dtype", "seed", "topics")
    facts = {name: getattr(options, name) for name in names}
    facts["data"] = str(options.data.resolve()) if options.data else None
    source = options.data.name if options.data else "generated"
    fixed = {"rows": _ROWS, "batch": _MICRO_BATCH, "length": _MAX_LENGTH, "held_out": _HELD_OUT}
    mark = digest(facts | fixed | {"distiller": asdict(DistillerSettings())})
    return Path(options.out) / f"{source}-{options.answers}-{options.steps}-{mark}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options, console = parse(arguments), Console(width=120)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    folder = folder_of(options)
    folder.mkdir(parents=True, exist_ok=True)
    if options.only:
        result = run_variant(options, folder, options.only)
        (folder / f"{options.only}.json").write_text(json.dumps(result, indent=1))
        return 0
    options.topics = make_records(options, folder)
    variants = [_FULL, *(v for v in options.variants if v != _FULL)]
    for variant in variants:
        if not (folder / f"{variant}.json").exists():
            command = [sys.executable, __file__, *arguments, "--only", variant]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = [json.loads((folder / f"{variant}.json").read_text()) for variant in variants]
    rows = table(results)
    report = {"machine": machine.facts(), "command": arguments, "results": results, "table": rows}
    (options.out / "adapters.json").write_text(json.dumps(report, indent=1))
    show(console, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
