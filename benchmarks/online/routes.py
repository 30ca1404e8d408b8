"""Experts behind a router against one draft of the same size and the same training steps.

    make bench-routes ARGS="--data ../shared/data"

Both learn online from one mixed stream of all topics, from the same initial draft, under the same
gate, with as many micro-steps in all: one draft has every step, five experts (``general`` among
them) share them as the trainer schedules. Then every draft is run over the target's answers to
prompts that neither has seen, which for greedy answers decides what speculation with it would have
done: one training run evaluates every routing policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from experts import prepare
from harness import bootstrap, interval, json_lines, machine, parsed, say, show, write
from models import ROUTER, SMALL
from prompts import MAX_PROMPT_TOKENS, Prompt, chat_ids, hashed, interleaved
from router import Router

from online.lab import Lab, Sizes, lab_arguments
from online.learner import Learning
from online.rounds import Tally
from online.streams import acceptance_length
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.replay.selection import is_scored
from paceline.actors.router.hedge import Hedge
from paceline.actors.router.policy import MinConfidence, choose_topic, route
from paceline.deploy.demo.prompts import TOPICS

SINGLE, EXPERTS, FROZEN = "single", "experts", "frozen"
MIXED, UNPICKED, OTHERS = "mixed", "unpicked", "languages"  # unions of groups
FILES = ("userprompts", "arena", "mtbench", "specbench")
ENGLISH = "en"
LANGUAGES = ("de", ENGLISH, "es", "fr", "ja", "ko", "pt", "ru", "zh")
PARALLEL = ("tldr", "xquad-qa")  # the same items in several languages
_SEED = 4003
_RESAMPLES = 500
Unit = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with what decides its route, and a tally per draft.

    Attributes:
        key: of the prompt.
        item: common to translations of a prompt.
        label: topic by the data set; None if unknown.
        probabilities: of the classifier.
        tallies: by draft.
    """

    key: str
    item: str
    label: str | None
    probabilities: Mapping[str, float]
    tallies: Mapping[str, Tally]


def mixed_stream(lab: Lab, seed: int) -> list[tuple[Prompt, ReplayRecord]]:
    """The streams of all topics mixed in an order by the seed, with the records of the answers."""
    pairs = [list(zip(lab.stream(t), lab.stream_records(t), strict=True)) for t in TOPICS]
    return sorted(interleaved(pairs), key=lambda pair: hashed(pair[0].key, seed))


def test_groups(lab: Lab, unpicked: int, language: int) -> dict[str, list[tuple[Prompt, str]]]:
    """Groups of prompts, each with its item.

    Args:
        lab: with topics' tests, and the folder of all other prompts.
        unpicked: prompts of a file of unfiltered ones, at most.
        language: prompts of a language and part, at most.
    """
    groups = {f"topic {t}": [(p, p.key) for p in lab.test_prompts(t)] for t in TOPICS}
    if lab.data is None or not Path(lab.data).is_dir():
        say("unpicked prompts and languages need --data FOLDER: left out")
        return groups

    def fitting(name: str, file: str, end: str, known: Collection[str] = ()) -> dict[str, Prompt]:
        """Prompts by item, of rows whose topic ends so, in the order of a hash of the item."""
        found: dict[str, Prompt] = {}
        rows = json_lines(Path(lab.data) / f"{file}_test.jsonl.gz")
        own = [r for r in rows if r["topic"].endswith(end) and r["prompt"] not in known]
        for row in sorted(own, key=lambda row: hashed(item_of(row), _SEED)):
            ids = chat_ids(lab.tokenizer, row["prompt"])
            if len(ids) <= MAX_PROMPT_TOKENS:
                found.setdefault(item_of(row), Prompt(row["id"], name, ids, row["prompt"]))
        return found

    known: set[str] = set()  # Spec-Bench holds the prompts of MT-bench
    for name in FILES:
        own = fitting(name, name, "", known).values()
        known |= {prompt.text for prompt in own}
        groups[f"file {name}"] = [(prompt, prompt.key) for prompt in own][:unpicked]
    for part in PARALLEL:
        every = {name: fitting(name, f"lang_{name}", f": {part}") for name in LANGUAGES}
        for name, pairs in parallel(every, language).items():
            groups.setdefault(f"lang {name}", []).extend(pairs)
    return groups


def parallel(
    fitting: Mapping[str, Mapping[str, Prompt]], count: int
) -> dict[str, list[tuple[Prompt, str]]]:
    """Prompts of each language that English has too, and these in English, with their items."""
    english = fitting[ENGLISH]
    wanted = {
        language: [item for item in own if item in english][:count]
        for language, own in fitting.items()
        if language != ENGLISH
    }
    every = {item for items in wanted.values() for item in items}
    wanted[ENGLISH] = [item for item in english if item in every]
    return {
        language: [(fitting[language][item], item) for item in items]
        for language, items in wanted.items()
        if items
    }


