"""Experts behind a router against one draft of the same size and the same training steps.

    make bench-routes ARGS="--data ../shared/data"

Both learn online from one mixed stream of all topics, from the same initial draft, under the same
gate, with as many micro-steps in all: one draft has every step, five experts (``general`` among
them) share them as the trainer schedules. Then every draft is run over the target's answers to
prompts that neither has seen, which for greedy answers decides exactly what speculation with it
would have done: one training run evaluates every routing policy.

The small target knows four kinds of English text; on other prompts acceptance says how a draft
follows it, and nothing of the text.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from expert_cache import DRAFT, ROUTER, SMALL_MODELS
from harness import Store, arguments, bootstrap, interval, machine, say, show, write
from numpy.typing import NDArray
from prompts import MAX_PROMPT_TOKENS, chat_ids

from online.bench import QUICK, Bench, Sizes, prepare
from online.learner import Evaluator, Learner, Learning
from online.rows import Question, interleaved, label
from online.serving import Answer, Serving, answers_of
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.selection import is_scored
from paceline.actors.router.classifier import TopicClassifier
from paceline.actors.router.hedge import Hedge
from paceline.actors.router.policy import GENERAL, MinConfidence, choose_topic, route
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.config.sections import RouterConfig
from paceline.deploy.demo.prompts import TOPICS

SINGLE, EXPERTS, FROZEN = "single", "experts", "frozen"
WHOLE = ("mixed", "unpicked", "languages")  # groups of groups
UNPICKED = ("userprompts", "arena", "mtbench", "specbench")
ENGLISH = "en"
LANGUAGES = ("de", ENGLISH, "es", "fr", "ja", "ko", "pt", "ru", "zh")
PARALLEL = ("tldr", "xquad-qa")  # the same items in several languages
# Confidence of the stream's topics; the report takes the served rule's.
STREAM_CONFIDENCE = 0.5
SAMPLE_SHARE = RouterConfig().sample_share
_SEED = 4003
_RESAMPLES = 500
Unit = Mapping[str, Any]
Groups = Mapping[str, Sequence["Tally"]]


@dataclass(frozen=True, slots=True)
class Tally:
    """One draft on one answer: rounds, drafted and accepted tokens, and the scorer's gain.

    ``gain`` is the share of the answer's tokens that the draft proposes, teacher-forced.
    """

    rounds: int
    drafted: int
    accepted: int
    gain: float


def replayed(agrees: Sequence[bool], k: int, max_tokens: int) -> Tally:
    """Exact outcome of greedy speculation with ``k`` tokens a round.

    A draft's tokens are the target's as long as they are accepted, so teacher-forced agreement
    decides every round.
    """
    at, rounds, drafted, accepted = 0, 0, 0, 0
    while at < len(agrees):
        tried = min(k, max_tokens - at - 1)
        run = 0
        while run < min(tried, len(agrees) - at) and agrees[at + run]:
            run += 1
        if tried > 0:
            rounds, drafted, accepted = rounds + 1, drafted + tried, accepted + run
        at += run + 1
    gain = math.fsum(map(float, agrees)) / len(agrees) if len(agrees) else 0.0
    return Tally(rounds, drafted, accepted, gain)


@dataclass(frozen=True, slots=True)
class Counts:
    """Prompts per topic of the stream, and per topic, file and (language, part) of the tests."""

    stream: int
    test: int
    unpicked: int
    language: int


@dataclass(frozen=True, slots=True)
class Group:
    """Answered prompts with their topics, None if unknown, and the classifier's probabilities."""

    answers: Sequence[Answer]
    labels: Sequence[str | None]
    probabilities: Sequence[Mapping[str, float]]

    def part(self, indices: Sequence[int]) -> Group:
        """Some of the prompts."""
        every = self.answers, self.labels, self.probabilities
        return Group(*([own[i] for i in indices] for own in every))


