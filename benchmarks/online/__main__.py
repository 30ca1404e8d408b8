"""Learning on real prompts: streams, ceilings, shifts, cost. Resumable: what is there is kept.

make bench-online ARGS="--data ../shared/data --quick"
make bench-online ARGS="--data hf"
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_type_hints

import torch
from transformers.utils import logging

from online import ceiling
from online.bench import QUICK, Bench, Sizes
from online.ceiling import Offline, ceiling_unit
from online.imagined import imagined_unit
from online.learning import QUICK as QUICK_LEARNING
from online.learning import Imagining, Learning
from online.results import collect, write
from online.rows import EXTRA, HUB
from online.serving import Serving
from online.shifts import KINDS, ORDER, SYSTEMS, shift_unit
from online.shifts import rehearsal_unit as shift_rehearsal_unit
from online.store import Store
from online.streams import rehearsal_unit, stream_unit
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.deploy.demo.prompts import TOPICS

PARTS = ("streams", "imagined", "ceilings", "offline", "rehearsals", "shifts", "shift-rehearsals")
_NOT_QUICK = ("imagined", "offline", "rehearsals", "shift-rehearsals")
IMAGINED = (Imagining(4.0, 32),)
QUICK_TOPICS = ("sql", "shell")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench-online", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--data", help="folder of *.jsonl.gz rows, or hf; default: generated")
    parser.add_argument("--quick", action="store_true", help="two topics, 96 and 24 prompts")
    parser.add_argument("--topics", nargs="+", choices=[*TOPICS, *EXTRA])
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--seeds", type=int, default=3, help="of training; 0 serves, others rehearse"
    )
    parser.add_argument(
        "--ceiling-prompts", type=int, help="at most; default: the whole train side"
    )
    for name, default in dataclasses.asdict(Learning()).items():
        if name != "seed":
            option = "--" + name.replace("_", "-")
            parser.add_argument(option, type=type(default), help="see Learning")
    parser.add_argument(
        "--imagined",
        nargs="+",
        type=imagining,
        default=IMAGINED,
        metavar="N:STEPS[:MB][:NAME=VALUE...]",
        help="prompts that the target makes up per record, the micro-steps of a round then, the "
        "capacity of replay, and what else Imagining has by its name",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--dtype",
        default="auto",
        help="of all models; the units in docs/results are of float32",
    )
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument(
        "--published", type=Path, help="folder of units to go on from, and to add to"
    )
    parser.add_argument("--docs", type=Path, help="also write the results as this Markdown file")
    return parser.parse_args(argv)


def imagining(text: str) -> Imagining:
    """Reads N:STEPS, N:STEPS:MB, and either with :NAME=VALUE for what else Imagining has.

    Raises:
        ValueError: it is something else.
    """
    words = text.split(":")
    named = dict(word.split("=", 1) for word in words if "=" in word)
    per_record, micro_steps, *capacity = (word for word in words if "=" not in word)
    kinds = get_type_hints(Imagining)
    if unknown := named.keys() - kinds:
        raise ValueError(f"Imagining has no {', '.join(sorted(unknown))}")
    more = {name: kinds[name](value) for name, value in named.items()}
    return Imagining(float(per_record), int(micro_steps), *map(int, capacity), **more)


def learning_of(options: argparse.Namespace) -> Learning:
    """How the trainer works, as far as it is told."""
    names = [field.name for field in dataclasses.fields(Learning) if field.name != "seed"]
    told = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return dataclasses.replace(QUICK_LEARNING if options.quick else Learning(), **told)


def sizes_of(options: argparse.Namespace) -> Sizes:
    """How much is measured."""
    sizes = QUICK if options.quick else Sizes()
    if options.ceiling_prompts is None:
        return sizes
    return dataclasses.replace(sizes, ceiling=options.ceiling_prompts)


def command_of(argv: Sequence[str] | None) -> str:
    """The command for people: where the rows lie is theirs to say.

    What was chosen of topics and parts is left out: without it the command makes all that is there,
    in as many calls as one likes.
    """
    words: list[str] = []
    chosen = False
    for word in sys.argv[1:] if argv is None else argv:
        chosen = word in ("--topics", "--parts") or (chosen and not word.startswith("--"))
        words += [] if chosen else [word]
    for at, word in enumerate(words[1:], start=1):
        if words[at - 1] == "--data" and word != HUB:
            words[at] = "FOLDER"
        if words[at - 1] == "--out":
            words[at] = "OUT"
    return f'make bench-online ARGS="{" ".join(words)}"' if words else "make bench-online"


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing, then write the figures."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_environment()
    forbid_compiling()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s  {text}", flush=True)  # noqa: T201

    serving = Serving(temperature=options.temperature)
    store = Store(options.out / "online", options.published)
    bench = Bench(
        store,
        options.data,
        sizes_of(options),
        serving,
        threads=options.threads,
        dtype=options.dtype,
        say=say,
    )
    learning = learning_of(options)
    offline = ceiling.QUICK if options.quick else Offline()
    parts = options.parts or ([p for p in PARTS if p not in _NOT_QUICK] if options.quick else PARTS)
    topics = options.topics or (QUICK_TOPICS if options.quick else ORDER)
    for topic in topics:
        if "streams" in parts:
            stream_unit(bench, topic, learning)
        if "imagined" in parts:
            for amount in options.imagined:
                imagined_unit(bench, topic, learning, amount)
        if "ceilings" in parts:
            ceiling_unit(bench, topic, offline)
        if "offline" in parts:
            ceiling_unit(bench, topic, offline, ceiling.SAME)
        if "rehearsals" in parts:
            for seed in range(1, options.seeds):
                rehearsal_unit(bench, topic, dataclasses.replace(learning, seed=seed))
    for kind in KINDS[:1] if options.quick else KINDS:
        for system in SYSTEMS:
            if "shifts" in parts:
                shift_unit(bench, kind, system, learning)
            if "shift-rehearsals" in parts:
                for seed in range(1, options.seeds):
                    seeded = dataclasses.replace(learning, seed=seed)
                    shift_rehearsal_unit(bench, kind, system, seeded)
    figures = collect(bench, learning, offline, options.imagined, command_of(argv))
    path = options.out / "online.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    write(figures, options.out, options.docs, options.published)
    say(f"figures in {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