def item_of(row: Mapping[str, Any]) -> str:
    """A row's id without its language: translations of one item share it."""
    return str(row["id"]).replace(f"-{row['lang']}-", "-", 1)


def run_arm(
    name: str,
    lab: Lab,
    router: Router,
    groups: Mapping[str, Sequence[tuple[Prompt, str]]],
    learning: Learning,
) -> Unit:
    """Train one draft for all (``SINGLE``) or ``EXPERTS`` on the stream; tally every group.

    The seed of ``learning`` orders the stream too.
    """
    drafts = (GENERAL,) if name == SINGLE else (GENERAL, *TOPICS)
    stream, classify = mixed_stream(lab, learning.seed), router.classifier.classify
    with lab.learner(drafts, learning) as learner:
        for prompt, record in stream:
            topic = choose_topic(classify(prompt.text), drafts, router.min_confidence)
            learner.add(record, topic)
        weights = {draft: learner.served(draft)[1] for draft in drafts}
        facts = learner.facts()
    if name == SINGLE:
        weights[FROZEN] = None

    def tallied(pairs: Sequence[tuple[Prompt, str]], records: Sequence[ReplayRecord]) -> Unit:
        tallies = {}
        for draft, state in weights.items():
            own = lab.replayed(lab.evaluator.agreements(state, records))
            tallies[draft] = [[t.rounds, t.drafted, t.accepted, round(t.gain, 5)] for t in own]
        found = [classify(prompt.text) for prompt, _ in pairs]
        return {
            "keys": [prompt.key for prompt, _ in pairs],
            "items": [item for _, item in pairs],
            "labels": [p.topic if p.topic in TOPICS else None for p, _ in pairs],
            "probabilities": [{t: round(p, 4) for t, p in own.items()} for own in found],
            "tallies": tallies,
        }

    tests = {}
    for group, pairs in groups.items():
        tests[group] = tallied(
            pairs, lab.records(f"{group.split()[1]}-test", [p for p, _ in pairs])
        )
    # What the scorer would be sent of the stream: nothing that was trained on.
    share, held_out = lab.config.router.sample_share, lab.config.replay.held_out_fraction
    sampled = [(p, r) for p, r in stream if is_scored(r, share, held_out)]
    scored = tallied([(p, p.key) for p, _ in sampled], [r for _, r in sampled])
    return {"groups": tests, "sampled": scored, "learning": facts, "machine": machine()}


Policy = Callable[[Case], str]


def best(case: Case) -> str:
    """The expert with most accepted tokens a round in hindsight; of equal ones the first."""
    tallies = case.tallies
    return max(sorted(tallies), key=lambda e: tallies[e].accepted / max(tallies[e].rounds, 1))


class Measured:
    """The server's policy: the classifier's rule, corrected by acceptance on sampled requests."""

    def __init__(
        self, experts: Collection[str], min_confidence: MinConfidence, sample_share: float
    ) -> None:
        self._experts, self._min_confidence = experts, min_confidence
        self._share, self._hedge = sample_share, Hedge(experts)
        self._weights: Mapping[str, Mapping[str, float]] = {}

    def __call__(self, case: Case) -> str:
        """Choose the draft; then score every expert on the answer if it is sampled."""
        chosen = route(case.probabilities, self._experts, self._min_confidence, self._weights)
        if hashed(case.key, 0) < self._share:
            self.score(case)
        return chosen.draft

    def score(self, case: Case) -> None:
        """Score every expert on the answer."""
        topic = choose_topic(case.probabilities, self._experts, self._min_confidence)
        self._hedge.add_row(topic, case.key)
        for expert, tally in case.tallies.items():
            self._hedge.add_gain(topic, case.key, expert, tally.gain)
        self._weights = self._hedge.table().weights


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
    every = zip(*(group[n] for n in ("keys", "items", "labels", "probabilities")), strict=True)
    return [
        Case(*own, {name: Tally(*tallies[i]) for name, tallies in group["tallies"].items()})
        for i, own in enumerate(every)
    ]


def chosen(
    arms: Mapping[str, Unit], min_confidence: MinConfidence, sample_share: float, seed: int
) -> pd.DataFrame:
    """A row per policy and prompt: group, item, draft, rounds and accepted tokens with it.

    All groups come as one stream in a random order; ``measured`` has first scored the sampled
    requests of the training stream. ``frozen`` and ``single`` are the single arm's.
    """
    single, experts = (
        [(name, c) for name, group in arms[arm]["groups"].items() for c in cases_of(group)]
        for arm in (SINGLE, EXPERTS)
    )
    runs = [(FROZEN, single, lambda _: FROZEN), (SINGLE, single, lambda _: GENERAL)]
    stream = sorted(experts, key=lambda pair: hashed(f"{pair[0]}:{pair[1].key}", seed))
    for name, policy in policies_of((GENERAL, *TOPICS), min_confidence, sample_share).items():
        if isinstance(policy, Measured):
            for case in cases_of(arms[EXPERTS]["sampled"]):
                policy.score(case)
        runs.append((name, stream, policy))
    rows = []
    for name, cases, policy in runs:
        for group, case in cases:
            draft = policy(case)
            tally = case.tallies[draft]
            item = case.item if group.startswith("lang ") else f"{group}:{case.item}"
            rows.append((name, group, item, draft, tally.rounds, tally.accepted))
    return pd.DataFrame(rows, columns=["policy", "group", "item", "draft", "rounds", "accepted"])


