"""A topic's stream served by a draft that learns from it, beside its frozen twin and the ceiling.

    make bench-online ARGS="--data ../shared/data --quick"

Parts: ``streams`` serves every topic's prompts with a draft that learns from them alone; ``seeds``
trains on the same records again with other seeds; ``synthetic`` lets the target make further
prompts up; ``ceilings`` distils the same draft offline from the whole training side. Acceptance is
teacher-forced on the target's answers to test prompts. Units that are there are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from decoding import Answer
from experts import Offline, distil, prepare
from harness import Interval, Sample, bootstrap, interval, machine, parsed, say, show, write
from prompts import Prompt

from online.lab import Lab, lab_arguments
from online.learner import Learner, Learning
from online.plots import draw_curves
from paceline.actors.engine.request import DRAFT_OFF
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.distiller import Distiller

ORDER = ("math", "sql", "shell", "code")
PARTS = ("streams", "seeds", "synthetic", "ceilings")
COUNTS = ("rounds", "accepted", "drafted", "tokens", "seconds")
LEAST_GAP = 0.15  # from frozen to ceiling, below which a share of it says little
SHARE = 0.9  # of such a gap that is to be closed
WITHIN = 0.02  # of the ceiling, if the gap is small
Unit = dict[str, Any]


def counts_of(answers: Iterable[Answer], prompts: Sequence[Prompt]) -> list[list[float]]:
    """``COUNTS`` per prompt, in the prompts' order, as JSON."""
    found = {answer.key: answer for answer in answers}
    rows = []
    for own in (found[prompt.key] for prompt in prompts):
        sums = own.drafted.rounds, own.drafted.accepted, own.drafted.drafted or 0
        rows.append([*sums, len(own.token_ids), round(own.seconds, 5)])
    return rows


def serve_test(lab: Lab, engine: Any, topic: str) -> list[list[float]]:
    """Counts of the test served with a topic's draft."""
    test = lab.test_prompts(topic)
    return counts_of(lab.serve(engine, test), test)


def learn_from(
    lab: Lab, topic: str, learner: Learner, answers: Iterable[Answer]
) -> tuple[dict[str, Any], list[Answer]]:
    """Learn from answers as they come: scores on the test by number of answers, and answers."""
    found, done = {"0": lab.scores(topic, None)}, []
    for answer in answers:
        learner.add(answer.record)
        done.append(answer)
        if len(done) in (*lab.sizes.checkpoints, len(lab.stream(topic))):
            found[str(len(done))] = scores = lab.scores(topic, learner.served(topic)[1])
            say(f"{topic}: {len(done)} requests, acceptance {np.mean(scores):.3f}")
    return found, done


def stream(
    lab: Lab, topic: str, learning: Learning, *, served: bool = True, run: bool = True
) -> Unit | None:
    """A topic's stream, from disk or run now; None if it is missing and not to be run.

    ``frozen`` and ``online``: counts per request, each of one pass; ``checkpoints``: scores per
    test prompt by requests; ``test_frozen`` and ``test_online``: counts of the test with the
    initial and the last weights; ``learning``: cost and decisions; ``synthetic``: what was made up.

    Args:
        lab: see Lab.
        topic: of the stream.
        learning: see Learning.
        served: whether the draft that learns serves the stream; else it learns from the frozen
            twin's records, in their order: no draft changes what the target says.
        run: whether to run what is missing.
    """

    def make() -> Unit:
        prompts = lab.stream(topic)
        engine = lab.engine([topic])
        found: Unit = {"machine": machine()}
        if served:
            # An engine and a pass of its own: seconds of answers from disk do not compare.
            found["frozen"] = counts_of(lab.serve(lab.engine([topic]), prompts), prompts)
        with lab.learner([topic], learning, engine.updates.put) as (learner, synthetic):
            answers = lab.serve(engine, prompts) if served else lab.frozen(topic)
            found["checkpoints"], online = learn_from(lab, topic, learner, answers)
            found["learning"] = learner.facts()
        if served:
            found["online"] = counts_of(online, prompts)
        if synthetic is not None:
            found["synthetic"] = synthetic.facts()
        test = lab.test_prompts(topic)
        found["test_frozen"] = counts_of(lab.test(topic), test)
        return found | {"test_online": serve_test(lab, engine, topic)}

    sizes = {"stream": len(lab.stream(topic)), "checkpoints": list(lab.sizes.checkpoints)}
    settings = lab.settings([topic], {"learning": asdict(learning), "served": served, **sizes})
    name = f"stream-{topic}{'' if served else '-not-served'}-{learning.seed}"
    return lab.unit(name, settings, make if run else None)


