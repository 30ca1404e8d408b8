"""A topic's stream, learnt from as it comes, beside the frozen draft and the offline ceiling.

    make bench-online ARGS="--data ../shared/data --quick"

The target answers every prompt once, and every arm learns from the same records: a draft changes
no answer. What speculation with a draft would have done is replayed on them (rounds.py), with the
weights that are served when the request comes; acceptance on the test is teacher-forced. Nothing
here depends on how busy the machine is; speeds are those of speeds.py.

Parts: ``streams`` learns as configured, further answers included (``--set
training.synthetic_per_record=0``: without); ``seeds`` again with other seeds; ``ceilings`` distils
the same draft offline from the training side. Units that are there are kept, and figures are
written after every topic.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from experts import Offline, distil, prepare
from harness import Interval, Sample, bootstrap, interval, machine, parsed, say, show, write
from prompts import HUB

from online.lab import QUICK, Lab, Sizes, lab_arguments
from online.learner import Learner, Learning
from online.plots import draw_curves
from online.rounds import Agreement, Both, Tally, replayed_suffixes
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.distiller import Distiller

ORDER = ("math", "sql", "shell", "code")
FOLDER_TOPICS = (*ORDER, "chat", "finance")
PARTS = ("streams", "seeds", "ceilings")
SERVED = ("frozen", "suffix", "online", "frozen_both", "both")
COUNTS = ("rounds", "accepted", "drafted", "tokens")
LEAST_GAP = 0.15  # from frozen to ceiling, below which a share of it says little
SHARE = 0.9  # of such a gap that is to be closed
WITHIN = 0.02  # of the ceiling, if the gap is small
Unit = dict[str, Any]


def counts_of(tallies: Iterable[Tally], records: Sequence[ReplayRecord]) -> list[list[int]]:
    """``COUNTS`` per answer, as JSON."""
    return [
        [own.rounds, own.accepted, own.drafted, len(record.output_token_ids)]
        for own, record in zip(tallies, records, strict=True)
    ]


def learn(
    lab: Lab,
    learner: Learner,
    records: Sequence[ReplayRecord],
    expert_of: Callable[[str], str] = lambda topic: topic,
) -> Iterator[list[Agreement]]:
    """Learn from a stream, round by round; yield where the draft agrees with each answer.

    With the weights that are served when the request comes.

    Args:
        lab: see Lab.
        learner: of the experts.
        records: in their order.
        expert_of: expert of a topic.
    """
    rest = list(records)
    while rest:
        part, rest = rest[: learner.until_round], rest[learner.until_round :]
        agreements: list[Agreement] = []
        for expert, own in groupby(part, lambda record: expert_of(record.topic)):
            state = learner.served(expert)[1]
            agreements += lab.evaluator.agreements(state, list(own))
        for record in part:
            learner.add(record, expert_of(record.topic))
        yield agreements


def stream(lab: Lab, topic: str, learning: Learning, *, run: bool = True) -> Unit | None:
    """A topic's stream, from disk or run now; None if it is missing and not to be run.

    ``frozen``, ``online``, ``suffix``, ``frozen_both``, ``both``: counts per request, the last two
    of a draft and ``suffix`` together, ``both`` with the draft that learns, as is served by
    default; ``checkpoints``: scores per test prompt by requests; ``test_`` and these names: counts
    of the test, with the last weights and with all answers of the stream known;
    ``learning``: see Learner.facts.
    """

    def make() -> Unit:
        records, test = lab.stream_records(topic), lab.test_records(topic)
        first = [lab.evaluator.agreements(None, own) for own in (records, test)]
        found: Unit = {
            "machine": machine(),
            "frozen": counts_of(lab.replayed(first[0]), records),
            "test_frozen": counts_of(lab.replayed(first[1]), test),
        }
        scores, agreements = {"0": lab.scores(topic, None)}, list[Agreement]()
        with lab.learner([topic], learning) as learner:
            for learnt in learn(lab, learner, records):
                before, done = len(agreements), len(agreements) + len(learnt)
                agreements += learnt
                if any(before < at <= done for at in (*lab.sizes.checkpoints, len(records))):
                    scores[str(done)] = lab.scores(topic, learner.served(topic)[1])
                    say(f"{topic}: {done} requests, acceptance {np.mean(scores[str(done)]):.3f}")
            state, found["learning"] = learner.served(topic)[1], learner.facts()
        found |= {"checkpoints": scores, "online": counts_of(lab.replayed(agreements), records)}
        k, most = lab.sizes.k, lab.sizes.max_tokens
        found["suffix"] = counts_of(replayed_suffixes(records, k, most), records)
        found["test_suffix"] = counts_of(replayed_suffixes(test, k, most, records), test)
        at_last = lab.evaluator.agreements(state, test)
        found["test_online"] = counts_of(lab.replayed(at_last), test)
        for name, own in (("frozen_both", first), ("both", (agreements, at_last))):
            both = Both(k, most)  # first over the stream: the test's requests come after it
            found[name] = counts_of(map(both.replayed, records, own[0]), records)
            found[f"test_{name}"] = counts_of(map(both.replayed, test, own[1]), test)
        return found

    sizes = {"stream": len(lab.stream(topic)), "checkpoints": list(lab.sizes.checkpoints)}
    settings = lab.settings([topic], {"learning": asdict(learning), **sizes})
    return lab.unit(f"stream-{topic}-{learning.seed}", settings, make if run else None)


def ceiling(lab: Lab, topic: str, offline: Offline, *, run: bool = True) -> Unit | None:
    """The same draft distilled offline until it gains no more, see :func:`experts.distil`.

    ``test``: scores per test prompt; ``test_counts``: counts of the test served.
    """
    name, most = f"ceiling-{topic}", lab.sizes.ceiling
    settings = lab.settings([topic], {"offline": asdict(offline), "prompts_at_most": most})

    def make() -> Unit:
        distiller = Distiller(str(lab.draft), lab.trainer([topic]).distiller)
        kept = lab.kept(name, settings)
        state, facts = distil(lab.stream_records(topic, most), distiller, offline, kept)
        test = lab.test_records(topic)
        counts = counts_of(lab.replayed(lab.evaluator.agreements(state, test)), test)
        return {"test": lab.scores(topic, state), "test_counts": counts, **facts}

    return lab.unit(name, settings, make if run else None)


def frame_of(counts: Sequence[Sequence[float]]) -> pd.DataFrame:
    """Counts of requests, a row each."""
    return pd.DataFrame(counts, columns=list(COUNTS))


def window_sums(counts: Sequence[Sequence[float]], size: int) -> pd.DataFrame:
    """Counts of windows of ``size`` requests, by the number of requests at their end.

    A rest that fills none is left out.
    """
    frame = frame_of(counts[: len(counts) // size * size])
    return frame.groupby((frame.index // size + 1) * size).sum()


def windows(counts: Sequence[Sequence[float]], size: int) -> pd.Series:
    """Acceptance rate of :func:`window_sums`; nan if nothing was drafted."""
    sums = window_sums(counts, size)
    return sums.accepted / sums.drafted.where(sums.drafted > 0)


def window_lengths(counts: Sequence[Sequence[float]], size: int) -> pd.Series:
    """Tokens per round of :func:`window_sums`; nan if there was no round."""
    sums = window_sums(counts, size)
    return 1.0 + sums.accepted / sums.rounds.where(sums.rounds > 0)


def mean(sample: Sample) -> float:
    """Mean of a sample."""
    return float(np.mean(sample))


def gap_closed(frozen: Sample, online: Sample, ceiling: Sample) -> float | None:
    """(online - frozen) / (ceiling - frozen) of means; None if there is no gap to close."""
    gap = mean(ceiling) - mean(frozen)
    return (mean(online) - mean(frozen)) / gap if gap > 0 else None


def reached(frozen: Sample, online: Sample, ceiling: Sample) -> bool:
    """Whether the goal is: 90 % of a gap of 0.15 or more, else within 0.02 of the ceiling."""
    if mean(ceiling) - mean(frozen) >= LEAST_GAP:
        share = gap_closed(frozen, online, ceiling)
        return share is not None and share >= SHARE
    return mean(ceiling) - mean(online) <= WITHIN


def rounded(found: Interval) -> dict[str, float | None]:
    """An interval for JSON."""
    return {k: None if v is None else round(v, 4) for k, v in asdict(found).items()}


def ratio(upper: Any, lower: Any) -> float | None:
    """Ratio of sums, None if nothing was counted."""
    return float(upper.sum() / lower.sum()) if lower.sum() else None


def acceptance_length(rounds: Any, accepted: Any) -> float | None:
    """Tokens per speculative round, the bonus token included."""
    return 1.0 + float(accepted.sum() / rounds.sum()) if rounds.sum() else None


def served_summary(counts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Acceptance rate and mean acceptance length of requests, resampled by request."""
    own = frame_of(counts)
    length = bootstrap(acceptance_length, own.rounds, own.accepted)
    rate = bootstrap(ratio, own.accepted, own.drafted)
    return {"acceptance_rate": rounded(rate), "mean_acceptance_length": rounded(length)}


