"""Every policy of choosing a draft, judged from the arms' units: table, plot, summary file."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from online import fragments
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
from online.route_prompts import without_language
from online.routes_plot import NAMES, WHOLE, draw
from online.store import Store
from paceline.actors.routing.policy import GENERAL
from paceline.deploy.demo.prompts import TOPICS

SINGLE, EXPERTS, FROZEN = "single", "experts", "frozen"
_RESAMPLES = 500
Unit = Mapping[str, Any]
# One row per item: rounds, drafted, accepted, summed over seeds.
Sums = NDArray[np.float64]


def policies_of(
    experts: Sequence[str], router: Mapping[str, float], seed: int
) -> dict[str, Policy]:
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
    arms: Mapping[str, Unit], router: Mapping[str, float], seed: int
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
        "languages": [n for n in names if n.startswith("lang ")],
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
        sums = {policy: _sums(by_seed, policy, members, items) for policy in first}
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
    """Per item, so that whoever resamples rows keeps its translations together."""
    found: dict[str, NDArray[np.float64]] = {}
    for name in members:
        for chosen_by in by_seed.values():
            for item, t in zip(items[name], chosen_by[policy][name], strict=True):
                own = found.setdefault(item, np.zeros(3))
                own += (t.rounds, t.drafted, t.accepted)
    return np.stack(list(found.values()))


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


def along_of(arms: Mapping[str, Unit], router: Mapping[str, float]) -> dict[str, list[float]]:
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


def report(store: Store, common: Mapping[str, Any], out: Path, command: str) -> None:
    """Print the table; write ``routes.json``, ``routes.md`` and ``routes.png``."""
    wanted = json.loads(json.dumps(common))
    arms: dict[int, dict[str, Unit]] = {}
    for unit in store.every("arm-"):
        if all(unit["settings"].get(n) == value for n, value in wanted.items()):
            seed = unit["settings"]["learning"]["seed"]
            arms.setdefault(seed, {})[unit["settings"]["arm"]] = unit["result"]
    whole = {seed: own for seed, own in sorted(arms.items()) if len(own) == 2}
    router = common["router"]
    judged = {seed: chosen(own, router, seed) for seed, own in whole.items()}
    groups = next(iter(whole.values()))[SINGLE]["groups"]
    rows = rows_of({seed: found for seed, (found, _) in judged.items()}, items_of(groups))
    along = {seed: along_of(own, router) for seed, own in whole.items()}
    names = ("micro_steps", "positions", "published", "rejected", "seconds")
    figures = {
        "settings": dict(common),
        "seeds": list(whole),
        "check": store.find("check", common),
        "machine": next(iter(whole.values()))[SINGLE]["machine"],
        "training": {
            seed: {arm: {n: own[arm]["learning"][n] for n in names} for arm in (SINGLE, EXPERTS)}
            for seed, own in whole.items()
        },
        "rows": rows,
        "choices": {
            seed: {n: c[n] for n in ("rule", "measured")} for seed, (_, c) in judged.items()
        },
        "along": along,
    }
    (out / "routes.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / "routes.md").write_text(fragments.routes(figures, command) + "\n", encoding="utf-8")
    draw(out / "routes.png", rows, along)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(rows))
    console.print(f"training: {figures['training']}\ncheck: {figures['check']}")


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Mean acceptance length with its interval, of the groups that hold others."""
    table = Table(title="Mean acceptance length (95 %)", title_justify="left")
    groups = list(dict.fromkeys(row["group"] for row in rows if row["group"] in WHOLE))
    for heading in ("", *groups):
        table.add_column(heading, no_wrap=True)
    for policy, name in NAMES.items():
        found = {row["group"]: row for row in rows if row["policy"] == policy}
        cells = [_cell(found[g]["mean_acceptance_length"]) for g in groups if g in found]
        table.add_row(name, *cells)
    return table


def _cell(found: Mapping[str, float | None]) -> str:
    if found["value"] is None or found["low"] is None or found["high"] is None:
        return ""
    return f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"