def unions_of(groups: Sequence[str]) -> dict[str, list[str]]:
    """Groups by themselves, and those that belong together under a name of their own."""
    found = {
        MIXED: [name for name in groups if name.startswith("topic ")],
        UNPICKED: [name for name in groups if name.startswith("file ")],
        # English has as many prompts as all others, and is known: it stands for itself.
        OTHERS: [n for n in groups if n.startswith("lang ") and n != f"lang {ENGLISH}"],
    }
    return {name: own for name, own in found.items() if own} | {name: [name] for name in groups}


def summary(chosen: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per group and policy, summed over seeds; intervals by bootstrap over items."""
    rows = []
    for union, groups in unions_of(list(chosen.group.unique())).items():
        own = chosen[chosen.group.isin(groups)]
        sums = own.groupby(["policy", "item"], sort=False)[["rounds", "accepted"]].sum()
        single = sums.loc[SINGLE]
        for policy in own.policy.unique():
            if policy == "label" and not groups[0].startswith("topic "):  # no topic is known
                continue
            found = sums.loc[policy].reindex(single.index)
            columns = (found.rounds, found.accepted)
            both = (*columns, single.rounds, single.accepted)
            length = bootstrap(acceptance_length, *columns, resamples=_RESAMPLES)
            gain = bootstrap(_gain, *both, resamples=_RESAMPLES)
            seeds = own[own.policy == policy].groupby("seed")[["rounds", "accepted"]].sum()
            rows.append(
                {
                    "group": union,
                    "policy": policy,
                    "items": len(found),
                    "mean_acceptance_length": asdict(length),
                    "by_seed": (1.0 + seeds.accepted / seeds.rounds).tolist(),
                    "over_single": asdict(gain),
                }
            )
    return rows


def _gain(*columns: Any) -> float | None:
    upper, lower = acceptance_length(*columns[:2]), acceptance_length(*columns[2:])
    return None if upper is None or lower is None else upper - lower


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms that are missing; write figures from all."""
    parser = lab_arguments(__doc__)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--stream", type=int, default=400, help="prompts of a topic's stream")
    add("--test", type=int, default=100, help="prompts of a topic's test")
    add("--unpicked", type=int, default=100, help="prompts of a file of unfiltered ones")
    add("--language", type=int, default=40, help="prompts of a language and part")
    options = parsed(parser, argv, seeds=[0], stream=64, test=24, unpicked=16, language=6)
    prepare(options.threads)
    sizes = replace(Sizes(), stream=options.stream, test=options.test)
    lab = Lab(options, sizes)
    router = Router(str(ROUTER) if options.target == SMALL else "minilm")
    groups = test_groups(lab, options.unpicked, options.language)
    share = lab.config.router.sample_share
    frames, training = [], {}
    for seed in options.seeds:
        learning = Learning(micro_steps=options.micro_steps, rests=False, seed=seed)
        arms = {}
        for name in (SINGLE, EXPERTS):
            counts = [options.unpicked, options.language]
            own = {"arm": name, "learning": asdict(learning), "counts": counts}
            settings = lab.settings(TOPICS, own)
            arm = lab.unit(
                f"routes-{name}-{seed}",
                settings,
                lambda n=name, own=learning: run_arm(n, lab, router, groups, own),  # type: ignore[misc]
            )
            assert arm is not None
            arms[name] = arm
        frames.append(chosen(arms, router.min_confidence, share, seed).assign(seed=seed))
        training[seed] = {name: arm["learning"]["micro_steps"] for name, arm in arms.items()}
    rows = summary(pd.concat(frames))
    choices = Counter(
        zip(*(pd.concat(frames)[n] for n in ("policy", "group", "draft")), strict=True)
    )
    figures = {
        "machine": machine(),
        "settings": lab.run_settings(TOPICS),
        "micro_steps": training,
        "rows": rows,
        "choices": {", ".join(key): count for key, count in choices.items()},
    }
    write(options.out / "routes.json", figures)
    names = ("mean_acceptance_length", "over_single")
    show(
        "Tokens per round",
        [
            {name: row[name] for name in ("group", "items", "policy")}
            | {name: interval(row[name]) for name in names}
            for row in rows
        ],
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