class RoutePrompts:
    """Groups of prompts with the target's answers and the classifier's probabilities."""

    def __init__(self, bench: Bench, counts: Counts) -> None:
        self.bench, self.counts = bench, counts
        self._classifier = TopicClassifier(str(ROUTER))

    def stream(self, seed: int) -> Group:
        """All four topics mixed, in an order that depends on the seed."""
        parts = [self.bench.stream(topic, self.counts.stream) for topic in TOPICS]
        order = sorted(
            interleaved(parts),
            key=lambda q: hashlib.sha256(f"{seed}:{q.key}".encode()).digest(),
        )
        by_topic = {topic: self.bench.frozen(topic, self.counts.stream) for topic in TOPICS}
        kept = {(t, answer.key): answer for t, every in by_topic.items() for answer in every}
        return self._group(order, [kept[q.topic, q.key] for q in order], topical=True)

    def groups(self) -> dict[str, Callable[[], Group]]:
        """Name of every group of test prompts, and the function that makes it."""
        found: dict[str, Callable[[], Group]] = {}
        for topic in TOPICS:
            questions = self.bench.questions(topic).test[: self.counts.test]
            found[f"topic {topic}"] = (
                lambda t=topic, q=questions: self._group(  # type: ignore[misc]
                    q, self.bench.test(t)[: len(q)], topical=True
                )
            )
        if self.bench.data is None or not Path(self.bench.data).is_dir():
            say("unpicked prompts and languages need --data FOLDER: left out")
            return found
        known: set[str] = set()  # Spec-Bench holds the prompts of MT-bench
        for name in UNPICKED:
            own = [row for row in self._rows(name) if row["prompt"] not in known]
            known |= {row["prompt"] for row in own}
            fitting = list(self._fitting(name, own).values())[: self.counts.unpicked]
            found[f"file {name}"] = lambda n=name, q=fitting: self._answered(n, q)  # type: ignore[misc]
        for part in PARALLEL:
            by_language = {
                language: self._fitting(
                    f"{language}-{part}",
                    (
                        row
                        for row in self._rows(f"lang_{language}")
                        if row["topic"] == f"lang-{language}: {part}"
                    ),
                )
                for language in LANGUAGES
            }
            for language, own_part in parallel(by_language, self.counts.language).items():
                found[f"lang {language} {part}"] = (  # type: ignore[misc]
                    lambda n=f"{language}-{part}", q=own_part: self._answered(n, q)
                )
        return found

    def _rows(self, name: str) -> Iterator[dict[str, Any]]:
        path = Path(str(self.bench.data)) / f"{name}_test.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            yield from map(json.loads, lines)

    def _fitting(self, name: str, rows: Any) -> dict[str, Question]:
        """Prompts that are short enough, by item, in the order of a hash of the item."""
        found: dict[str, Question] = {}
        for row in sorted(rows, key=lambda row: hashlib.sha256(item_of(row).encode()).digest()):
            ids = chat_ids(self.bench.tokenizer, row["prompt"])
            if len(ids) <= MAX_PROMPT_TOKENS:
                found.setdefault(item_of(row), Question(row["id"], name, ids))
        return found

    def _answered(self, name: str, questions: Sequence[Question]) -> Group:
        answers = answers_of(
            self.bench.store.folder / "answers",
            f"{label(self.bench.data)}-{name}-test",
            questions,
            self.bench.serving,
            lambda: self.bench.frozen_engine,
        )
        return self._group(questions, answers, topical=False)

    def _group(
        self, questions: Sequence[Question], answers: Sequence[Answer], *, topical: bool
    ) -> Group:
        decode = self.bench.tokenizer.decode
        texts = [decode(q.token_ids, skip_special_tokens=True) for q in questions]
        labels = [q.topic if topical else None for q in questions]
        return Group(answers, labels, [self._classifier.classify(text) for text in texts])


def parallel(
    fitting: Mapping[str, Mapping[str, Question]], count: int
) -> dict[str, list[Question]]:
    """Prompts of each language that English has too, and these in English."""
    english = fitting[ENGLISH]
    others = {
        language: [item for item in own if item in english][:count]
        for language, own in fitting.items()
        if language != ENGLISH
    }
    wanted = {item for items in others.values() for item in items}
    found = {ENGLISH: [question for item, question in english.items() if item in wanted]}
    found |= {language: [fitting[language][i] for i in items] for language, items in others.items()}
    return {language: questions for language, questions in found.items() if questions}


def without_language(key: str, language: str) -> str:
    """Common part of the keys of one item's translations."""
    return key.replace(f"-{language}-", "-", 1)


def item_of(row: Mapping[str, Any]) -> str:
    """A row's id without its language: translations of one item share it."""
    return f"{_SEED}:{without_language(row['id'], row['lang'])}"


