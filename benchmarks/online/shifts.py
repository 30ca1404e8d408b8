"""What happens when the traffic's topic changes: one online draft against an expert per topic."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np

from online import rows
from online.bench import Bench, counts_of, packed
from online.figures import mean
from online.learning import Learning, tireless
from online.rows import Question
from online.serving import Served, serve
from online.world import Learner
from paceline.actors.router.policy import GENERAL

ORDER = ("math", "sql", "shell", "code")
KINDS = ("abrupt", "mixed")
ONE, EXPERTS = "one draft", "experts"
SYSTEMS = (ONE, EXPERTS)


def shift_settings(
    bench: Bench, kind: str, system: str, learning: Learning, order: Sequence[str]
) -> dict[str, Any]:
    """All that decides :func:`run_shift`."""
    more = {
        "learning": asdict(tireless(learning)),
        "phase": bench.sizes.phase,
        "kind": kind,
        "system": system,
    }
    return bench.settings(order, more)


def shift_unit(
    bench: Bench, kind: str, system: str, learning: Learning, order: Sequence[str] = ORDER
) -> dict[str, Any]:
    """The result on disk, or made now."""
    name = f"shift-{rows.label(bench.data)}-{kind}-{system.replace(' ', '-')}"
    settings = shift_settings(bench, kind, system, learning, order)
    return bench.store.unit(name, settings, lambda: run_shift(bench, kind, system, learning, order))


def phases_of(bench: Bench, kind: str, order: Sequence[str], seed: int = 0) -> list[list[Question]]:
    """The stream in as many phases as there are topics, the same prompts in either kind.

    ``abrupt``: a phase is one topic. ``mixed``: all phases together are shuffled.
    """
    parts = [list(bench.stream(topic, bench.sizes.phase)) for topic in order]
    if kind == "abrupt":
        return parts
    every = [question for part in parts for question in part]
    shuffled = [every[i] for i in np.random.default_rng(seed).permutation(len(every))]
    ends = np.cumsum([len(part) for part in parts])
    return [shuffled[end - len(part) : end] for end, part in zip(ends, parts, strict=True)]


def rehearsal_unit(
    bench: Bench, kind: str, system: str, learning: Learning, order: Sequence[str] = ORDER
) -> dict[str, Any]:
    """The result on disk, or made now."""
    settings = shift_settings(bench, kind, system, learning, order)
    name = rehearsal_name(bench, kind, system)
    return bench.store.unit(
        name, settings, lambda: rehearse_shift(bench, kind, system, learning, order)
    )


def rehearsal_name(bench: Bench, kind: str, system: str) -> str:
    """Of such a unit."""
    return f"shift-rehearsal-{rows.label(bench.data)}-{kind}-{system.replace(' ', '-')}"


def rehearse_shift(
    bench: Bench, kind: str, system: str, learning: Learning, order: Sequence[str]
) -> dict[str, Any]:
    """Learn from the frozen twins' answers, in the phases' order, without serving anything.

    Returns:
        ``order``, ``scores``, ``learning`` and ``machine`` as :func:`run_shift`.
    """
    answers = {s.key: s for t in order for s in bench.frozen(t, bench.sizes.phase)}
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(
            Path(folder),
            _experts(system, order),
            tireless(learning),
            lambda *_: None,
            dtype=bench.dtype,
        )
        scores = [_look(bench, learner, system, order)]
        for number, questions in enumerate(phases_of(bench, kind, order)):
            for question in questions:
                topic = _draft(system, question.topic)
                learner.take(replace(answers[question.key].record, topic=topic))
            scores.append(_look(bench, learner, system, order))
            named = f"{kind}, {system}, seed {learning.seed}"
            bench.say(f"{named}: after phase {number + 1}: {_means(scores[-1])}")
        return {
            "order": list(order),
            "scores": scores,
            "learning": learner.facts(),
            "machine": machine.facts(),
        }


def _experts(system: str, order: Sequence[str]) -> list[str]:
    return [GENERAL] if system == ONE else list(order)


def _draft(system: str, topic: str) -> str:
    """Who drafts for a topic, and learns from it."""
    return GENERAL if system == ONE else topic


def _look(
    bench: Bench, learner: Learner, system: str, order: Sequence[str]
) -> dict[str, list[float]]:
    """Acceptance of every topic's test under what its requests would get now."""
    found = {}
    for topic in order:
        _, state = learner.served(_draft(system, topic))
        tests = [served.record for served in bench.test(topic)]
        found[topic] = bench.judge.score(state, tests).facts()["acceptance"]
    return found


def _means(scores: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{topic} {mean(values):.3f}" for topic, values in scores.items())


def run_shift(
    bench: Bench, kind: str, system: str, learning: Learning, order: Sequence[str]
) -> dict[str, Any]:
    """Serve all phases; after each, judge what every topic's requests would get.

    The system of experts is routed by the prompts' own topics: what a router adds or costs is
    measured elsewhere. Both systems are offered the same micro-steps in all, and neither rests.

    Returns:
        ``phases``: counts per request and its topic; ``scores``: per phase (0 is before the
        first) and topic, acceptance per test prompt; ``learning``: cost and decisions.
    """
    experts = _experts(system, order)
    engine = bench.engine(experts)
    with tempfile.TemporaryDirectory() as folder:
        put, own = engine.updates.put, tireless(learning)
        learner = Learner(Path(folder), experts, own, put, dtype=bench.dtype)
        scores, phases = [_look(bench, learner, system, order)], []
        for number, questions in enumerate(phases_of(bench, kind, order)):
            drafts = [_draft(system, question.topic) for question in questions]
            done: list[Served] = []
            first = number * bench.sizes.phase
            for served in serve(
                engine, questions, drafts, bench.serving, topics=drafts, first=first
            ):
                learner.take(served.record)
                done.append(served)
            topics = [question.topic for question in questions]
            phases.append({"topics": topics, "counts": packed(counts_of(done))})
            scores.append(_look(bench, learner, system, order))
            bench.say(f"{kind}, {system}: after phase {number + 1}: {_means(scores[-1])}")
        return {
            "order": list(order),
            "phases": phases,
            "scores": scores,
            "learning": learner.facts(),
            "machine": machine.facts(),
        }