def acceptance_summary(unit: Unit, ceiling: Unit | None) -> dict[str, Any]:
    """Acceptance on the test: frozen, online, ceiling, share of the gap closed, checkpoints."""
    scores = {int(at): own for at, own in unit["checkpoints"].items()}
    frozen, online = scores[min(scores)], scores[max(scores)]
    found: dict[str, Any] = {
        "frozen": rounded(bootstrap(mean, frozen)),
        "online": rounded(bootstrap(mean, online)),
        "checkpoints": {at: round(mean(scores[at]), 4) for at in sorted(scores)},
    }
    if ceiling is not None:
        best = ceiling["test"]
        found |= {
            "ceiling": rounded(bootstrap(mean, best)),
            "gap_closed": rounded(bootstrap(gap_closed, frozen, online, best)),
            "reached": reached(frozen, online, best),
        }
    return found


def cost(unit: Unit) -> dict[str, Any]:
    """Processor seconds of training and of synthetic records, in all and per point; decisions.

    A point is 0.01 of test acceptance.
    """
    found, learning = acceptance_summary(unit, None), unit["learning"]
    seconds = {
        "training_s": float(learning["seconds"]),
        "synthetic_s": float(learning.get("synthetic", {}).get("seconds", 0.0)),
    }
    points = 100.0 * (found["online"]["value"] - found["frozen"]["value"])
    return {name: learning[name] for name in ("micro_steps", "published", "rejected")} | {
        **seconds,
        "seconds_per_point": sum(seconds.values()) / points if points > 0 else None,
    }


