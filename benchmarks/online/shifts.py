"""Shifts of topic: one draft against experts, over phases of one topic or of all mixed.

    make bench-shifts ARGS="--data ../shared/data --quick"

After each phase every topic's test is evaluated: what was learnt before, and what was forgotten.
Both systems are offered the same micro-steps in all, and neither rests; experts are routed by the
prompts' own topics. Levels to recover to are those of the streams (streams.py), if they are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any

import numpy as np
from experts import prepare
from harness import bootstrap, interval, machine, say, show, write

from online import streams
from online.lab import Lab
from online.learner import Learner, Learning
from online.plots import draw_shifts
from online.streams import ORDER, Unit
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import ReplayRecord

KINDS = ("abrupt", "mixed")
ONE, EXPERTS = SYSTEMS = ("one draft", "experts")


def phases_of(lab: Lab, kind: str, order: Sequence[str]) -> list[list[ReplayRecord]]:
    """The stream in as many phases as there are topics, the same records in either kind.

    ``abrupt``: a phase is one topic. ``mixed``: all phases together are shuffled.
    """
    parts = [lab.stream_records(topic, lab.sizes.phase) for topic in order]
    if kind == "abrupt":
        return parts
    every = [record for part in parts for record in part]
    shuffled = [every[i] for i in np.random.default_rng(0).permutation(len(every))]
    ends = np.cumsum([len(part) for part in parts])
    return [shuffled[end - len(part) : end] for end, part in zip(ends, parts, strict=True)]


def shift(
    lab: Lab, kind: str, system: str, learning: Learning, order: Sequence[str] = ORDER
) -> Unit:
    """Phases of topics, served by one draft or by experts.

    ``phases``: counts per request; ``scores``: per phase (0 is before the first) and topic,
    acceptance per test prompt; ``learning``: cost and decisions.
    """
    experts = [GENERAL] if system == ONE else list(order)

    def draft_of(topic: str) -> str:
        return GENERAL if system == ONE else topic

    def scores_of(learner: Learner) -> dict[str, list[float]]:
        found = {t: lab.scores(t, learner.served(draft_of(t))[1]) for t in order}
        say(f"{kind}, {system}: " + ", ".join(f"{t} {np.mean(v):.3f}" for t, v in found.items()))
        return found

    def make() -> Unit:
        with lab.learner(experts, learning) as learner:
            scores, phases = [scores_of(learner)], []
            for records in phases_of(lab, kind, order):
                learnt = streams.learn(lab, learner, records, draft_of)
                agreements = list(chain.from_iterable(learnt))
                phases.append(streams.counts_of(lab.replayed(agreements), records))
                scores.append(scores_of(learner))
            return {
                "order": list(order),
                "phases": phases,
                "scores": scores,
                "learning": learner.facts(),
                "machine": machine(),
            }

    named = {"learning": asdict(learning), "kind": kind, "system": system}
    settings = lab.settings(order, named | {"phase": lab.sizes.phase})
    found = lab.unit(f"shift-{kind}-{system}", settings, make)
    assert found is not None
    return found


def recovered(counts: Sequence[Sequence[float]], size: int, level: float) -> int | None:
    """Requests until the end of the first window within 0.02 of a level; None if never."""
    rates = streams.windows(counts, size)
    good = rates[rates >= level - streams.WITHIN]
    return None if good.empty else int(good.index[0])


def level_of(unit: Unit, size: int, requests: int) -> float:
    """Acceptance rate of a topic's own stream: four windows up to so many requests."""
    sums = streams.frame_of(unit["online"][max(0, requests - 4 * size) : requests]).sum()
    return float(sums.accepted / max(sums.drafted, 1))


def most_lost(matrix: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """The topic that fell deepest, at any phase, below its best before, and by how much."""
    worst: dict[str, Any] = {"topic": None, "lost": 0.0}
    best: dict[str, float] = {}
    for scores in matrix.values():
        for topic, score in scores.items():
            best[topic] = max(score, best.get(topic, score))
            if best[topic] - score > worst["lost"]:
                worst = {"topic": topic, "lost": best[topic] - score}
    return worst


def summary(unit: Unit, levels: Mapping[str, float], size: int, *, abrupt: bool) -> dict[str, Any]:
    """Acceptance matrix, most lost topic, and requests until recovery by phase."""
    order = unit["order"]
    names = ["before", *(order if abrupt else [f"quarter {i + 1}" for i in range(len(order))])]
    matrix = {
        name: {topic: streams.mean(scores[topic]) for topic in order}
        for name, scores in zip(names, unit["scores"], strict=True)
    }
    last = [unit["scores"][-1][topic] for topic in order]
    at_the_end = bootstrap(
        lambda *s: streams.mean([streams.mean(own) for own in s]), *last, paired=False
    )
    found: dict[str, Any] = {
        "matrix": matrix,
        "mean_at_the_end": streams.rounded(at_the_end),
        "micro_steps": unit["learning"]["micro_steps"],
    }
    if not abrupt:
        return found
    recovery = {
        topic: recovered(counts, size, levels[topic])
        for topic, counts in zip(order, unit["phases"], strict=True)
        if topic in levels
    }
    return found | {"most_lost": most_lost(matrix), "recovery": recovery}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and the picture."""
    parser = streams.stream_arguments(__doc__)
    parser.add_argument("--topics", nargs="+", default=ORDER, help="the order of the phases")
    options = parser.parse_args(argv)
    prepare(options.threads)
    lab, learning = streams.stream_lab(options), Learning(micro_steps=options.micro_steps)
    order, size = options.topics, lab.sizes.window
    own = {topic: streams.stream(lab, topic, learning, run=False) for topic in order}
    levels = {t: level_of(u, size, lab.sizes.phase) for t, u in own.items() if u is not None}
    shifts = {}
    for kind in KINDS[:1] if options.quick else KINDS:
        for system in SYSTEMS:
            unit = shift(lab, kind, system, replace(learning, rests=False), order)
            shifts[f"{kind}, {system}"] = summary(unit, levels, size, abrupt=kind == "abrupt")
    settings = lab.run_settings(order)
    figures = {"machine": machine(), "settings": settings, "shifts": shifts}
    write(options.out / "shifts.json", figures)
    draw_shifts(options.out / "shifts.png", shifts)
    show(
        "Shifts",
        [
            {"shift": name, "mean_at_the_end": interval(facts["mean_at_the_end"])}
            | {key: facts[key] for key in ("most_lost", "recovery") if key in facts}
            for name, facts in shifts.items()
        ],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