def run_arm(
    name: str, prompts: RoutePrompts, evaluator: Evaluator, learning: Learning
) -> dict[str, Any]:
    """Train one draft for all (``SINGLE``) or ``EXPERTS`` on the stream; tally every group.

    The seed of ``learning`` orders the stream too.
    """
    drafts = (GENERAL,) if name == SINGLE else (GENERAL, *TOPICS)
    beside = (FROZEN,) if name == SINGLE else ()
    stream = prompts.stream(learning.seed)
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Path(folder), drafts, learning, lambda _: None)
        for answer, probabilities in zip(stream.answers, stream.probabilities, strict=True):
            topic = choose_topic(probabilities, drafts, STREAM_CONFIDENCE)
            learner.add(replace(answer.record, topic=topic))

        def tally(group: Group) -> dict[str, Any]:
            records = [answer.record for answer in group.answers]
            tallies = {}
            for draft in (*drafts, *beside):
                state = None if draft == FROZEN else learner.served(draft)[1]
                own = tallies_of(evaluator, state, records, prompts.bench.serving)
                tallies[draft] = [[t.rounds, t.drafted, t.accepted, round(t.gain, 5)] for t in own]
            return {
                "keys": [answer.key for answer in group.answers],
                "labels": list(group.labels),
                "probabilities": [
                    {topic: round(p, 4) for topic, p in own.items()} for own in group.probabilities
                ],
                "tallies": tallies,
            }

        return {
            "groups": {group: tally(make()) for group, make in prompts.groups().items()},
            "sampled": tally(sample(stream, learning.held_out_fraction)),
            "learning": learner.facts(),
            "machine": machine(),
        }


def tallies_of(
    evaluator: Evaluator, state: Any, records: Sequence[ReplayRecord], serving: Serving
) -> list[Tally]:
    """One tally per record, under these weights (None: the initial ones)."""
    k, most = serving.num_speculative_tokens, serving.max_tokens
    return [replayed(agrees, k, most) for agrees in evaluator.agreements(state, records)]


def sample(stream: Group, held_out_fraction: float) -> Group:
    """Requests of the stream that the scorer would be sent: none that was trained on."""
    return stream.part(
        [
            i
            for i, answer in enumerate(stream.answers)
            if is_scored(answer.record, SAMPLE_SHARE, held_out_fraction)
        ]
    )


