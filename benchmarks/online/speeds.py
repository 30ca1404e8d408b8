"""Wall-clock speed of a topic's stream: plain, and with frozen draft, suffixes, one that learns.

    make bench-speeds ARGS="--data ../shared/data"

The stream comes in blocks of as many requests as there are between two rounds of training. Every
arm serves each block, in turns, one request at a time, with as many drafted tokens as the engine
chooses; then the draft learns from the block, and its seconds are counted apart. For a quiet
machine: what is learnt does not depend on it (streams.py), all of this does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from experts import prepare
from harness import (
    Timing,
    build,
    differing,
    interval,
    machine,
    paired_ratio,
    parsed,
    rotation,
    say,
    show,
    write,
)

from online.lab import FROZEN, Lab
from online.learner import Learning
from online.streams import Unit, stream_arguments, stream_lab
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import DRAFT_OFF
from paceline.actors.general import GENERAL
from paceline.actors.speculation.pending_updates import SwapWeights

PLAIN, DAY_0, SUFFIX, ONLINE = "plain", "frozen", "suffix", "online"
DAY_0_BOTH, BOTH = "frozen and suffix", "online and suffix"
COUNTED_IN = "{}, training counted in"
_LEARNING = (ONLINE, BOTH)


def arms_of(lab: Lab, topic: str) -> dict[str, tuple[Engine, str]]:
    """Engine of every arm, and the draft that its requests name."""
    drafts = lab.engine([GENERAL, topic], k=None)
    return {
        PLAIN: (drafts, DRAFT_OFF),
        DAY_0: (drafts, FROZEN),
        SUFFIX: (lab.engine([], k=None, suffix="topic"), ""),
        ONLINE: (drafts, topic),
        DAY_0_BOTH: (lab.engine([GENERAL], k=None, suffix="topic"), FROZEN),
        BOTH: (lab.engine([topic], k=None, suffix="topic"), topic),
    }


def speed(lab: Lab, topic: str, learning: Learning) -> Unit:
    """Seconds of every arm on every block.

    ``timings``: fields of Timing; ``training``: seconds after each block; ``differ``: answers of
    other arms that are not plain's; ``learning``: cost and decisions.
    """

    def make() -> Unit:
        size, prompts = learning.requests_per_round, lab.stream(topic)
        blocks = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        arms = arms_of(lab, topic)

        def put(update: SwapWeights) -> None:
            for arm in _LEARNING:
                arms[arm][0].updates.put(update)

        timings, training = list[Timing](), list[float]()
        texts: dict[str, dict[str, list[int]]] = {arm: {} for arm in arms}
        with lab.learner([topic], learning, put) as learner:
            for number, block in enumerate(blocks):
                records = []
                for arm in rotation(list(arms), number):
                    gc.collect()
                    engine, draft = arms[arm]
                    began = time.perf_counter()
                    found = list(lab.serve(engine, block, lambda _, d=draft: d, rows=1))  # type: ignore[misc]
                    seconds = time.perf_counter() - began
                    tokens = sum(len(answer.token_ids) for answer in found)
                    timings.append(Timing(arm, number, topic, tokens, seconds))
                    texts[arm] |= {answer.key: list(answer.token_ids) for answer in found}
                    records = [a.record for a in found] if arm == ONLINE else records
                began = time.perf_counter()
                for record in records:
                    learner.add(record)
                training.append(time.perf_counter() - began)
                say(f"{topic}: {len(texts[PLAIN])} requests")
            facts = learner.facts()
        differ = {arm: len(differing(texts[arm], texts[PLAIN])) for arm in arms}
        own = {"timings": [asdict(timing) for timing in timings], "training": training}
        return own | {"differ": differ, "learning": facts, "machine": machine()}

    named = {**build(), "learning": asdict(learning), "stream": len(lab.stream(topic))}
    found = lab.unit(f"speed-{topic}", lab.settings([topic], named), make)
    assert found is not None
    return found


def pays_after(other: Sequence[float], online: Sequence[float]) -> int | None:
    """Blocks after which online has taken less time in all, for good; None if it has not.

    Args:
        other: seconds of every block with another arm.
        online: likewise, training counted in.
    """
    lead = np.cumsum(np.subtract(other, online))
    behind = np.flatnonzero(lead < 0)
    first = int(behind[-1]) + 2 if len(behind) else 1
    return first if first <= len(online) else None


def summary(unit: Unit, size: int) -> dict[str, Any]:
    """Tokens per second by arm, ratios to plain, and requests until training has paid.

    Args:
        unit: see speed.
        size: requests per block.
    """
    timings = [Timing(**fields) for fields in unit["timings"]]
    counted = [
        replace(
            t, variant=COUNTED_IN.format(t.variant), seconds=t.seconds + unit["training"][t.block]
        )
        for t in timings
        if t.variant in _LEARNING
    ]
    every = timings + counted
    arms = list(dict.fromkeys(timing.variant for timing in every))
    seconds = {arm: [t.seconds for t in every if t.variant == arm] for arm in arms}
    tokens = sum(timing.tokens for timing in timings if timing.variant == PLAIN)
    blocks = len(unit["training"])
    last = [t for t in timings if t.block >= blocks - max(blocks // 3, 2)]  # what is learnt by then
    pays = {arm: pays_after(seconds[PLAIN], seconds[COUNTED_IN.format(arm)]) for arm in _LEARNING}
    return {
        "tokens_per_s": {arm: tokens / sum(seconds[arm]) for arm in arms},
        "over_plain": {arm: asdict(paired_ratio(every, arm, PLAIN)) for arm in arms[1:]},
        "last_third": {a: asdict(paired_ratio(last, a, PLAIN)) for a in (*_LEARNING, SUFFIX)},
        "training_s": sum(unit["training"]),
        "pays_after": {arm: n and n * size for arm, n in pays.items()},
        "differ": unit["differ"],
        "machine": unit["machine"],
    }


def report(topics: Mapping[str, Any]) -> None:
    """Print the table."""
    show(
        "Speed over the stream",
        [
            {"topic": topic, "arm": arm, "tokens/s": facts["tokens_per_s"][arm]}
            | {"over plain": interval(ratio)}
            | {"in the last third": interval(facts["last_third"].get(arm, {}))}
            | {"pays after": facts["pays_after"].get(arm), "differ": facts["differ"].get(arm)}
            for topic, facts in topics.items()
            for arm, ratio in facts["over_plain"].items()
        ],
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures."""
    parser = stream_arguments(__doc__)
    parser.add_argument("--topics", nargs="+", default=("sql", "shell"))
    options = parsed(parser, argv, requests=48)
    prepare(options.threads)
    lab, learning = stream_lab(options), Learning(micro_steps=options.micro_steps)
    topics: dict[str, Any] = {}
    for topic in options.topics:
        unit = speed(lab, topic, learning)
        topics[topic] = summary(unit, learning.requests_per_round)
        settings = lab.run_settings(list(topics))
        write(options.out / "speeds.json", {"settings": settings, "topics": topics})
    report(topics)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
