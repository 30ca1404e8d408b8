"""Learning on real prompts: streams, ceilings, shifts, cost. Units that are there are kept.

make bench-online ARGS="--data ../shared/data --quick"
make bench-online ARGS="--data hf"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_type_hints

from harness import Store, arguments, interval, machine, show, write

from online import rows, units
from online.bench import QUICK, Bench, Sizes, prepare
from online.figures import (
    acceptance_summary,
    level_of,
    seeds_summary,
    served,
    shift_summary,
    topic_summary,
    unpacked,
)
from online.learner import Learning, Synthetic
from online.plots import draw_shifts, draw_streams, draw_synthetic
from online.serving import Serving
from online.units import KINDS, ORDER, QUICK_OFFLINE, SAME, SYSTEMS, Offline
from paceline.deploy.demo.prompts import TOPICS
from paceline.deploy.recipes.data import DataError

PARTS = ("streams", "synthetic", "ceilings", "offline", "rehearsals", "shifts", "shift-rehearsals")
_QUICK_PARTS = ("streams", "ceilings", "shifts")
_QUICK_TOPICS = ("sql", "shell")
# Of so few prompts a tenth would leave the gate too few.
QUICK_LEARNING = Learning(held_out_fraction=0.3)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "quick", "data", "threads", "out", "published")
    parser.add_argument("--topics", nargs="+", choices=TOPICS)
    parser.add_argument("--parts", nargs="+", choices=PARTS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--seeds", type=int, default=3, help="of training; 0 serves, others rehearse"
    )
    parser.add_argument(
        "--synthetic",
        nargs="+",
        type=synthetic_of,
        default=[Synthetic(4.0, 32)],
        metavar="N:STEPS[:MB][:NAME=VALUE...]",
        help="synthetic prompts per record, micro-steps of a round, see Synthetic",
    )
    parser.add_argument("--dtype", default="auto", help="units in docs/results are of float32")
    return parser.parse_args(argv)


def synthetic_of(text: str) -> Synthetic:
    """Parse N:STEPS, N:STEPS:MB, and either with :NAME=VALUE for other fields of Synthetic.

    Raises:
        ValueError: it is something else.
    """
    words = text.split(":")
    named = dict(word.split("=", 1) for word in words if "=" in word)
    per_record, micro_steps, *capacity = (word for word in words if "=" not in word)
    kinds = get_type_hints(Synthetic)
    if unknown := named.keys() - kinds:
        raise ValueError(f"Synthetic has no {', '.join(sorted(unknown))}")
    more = {name: kinds[name](value) for name, value in named.items()}
    return Synthetic(float(per_record), int(micro_steps), *map(int, capacity), **more)


def run(bench: Bench, options: argparse.Namespace, learning: Learning, offline: Offline) -> None:
    """Run the missing units of the wanted parts."""
    parts = options.parts or (_QUICK_PARTS if options.quick else PARTS)
    seeded = [replace(learning, seed=seed) for seed in range(1, options.seeds)]
    for topic in options.topics or (_QUICK_TOPICS if options.quick else ORDER):
        if "streams" in parts:
            units.stream(bench, topic, learning)
        for amount in options.synthetic if "synthetic" in parts else ():
            units.synthetic(bench, topic, learning, amount)
        if "ceilings" in parts:
            units.ceiling(bench, topic, offline)
        if "offline" in parts:
            units.ceiling(bench, topic, offline, SAME)
        for own in seeded if "rehearsals" in parts else ():
            units.rehearsal(bench, topic, own)
    for kind in KINDS[:1] if options.quick else KINDS:
        for system in SYSTEMS:
            if "shifts" in parts:
                units.shift(bench, kind, system, learning)
            for own in seeded if "shift-rehearsals" in parts else ():
                units.shift(bench, kind, system, own, rehearsed=True)


def _seeds(learning: Learning, find: Callable[[Learning], units.Unit]) -> list[dict[str, Any]]:
    """Units of seeds 1, 2 and so on, up to the first that is missing."""
    found: list[dict[str, Any]] = []
    while (unit := find(replace(learning, seed=len(found) + 1))) is not None:
        found.append(unit)
    return found


def collect(
    bench: Bench, learning: Learning, offline: Offline, synthetic: Sequence[Synthetic]
) -> dict[str, Any]:
    """Figures of every unit that was run with these settings."""
    topics: dict[str, Any] = {}
    shifts: dict[str, Any] = {}
    levels: dict[str, float] = {}
    size = bench.sizes.window
    for topic in ORDER:
        try:
            stream = units.stream(bench, topic, learning, run=False)
        except DataError:
            continue
        if stream is None:
            continue
        ceiling = units.ceiling(bench, topic, offline, run=False)
        same = units.ceiling(bench, topic, offline, SAME, run=False)
        seeds = _seeds(learning, lambda own, t=topic: units.rehearsal(bench, t, own, run=False))
        topics[topic] = topic_summary(stream, ceiling, size) | {
            "seeds": seeds_summary([stream, *seeds], ceiling),
            "offline": None if same is None else acceptance_mean(same),
            "synthetic": [
                asdict(amount)
                | acceptance_summary(unit, ceiling)
                | {"test_served": served(unpacked(unit["test_online"])), **unit["imagined"]}
                for amount in synthetic
                if (unit := units.synthetic(bench, topic, learning, amount, run=False)) is not None
            ],
            "machine": stream["machine"],
        }
        if (level := level_of(stream, size, bench.sizes.phase)) is not None:
            levels[topic] = level
    for kind in KINDS:
        for system in SYSTEMS:
            try:
                shift = units.shift(bench, kind, system, learning, run=False)
            except DataError:
                continue
            if shift is not None:
                seeds = _seeds(
                    learning,
                    lambda own, k=kind, s=system: units.shift(
                        bench, k, s, own, rehearsed=True, run=False
                    ),
                )
                own, *others = (
                    shift_summary(unit, levels, size, abrupt=kind == "abrupt")
                    for unit in (shift, *seeds)
                )
                shifts[f"{kind}, {system}"] = own | {"seeds": others}
    settings = {
        "data": rows.label(bench.data),
        "serving": asdict(bench.serving),
        "learning": asdict(learning),
        "offline": asdict(offline),
        "sizes": asdict(bench.sizes),
        "threads": bench.threads,
    }
    return {"machine": machine(), "settings": settings, "topics": topics, "shifts": shifts}


def acceptance_mean(unit: dict[str, Any]) -> float:
    """Mean acceptance on the test of an offline draft."""
    scores = unit["test"]["acceptance"]
    return float(sum(scores) / len(scores))


def report(figures: dict[str, Any]) -> None:
    """Print the tables."""
    names = ("frozen", "online", "ceiling", "gap_closed")
    show(
        "Acceptance on the test",
        [
            {"topic": topic, "amount": amount}
            | {name: interval(own[name]) for name in names if name in own}
            | {"reached": own.get("reached"), "checkpoints": list(own["checkpoints"].values())}
            for topic, facts in figures["topics"].items()
            for amount, own in [
                ("", facts),
                *((f"{s['per_record']:g} synthetic", s) for s in facts["synthetic"]),
            ]
        ],
    )
    show(
        "Test served: mean acceptance length; seeds: gap closed; cost",
        [
            {"topic": topic}
            | {n: interval(o["mean_acceptance_length"]) for n, o in facts["test_served"].items()}
            | {"seeds": [s["gap_closed"] and round(s["gap_closed"], 2) for s in facts["seeds"]]}
            | facts["cost"]
            for topic, facts in figures["topics"].items()
        ],
    )
    show(
        "Shifts",
        [
            {"shift": name, "mean_at_the_end": interval(facts["mean_at_the_end"])}
            | {key: facts[key] for key in ("most_lost", "recovery") if key in facts}
            for name, facts in figures["shifts"].items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and pictures."""
    options = parse(argv)
    prepare(options.threads)
    bench = Bench(
        Store(options.out / "online", options.published),
        options.data,
        QUICK if options.quick else Sizes(),
        Serving(temperature=options.temperature),
        threads=options.threads,
        dtype=options.dtype,
    )
    learning, offline = Learning(), Offline()
    if options.quick:
        learning, offline = QUICK_LEARNING, QUICK_OFFLINE
    run(bench, options, learning, offline)
    figures = collect(bench, learning, offline, options.synthetic)
    write(options.out / "online.json", figures)
    draw(figures, options.out / "online")
    report(figures)
    return 0


def draw(figures: dict[str, Any], folder: Path) -> None:
    """Draw online.png, imagined.png and shift.png, as far as there are figures."""
    if figures["topics"]:
        draw_streams(folder / "online.png", figures["topics"])
    if any(facts["synthetic"] for facts in figures["topics"].values()):
        draw_synthetic(folder / "imagined.png", figures["topics"])
    if figures["shifts"]:
        draw_shifts(folder / "shift.png", figures["shifts"])


if __name__ == "__main__":
    raise SystemExit(main())