def ceiling(lab: Lab, topic: str, offline: Offline, *, run: bool = True) -> Unit | None:
    """The same draft distilled offline until it gains no more, see :func:`experts.distil`.

    ``test``: scores per test prompt; ``test_counts``: counts of the test served.
    """
    most = lab.sizes.ceiling
    settings = lab.settings([topic], {"offline": asdict(offline), "prompts_at_most": most})

    def make() -> Unit:
        prompts = lab.training_prompts(topic)[:most]
        first = lab.frozen(topic, min(len(prompts), lab.sizes.stream))
        rest = lab.kept_answers(f"{topic}-rest", prompts[len(first) :], DRAFT_OFF)
        records = [answer.record for answer in (*first, *rest)]
        distiller = Distiller(str(lab.draft), lab.trainer([topic]).distiller)
        state, facts = distil(records, distiller, offline)
        engine = lab.engine([topic])
        engine.updates.put(SwapWeights(topic, 1, dict(state)))
        scores = lab.scores(topic, state)
        return {"test": scores, "test_counts": serve_test(lab, engine, topic), **facts}

    return lab.unit(f"ceiling-{topic}", settings, make if run else None)


def frame_of(counts: Sequence[Sequence[float]]) -> pd.DataFrame:
    """Counts of requests, a row each."""
    return pd.DataFrame(counts, columns=list(COUNTS))


