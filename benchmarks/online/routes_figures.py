"""Every policy of choosing a draft, judged from the arms' units."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from online.figures import Interval, bootstrap
from online.policies import (
    Always,
    Case,
    Chance,
    Hindsight,
    Label,
    Measured,
    Policy,
    Rule,
    Tally,
    picks_of,
    share_of,
)
from online.route_prompts import ENGLISH, without_language
from online.routes_plot import WHOLE
from paceline.actors.router.policy import GENERAL
from paceline.deploy.demo.prompts import TOPICS

SINGLE, EXPERTS, FROZEN = "single", "experts", "frozen"
_ORACLE = "label"
_LEAST = (0.5, 0.8, 0.9, 0.95, 0.99, 0.999)  # confidence
_RESAMPLES = 500
Unit = Mapping[str, Any]
# One row per item: rounds, drafted, accepted, summed over seeds.
Sums = NDArray[np.float64]


def policies_of(experts: Sequence[str], router: Mapping[str, Any], seed: int) -> dict[str, Policy]:
    """All policies over the experts, as they start."""
    confidence, share = router["min_confidence"], router["sample_share"]
    return {
        "rule": Rule(experts, confidence),
        "measured": Measured(experts, confidence, share, seed=0),
        GENERAL: Always(GENERAL),
        "chance": Chance(experts, seed),
        "label": Label(experts),
        "best": Hindsight(),
        "worst": Hindsight(worst=True),
    }


def cases_of(judged: Unit) -> list[Case]:
    """The prompts of one group, with the tallies of every draft that was judged there."""
    return [
        Case(
            key=key,
            label=judged["labels"][i],
            probabilities=judged["probabilities"][i],
            tallies={name: Tally(*own[i]) for name, own in judged["tallies"].items()},
        )
        for i, key in enumerate(judged["keys"])
    ]


def chosen(
    arms: Mapping[str, Unit], router: Mapping[str, Any], seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Per policy and group the tallies of the drafts that it chose, in the prompts' order.

    All groups come as one stream in a random order; what learns has first seen the requests of
    the training stream that the scorer is sent: prompts that no expert has learnt from.

    Returns:
        policy to group to a list of tallies, ``frozen`` and ``single`` being the single arm's;
        and policy to group to how often every expert was chosen.
    """
    single, experts = (_not_empty(arms[arm]["groups"]) for arm in (SINGLE, EXPERTS))
    found: dict[str, dict[str, list[Tally]]] = {
        FROZEN: {name: [c.tallies[FROZEN] for c in cases_of(g)] for name, g in single.items()},
        SINGLE: {name: [c.tallies[GENERAL] for c in cases_of(g)] for name, g in single.items()},
    }
    counts: dict[str, dict[str, Counter[str]]] = {}
    cases = {name: cases_of(judged) for name, judged in experts.items()}
    stream = [(name, case) for name, own in cases.items() for case in own]
    stream.sort(key=lambda pair: share_of(f"{pair[0]}:{pair[1].key}", seed))
    for policy_name, policy in policies_of((GENERAL, *TOPICS), router, seed).items():
        if isinstance(policy, Measured):
            for case in cases_of(arms[EXPERTS]["sampled"]):
                policy.score(case)
        picks = picks_of(policy, [case for _, case in stream])
        picked = {(n, c.key): pick for (n, c), pick in zip(stream, picks, strict=True)}
        for (name, _), pick in zip(stream, picks, strict=True):
            counts.setdefault(policy_name, {}).setdefault(name, Counter())[pick] += 1
        found[policy_name] = {
            name: [case.tallies[picked[name, case.key]] for case in own]
            for name, own in cases.items()
        }
    return found, counts


def _not_empty(groups: Mapping[str, Unit]) -> dict[str, Unit]:
    """Not every language has every part."""
    return {name: judged for name, judged in groups.items() if judged["keys"]}


def together(names: Sequence[str]) -> dict[str, list[str]]:
    """Groups by themselves, and those that belong together under a name of their own."""
    found = {
        "mixed": [n for n in names if n.startswith("topic ")],
        "unpicked": [n for n in names if n.startswith("file ")],
        # English has as many prompts as all others, and knows a topic: it stands for itself
        "languages": [n for n in names if n.startswith("lang ") and n.split()[1] != ENGLISH],
    }
    for name in names:
        if name.startswith("lang "):
            found.setdefault(" ".join(name.split()[:2]), []).append(name)
    return {name: own for name, own in found.items() if own} | {name: [name] for name in names}


def items_of(groups: Mapping[str, Unit]) -> dict[str, list[str]]:
    """Per group the item of every prompt: translations of one item are one, all else its own."""
    found = {}
    for name, judged in _not_empty(groups).items():
        kind, language = name.split()[:2]
        found[name] = [
            without_language(key, language) if kind == "lang" else f"{name}:{key}"
            for key in judged["keys"]
        ]
    return found