def topic_summary(
    unit: Unit, ceiling: Unit | None, seeds: Sequence[Unit], size: int
) -> dict[str, Any]:
    """Figures of a topic's stream, in windows of ``size`` requests."""
    parts = {name: unit[f"test_{name}"] for name in SERVED}
    if ceiling is not None:
        parts["ceiling"] = ceiling["test_counts"]
    return acceptance_summary(unit, ceiling) | {
        "requests": len(unit["online"]),
        "windows": {name: window_lengths(unit[name], size).round(4).to_dict() for name in SERVED},
        "test_served": {name: served_summary(counts) for name, counts in parts.items()},
        "cost": cost(unit),
        "seeds": [acceptance_summary(own, ceiling) for own in seeds],
        "machine": unit["machine"],
    }


def topic_figures(lab: Lab, topic: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Figures of a topic; what is missing of the wanted parts is run."""
    parts, learning = options.parts, Learning(micro_steps=options.micro_steps)
    seeds = [replace(learning, seed=seed) for seed in range(1, options.seeds)]
    quick = Offline(steps_per_look=20, max_steps=40)
    offline = quick if options.quick else Offline(max_steps=2_000)
    own = stream(lab, topic, learning, run="streams" in parts)
    most = ceiling(lab, topic, offline, run="ceilings" in parts)
    others = [stream(lab, topic, s, run="seeds" in parts) for s in seeds]
    found = [unit for unit in others if unit is not None]
    return own and topic_summary(own, most, found, lab.sizes.window)


def draw(topics: dict[str, Any], out: Path) -> None:
    """Write streams.png."""
    levels = {
        topic: own["test_served"]["ceiling"]["mean_acceptance_length"]["value"]
        for topic, own in topics.items()
        if "ceiling" in own["test_served"]
    }
    curves = {topic: pd.DataFrame(facts["windows"]) for topic, facts in topics.items()}
    draw_curves(out / "streams.png", curves, levels, "tokens per round")


def rows_of(topics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Acceptance on the test, a row per topic."""
    names = ("frozen", "online", "ceiling", "gap_closed")
    for topic, facts in topics.items():
        row = {name: interval(facts[name]) for name in names if name in facts}
        curve = list(facts["checkpoints"].values())
        yield {"topic": topic, **row, "reached": facts.get("reached"), "checkpoints": curve}


def report(figures: dict[str, Any]) -> None:
    """Print the tables."""
    show("Acceptance on the test", rows_of(figures["topics"]))
    show(
        "Test served: mean acceptance length; gap closed by seed; cost",
        [
            {"topic": topic}
            | {n: interval(o["mean_acceptance_length"]) for n, o in facts["test_served"].items()}
            | {"seeds": [interval(s["gap_closed"]) for s in facts["seeds"] if "gap_closed" in s]}
            | facts["cost"]
            for topic, facts in figures["topics"].items()
        ],
    )


def stream_arguments(doc: str | None) -> argparse.ArgumentParser:
    """Parser of the options of a :func:`stream_lab`."""
    parser = lab_arguments(doc)
    parser.add_argument("--requests", type=int, help="of a stream; 1000, with --quick 64")
    return parser


def stream_lab(options: argparse.Namespace) -> Lab:
    """A lab of streams of ``--requests`` prompts, and of phases of half as many."""
    sizes = QUICK if options.quick else Sizes()
    if options.requests is not None:
        sizes = replace(sizes, stream=options.requests, phase=options.requests // 2)
    return Lab(options, sizes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and pictures."""
    parser = stream_arguments(__doc__)
    add = parser.add_argument
    add("--topics", nargs="+", help="all that the prompts' source has")
    add("--parts", nargs="+", choices=PARTS, default=("streams", "ceilings"))
    add("--ceiling", type=int, help="prompts of the ceiling at most; 2000, with --quick 64")
    add("--seeds", type=int, default=2, help="of training; 0 is that of the stream")
    options = parsed(parser, argv, topics=("sql", "shell"))
    prepare(options.threads)
    lab = stream_lab(options)
    if options.ceiling is not None:
        lab.sizes = replace(lab.sizes, ceiling=options.ceiling)
    known = ORDER if options.data in (None, HUB) else FOLDER_TOPICS
    topics: dict[str, Any] = {}
    for topic in options.topics or known:
        facts = topic_figures(lab, topic, options)
        if facts is None:
            continue
        topics[topic] = facts
        # After every topic: a run that is stopped leaves what it has found.
        settings = lab.run_settings(list(topics))
        figures = {"machine": machine(), "settings": settings, "topics": topics}
        write(options.out / "streams.json", figures)
    draw(topics, options.out)
    report({"topics": topics})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