def windows(counts: Sequence[Sequence[float]], size: int) -> pd.Series:
    """Acceptance rate of windows of ``size`` requests, by the number of requests at their end.

    A rest that fills none is left out; nan if nothing was drafted.
    """
    frame = frame_of(counts[: len(counts) // size * size])
    sums = frame.groupby((frame.index // size + 1) * size).sum()
    return sums.accepted / sums.drafted.where(sums.drafted > 0)


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


def pays_after(frozen: pd.Series, online: pd.Series, training_s: float) -> int | None:
    """First request at which online, training spread evenly over it, is as fast; None if never.

    Args:
        frozen: seconds of every request.
        online: likewise.
        training_s: of the whole stream.
    """
    lead = (frozen - online - training_s / len(online)).cumsum().to_numpy()
    behind = np.flatnonzero(lead < 0)
    first = int(behind[-1]) + 2 if len(behind) else 1
    return first if first <= len(online) else None


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
    """Training's seconds per point (0.01) of test acceptance, and speed over the frozen twin.

    Seconds are those of serving and training in the same process on the same threads.
    """
    frozen, online = frame_of(unit["frozen"]), frame_of(unit["online"])
    found, training_s = acceptance_summary(unit, None), float(unit["learning"]["seconds"])
    points = 100.0 * (found["online"]["value"] - found["frozen"]["value"])
    plain = frozen.tokens.sum() / frozen.seconds.sum()
    return {name: unit["learning"][name] for name in ("micro_steps", "published", "rejected")} | {
        "training_s": training_s,
        "seconds_per_point": training_s / points if points > 0 else None,
        "speedup": online.tokens.sum() / (online.seconds.sum() + training_s) / plain,
        "speedup_without_training": online.tokens.sum() / online.seconds.sum() / plain,
        "pays_after": pays_after(frozen.seconds, online.seconds, training_s),
    }


def topic_summary(
    unit: Unit, ceiling: Unit | None, seeds: Sequence[Unit], synthetic: Unit | None, size: int
) -> dict[str, Any]:
    """Figures of a topic's stream, in windows of ``size`` requests."""
    parts = {"frozen": unit["test_frozen"], "online": unit["test_online"]}
    if ceiling is not None:
        parts["ceiling"] = ceiling["test_counts"]
    found = acceptance_summary(unit, ceiling) | {
        "requests": len(unit["online"]),
        "windows": {
            name: windows(unit[name], size).round(4).to_dict() for name in ("frozen", "online")
        },
        "test_served": {name: served_summary(counts) for name, counts in parts.items()},
        "cost": cost(unit),
        "seeds": [acceptance_summary(own, ceiling) for own in seeds],
        "machine": unit["machine"],
    }
    if synthetic is not None:
        found["synthetic"] = acceptance_summary(synthetic, ceiling) | {
            "made": synthetic["synthetic"],
            "test_served": served_summary(synthetic["test_online"]),
        }
    return found


def topic_figures(lab: Lab, topic: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Figures of a topic; what is missing of the wanted parts is run."""
    parts, learning = options.parts, Learning(micro_steps=options.micro_steps)
    seeds = [replace(learning, seed=seed) for seed in range(1, options.seeds)]
    made = replace(learning, synthetic=options.synthetic)
    offline = Offline(max_steps=150 if options.quick else 8_000)
    own = stream(lab, topic, learning, run="streams" in parts)
    most = ceiling(lab, topic, offline, run="ceilings" in parts)
    others = [stream(lab, topic, s, served=False, run="seeds" in parts) for s in seeds]
    more = stream(lab, topic, made, served=False, run="synthetic" in parts)
    found = [unit for unit in others if unit is not None]
    return own and topic_summary(own, most, found, more, lab.sizes.window)


def draw(topics: dict[str, Any], out: Path) -> None:
    """Write streams.png and, if there are synthetic prompts, synthetic.png."""
    served = {t: facts["test_served"] for t, facts in topics.items()}
    levels = {
        topic: own["ceiling"]["acceptance_rate"]["value"]
        for topic, own in served.items()
        if "ceiling" in own
    }
    curves = {topic: pd.DataFrame(facts["windows"]) for topic, facts in topics.items()}
    draw_curves(out / "streams.png", curves, levels, "acceptance rate")
    both = {topic: facts for topic, facts in topics.items() if "synthetic" in facts}
    levels = {t: facts["ceiling"]["value"] for t, facts in both.items() if "ceiling" in facts}
    curves = {
        topic: pd.DataFrame(
            {
                "online": facts["checkpoints"],
                "with synthetic prompts": facts["synthetic"]["checkpoints"],
            }
        )
        for topic, facts in both.items()
    }
    draw_curves(out / "synthetic.png", curves, levels, "acceptance on the test")


def rows_of(topics: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Acceptance on the test, a row per topic and amount of synthetic prompts."""
    names = ("frozen", "online", "ceiling", "gap_closed")
    for topic, facts in topics.items():
        for kind, own in (("", facts), ("with synthetic prompts", facts.get("synthetic"))):
            if own is not None:
                row = {name: interval(own[name]) for name in names if name in own}
                curve = list(own["checkpoints"].values())
                yield {"topic": topic, "": kind, **row, "reached": own.get("reached")} | {
                    "checkpoints": curve
                }


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and pictures."""
    parser = lab_arguments(__doc__)
    parser.add_argument("--topics", nargs="+", default=ORDER)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--seeds", type=int, default=3, help="of training; 0 serves")
    parser.add_argument("--synthetic", type=float, default=4.0, help="prompts per record")
    quick = {"topics": ("sql", "shell"), "parts": ("streams", "ceilings")}
    options = parsed(parser, argv, **quick)
    prepare(options.threads)
    lab = Lab(options)
    found = {topic: topic_figures(lab, topic, options) for topic in options.topics}
    topics = {topic: facts for topic, facts in found.items() if facts is not None}
    settings = {"sizes": asdict(lab.sizes), **lab.settings((), {})}
    figures = {"machine": machine(), "settings": settings, "topics": topics}
    write(options.out / "streams.json", figures)
    draw(topics, options.out)
    report(figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