def rows_of(
    by_seed: Mapping[int, Mapping[str, Any]], items: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """One row per group and policy, over all seeds; intervals are by bootstrap over items.

    Args:
        by_seed: seed to what :func:`chosen` found.
        items: see :func:`items_of`.
    """
    first = next(iter(by_seed.values()))
    rows = []
    for group, members in together(list(first[SINGLE])).items():
        topical = all(name.startswith("topic ") for name in members)  # else no topic is known
        policies = [policy for policy in first if topical or policy != _ORACLE]
        sums = {policy: _sums(by_seed, policy, members, items) for policy in policies}
        for policy, own in sums.items():
            lengths = [_length(_sums({s: v}, policy, members, items)) for s, v in by_seed.items()]
            rows.append(
                {
                    "group": group,
                    "policy": policy,
                    "prompts": sum(len(items[name]) for name in members),
                    "items": len(own),
                    "acceptance_rate": asdict(_interval(_rate, own)),
                    "mean_acceptance_length": asdict(_interval(_length, own)),
                    "by_seed": lengths,
                    "over_single": asdict(_difference(own, sums[SINGLE])),
                }
            )
    return rows


def _sums(
    by_seed: Mapping[int, Any],
    policy: str,
    members: Sequence[str],
    items: Mapping[str, Sequence[str]],
) -> Sums:
    return np.stack(list(_by_item(by_seed, policy, members, items).values()))


def _by_item(
    by_seed: Mapping[int, Any],
    policy: str,
    members: Sequence[str],
    items: Mapping[str, Sequence[str]],
) -> dict[str, NDArray[np.float64]]:
    """Per item, so that whoever resamples rows keeps its translations together."""
    found: dict[str, NDArray[np.float64]] = {}
    for name in members:
        for chosen_by in by_seed.values():
            for item, t in zip(items[name], chosen_by[policy][name], strict=True):
                own = found.setdefault(item, np.zeros(3))
                own += (t.rounds, t.drafted, t.accepted)
    return found


def languages_of(
    by_seed: Mapping[int, Any], items: Mapping[str, Sequence[str]]
) -> list[dict[str, Any]]:
    """Every language beside English on the same items, part by part.

    Returns:
        per language and part how many items there are, and by policy the mean acceptance length
        in it, in English, and what it loses to English.
    """
    found = []
    for name in items:
        kind, language, *part = name.split()
        english = f"lang {ENGLISH} {' '.join(part)}"
        if kind != "lang" or name == english or english not in items:
            continue
        pair: dict[str, Any] = {"language": language, "part": " ".join(part)}
        for policy in (SINGLE, "measured"):
            own = _by_item(by_seed, policy, [name], items)
            twins = _by_item(by_seed, policy, [english], items)
            here = np.stack(list(own.values()))
            there = np.stack([twins[item] for item in own])
            pair |= {
                "items": len(own),
                policy: {
                    "own": _length(here),
                    "english": _length(there),
                    "lost": asdict(_difference(there, here)),
                },
            }
        found.append(pair)
    return found


def confidence_of(
    arms: Mapping[int, Mapping[str, Unit]], items: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float | None]]:
    """By the least confidence of the classifier's rule: mean acceptance length of whole groups."""
    cases = {
        seed: {name: cases_of(g) for name, g in _not_empty(own[EXPERTS]["groups"]).items()}
        for seed, own in arms.items()
    }
    whole = {group: own for group, own in together(list(items)).items() if group in WHOLE}
    found: dict[str, dict[str, float | None]] = {}
    for least in _LEAST:
        rule = Rule((GENERAL, *TOPICS), least)
        by_seed = {
            seed: {"rule": {n: [c.tallies[rule.pick(c)] for c in own[n]] for n in own}}
            for seed, own in cases.items()
        }
        found[f"{least:g}"] = {
            group: _length(_sums(by_seed, "rule", members, items))
            for group, members in whole.items()
        }
    return found


def _length(sums: Sums) -> float | None:
    rounds, _, accepted = sums.sum(0)
    return float(1.0 + accepted / rounds) if rounds else None


def _rate(sums: Sums) -> float | None:
    _, drafted, accepted = sums.sum(0)
    return float(accepted / drafted) if drafted else None


def _interval(statistic: Callable[[Sums], float | None], sums: Sums) -> Interval:
    return bootstrap(lambda *c: statistic(np.stack(c, 1)), *sums.T, resamples=_RESAMPLES)


def _difference(own: Sums, single: Sums) -> Interval:
    """Of mean acceptance lengths, over the same prompts."""

    def statistic(*columns: NDArray[np.float64]) -> float | None:
        upper, lower = _length(np.stack(columns[:3], 1)), _length(np.stack(columns[3:], 1))
        return None if upper is None or lower is None else upper - lower

    return bootstrap(statistic, *own.T, *single.T, resamples=_RESAMPLES)


def along_of(arms: Mapping[str, Unit], router: Mapping[str, Any]) -> dict[str, list[float]]:
    """Mean acceptance length of every part of the stream before it was learnt from."""
    found: dict[str, list[float]] = {}
    policies = policies_of((GENERAL, *TOPICS), router, 0)
    for arm, names in ((SINGLE, (FROZEN, SINGLE)), (EXPERTS, ("rule", "label", GENERAL))):
        for part in arms[arm]["along"]:
            cases = cases_of(part)
            for name in names:
                draft = {FROZEN: Always(FROZEN), SINGLE: Always(GENERAL)}.get(name)
                policy = draft or policies[name]
                tallies = [case.tallies[policy.pick(case)] for case in cases]
                sums = np.array([[t.rounds, t.drafted, t.accepted] for t in tallies], dtype=float)
                found.setdefault(name, []).append(_length(sums) or 1.0)
    return found