def check(prompts: RoutePrompts, evaluator: Evaluator) -> dict[str, Any]:
    """Replayed figures of the initial draft beside those of the engine, on the topics' tests."""
    answers = [answer for topic in TOPICS for answer in prompts.bench.test(topic)]
    records = [answer.record for answer in answers]
    tallies = tallies_of(evaluator, None, records, prompts.bench.serving)
    names = ("rounds", "drafted", "accepted")
    return {
        "prompts": len(answers),
        "engine": {name: sum(getattr(a, name) for a in answers) for name in names},
        "replayed": {name: sum(getattr(t, name) for t in tallies) for name in names},
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, its topic by the data set, the classifier's probabilities, a tally per expert."""

    key: str
    label: str | None
    probabilities: Mapping[str, float]
    tallies: Mapping[str, Tally]


Policy = Callable[[Case], str]


def best(case: Case) -> str:
    """The expert with most accepted tokens a round in hindsight; of equal ones the first."""
    tallies = case.tallies
    return max(sorted(tallies), key=lambda e: tallies[e].accepted / max(tallies[e].rounds, 1))


class Measured:
    """The server's policy: the classifier's rule, corrected by acceptance on sampled requests.

    Args:
        experts: ``general`` included.
        min_confidence: of the rule.
        sample_share: of the requests, on which every expert is scored.
        seed: of the sample.
    """

    def __init__(
        self,
        experts: Collection[str],
        min_confidence: MinConfidence,
        sample_share: float,
        seed: int = 0,
    ) -> None:
        self._experts, self._min_confidence = experts, min_confidence
        self._share, self._seed = sample_share, seed
        self._hedge = Hedge(experts)
        self._weights: Mapping[str, Mapping[str, float]] = {}

    def __call__(self, case: Case) -> str:
        """Choose the draft; then score every expert on the answer if it is sampled."""
        chosen = route(case.probabilities, self._experts, self._min_confidence, self._weights)
        if share_of(case.key, self._seed) < self._share:
            self.score(case)
        return chosen.draft

    def score(self, case: Case) -> None:
        """Score every expert on the answer."""
        topic = choose_topic(case.probabilities, self._experts, self._min_confidence)
        self._hedge.add_row(topic, case.key)
        for expert, tally in case.tallies.items():
            self._hedge.add_gain(topic, case.key, expert, tally.gain)
        self._weights = self._hedge.table().weights


def share_of(key: str, seed: int) -> float:
    """Number in [0, 1) that depends on key and seed alone."""
    digest = hashlib.sha256(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2.0**64


def policies_of(
    experts: Sequence[str], min_confidence: MinConfidence, sample_share: float
) -> dict[str, Policy]:
    """All policies over the experts; ``label`` and ``best`` are oracles of topic and answer."""
    return {
        "rule": lambda case: choose_topic(case.probabilities, experts, min_confidence),
        "measured": Measured(experts, min_confidence, sample_share),
        GENERAL: lambda _: GENERAL,
        "label": lambda case: case.label if case.label in experts else GENERAL,
        "best": best,
    }


def cases_of(group: Unit) -> list[Case]:
    """The prompts of one group of a unit."""
    every = zip(group["keys"], group["labels"], group["probabilities"], strict=True)
    return [
        Case(*own, {name: Tally(*tallies[i]) for name, tallies in group["tallies"].items()})
        for i, own in enumerate(every)
    ]


def chosen(
    arms: Mapping[str, Unit], min_confidence: MinConfidence, sample_share: float, seed: int
) -> tuple[dict[str, dict[str, list[Tally]]], dict[str, dict[str, Counter[str]]]]:
    """Per policy and group the tallies of the chosen drafts, and how often each was chosen.

    All groups come as one stream in a random order; ``measured`` has first scored the sampled
    requests of the training stream. ``frozen`` and ``single`` are the single arm's.
    """
    single, experts = (
        {name: cases_of(group) for name, group in arms[arm]["groups"].items() if group["keys"]}
        for arm in (SINGLE, EXPERTS)
    )
    found = {
        policy: {name: [case.tallies[draft] for case in own] for name, own in single.items()}
        for policy, draft in ((FROZEN, FROZEN), (SINGLE, GENERAL))
    }
    counts: dict[str, dict[str, Counter[str]]] = {}
    stream = [(name, case) for name, own in experts.items() for case in own]
    stream.sort(key=lambda pair: share_of(f"{pair[0]}:{pair[1].key}", seed))
    for name, policy in policies_of((GENERAL, *TOPICS), min_confidence, sample_share).items():
        if isinstance(policy, Measured):
            for case in cases_of(arms[EXPERTS]["sampled"]):
                policy.score(case)
        picked = {(group, case.key): policy(case) for group, case in stream}
        found[name] = {
            group: [case.tallies[picked[group, case.key]] for case in own]
            for group, own in experts.items()
        }
        counts[name] = {
            group: Counter(picked[group, case.key] for case in own)
            for group, own in experts.items()
        }
    return found, counts


def together(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups by themselves, and those that belong together under a name of their own."""
    found: dict[str, list[str]] = {
        "mixed": [n for n in names if n.startswith("topic ")],
        "unpicked": [n for n in names if n.startswith("file ")],
        # English has as many prompts as all others, and is known: it stands for itself.
        "languages": [n for n in names if n.startswith("lang ") and n.split()[1] != ENGLISH],
    }
    for name in names:
        if name.startswith("lang "):
            found.setdefault(" ".join(name.split()[:2]), []).append(name)
    return {name: own for name, own in found.items() if own} | {name: [name] for name in names}


def items_of(groups: Mapping[str, Unit]) -> dict[str, list[str]]:
    """Per group the item of every prompt; translations of one item share it."""
    found = {}
    for name, group in groups.items():
        kind, language = name.split()[:2]
        if group["keys"]:
            found[name] = [
                without_language(key, language) if kind == "lang" else f"{name}:{key}"
                for key in group["keys"]
            ]
    return found


def rows_of(
    by_seed: Mapping[int, Mapping[str, Groups]], items: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """One row per group and policy, summed over seeds; intervals by bootstrap over items."""
    first = next(iter(by_seed.values()))
    rows = []
    for group, members in together(list(first[SINGLE])).items():
        topical = all(name.startswith("topic ") for name in members)  # else no topic is known
        single = _sums(by_seed, SINGLE, members, items)
        for policy in first:
            if policy == "label" and not topical:
                continue
            own = _sums(by_seed, policy, members, items)
            rate = bootstrap(_rate, *own, resamples=_RESAMPLES)
            length = bootstrap(_length, *own, resamples=_RESAMPLES)
            gain = bootstrap(_gain, *own, *single, resamples=_RESAMPLES)
            seeds = [_length(*_sums({0: v}, policy, members, items)) for v in by_seed.values()]
            rows.append(
                {
                    "group": group,
                    "policy": policy,
                    "prompts": sum(len(items[name]) for name in members),
                    "items": own.shape[1],
                    "acceptance_rate": asdict(rate),
                    "mean_acceptance_length": asdict(length),
                    "by_seed": seeds,
                    "over_single": asdict(gain),
                }
            )
    return rows


def _sums(
    by_seed: Mapping[int, Mapping[str, Groups]],
    policy: str,
    members: Sequence[str],
    items: Mapping[str, Sequence[str]],
) -> NDArray[np.float64]:
    """float64 ``[3, items]``: rounds, drafted and accepted tokens, summed over seeds."""
    found: dict[str, NDArray[np.float64]] = {}
    for name in members:
        for tallies in by_seed.values():
            for item, t in zip(items[name], tallies[policy][name], strict=True):
                own = found.setdefault(item, np.zeros(3))
                own += (t.rounds, t.drafted, t.accepted)
    return np.stack(list(found.values()), axis=1)


def _length(rounds: Any, _: Any, accepted: Any) -> float | None:
    return float(1.0 + accepted.sum() / rounds.sum()) if rounds.sum() else None


def _rate(_: Any, drafted: Any, accepted: Any) -> float | None:
    return float(accepted.sum() / drafted.sum()) if drafted.sum() else None


def _gain(*columns: Any) -> float | None:
    upper, lower = _length(*columns[:3]), _length(*columns[3:])
    return None if upper is None or lower is None else upper - lower


def report(store: Store, common: Mapping[str, Any], rule: MinConfidence, out: Path) -> None:
    """Print the table and write ``routes.json`` from all arms with these settings."""
    wanted = json.loads(json.dumps(common))
    arms: dict[int, dict[str, Unit]] = {}
    for unit in store.every("routes-arm-"):
        if all(unit["settings"].get(n) == value for n, value in wanted.items()):
            seed = unit["settings"]["learning"]["seed"]
            arms.setdefault(seed, {})[unit["settings"]["arm"]] = unit["result"]
    whole = {seed: own for seed, own in sorted(arms.items()) if len(own) == 2}
    by_seed = {seed: chosen(own, rule, SAMPLE_SHARE, seed) for seed, own in whole.items()}
    items = items_of(next(iter(whole.values()))[SINGLE]["groups"])
    rows = rows_of({seed: found for seed, (found, _) in by_seed.items()}, items)
    names = ("micro_steps", "positions", "published", "rejected", "seconds")
    figures = {
        "settings": dict(common) | {"min_confidence": rule},
        "check": store.find("routes-check", common),
        "machine": next(iter(whole.values()))[SINGLE]["machine"],
        "training": {
            seed: {arm: {n: own[arm]["learning"][n] for n in names} for arm in (SINGLE, EXPERTS)}
            for seed, own in whole.items()
        },
        "rows": rows,
        "choices": {seed: counts for seed, (_, counts) in by_seed.items()},
    }
    write(out / "routes.json", figures)
    intervals = ("mean_acceptance_length", "over_single")
    show(
        f"Tokens per round; check {figures['check']}",
        [
            {name: row[name] for name in ("group", "prompts", "policy")}
            | {name: interval(row[name]) for name in intervals}
            for row in rows
        ],
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    learning = Learning()
    parser = arguments(__doc__, "quick", "data", "threads", "out", "published")
    parser.add_argument("--seeds", type=int, nargs="+", default=None)
    parser.add_argument("--micro-steps", type=int, default=None, help="of a round")
    parser.add_argument("--learning-rate", type=float, default=learning.learning_rate)
    options = parser.parse_args(argv)
    options.seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    options.micro_steps = options.micro_steps or (24 if options.quick else learning.micro_steps)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms that are missing; write figures from all."""
    options = parse(argv)
    prepare(options.threads)
    counts = Counts(64, 24, 16, 6) if options.quick else Counts(400, 100, 100, 40)
    sizes = QUICK if options.quick else Sizes()
    sizes = replace(sizes, stream=counts.stream, test=counts.test)
    out = options.out / "online"
    bench = Bench(Store(out), options.data, sizes, Serving(), threads=options.threads)
    prompts, evaluator = RoutePrompts(bench, counts), Evaluator(DRAFT)
    store = Store(out / "routes", options.published)
    recipe = Learning(
        micro_steps=options.micro_steps, learning_rate=options.learning_rate
    ).tireless()
    repeats = {"languages": "items that English has too", "repeats": "none"}
    common = bench.settings(
        TOPICS,
        {
            "counts": asdict(counts) | repeats,
            "router": {"min_confidence": STREAM_CONFIDENCE, "sample_share": SAMPLE_SHARE},
            "recipe": asdict(recipe),
        },
    )
    store.unit("routes-check", common, lambda: check(prompts, evaluator))
    for seed in options.seeds:
        learning = replace(recipe, seed=seed)
        for name in (SINGLE, EXPERTS):
            settings = common | {"arm": name, "learning": asdict(learning)}
            store.unit(
                f"routes-arm-{name}-{seed}",
                settings,
                lambda n=name, own=learning: run_arm(n, prompts, evaluator, own),
            )
    report(store, common, router_confidence(load_config(None, SMALL_MODELS)), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
