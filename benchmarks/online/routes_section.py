"""The results page's section on routing, from its summary file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from online.routes_plot import NAMES, WHOLE
from online.tables import interval, number, table

_SHORT = ("frozen", "single", "general", "measured", "best")  # of a single group


def routes(figures: Mapping[str, Any], command: str) -> str:
    """Section ``Routing``.

    Args:
        figures: of ``routes.json``.
        command: that made it.
    """
    counts, seeds = figures["settings"]["counts"], figures["seeds"]
    steps = "; ".join(
        f"seed {seed}: {own['single']['micro_steps']} and {own['experts']['micro_steps']}"
        for seed, own in figures["training"].items()
    )
    head = (
        f"## Routing\n\nCommand: `{command}`\n\n"
        "Five experts behind the router against one draft of the same size, both learning online "
        f"from one mixed stream of {4 * counts['stream']} prompts; micro-steps of one draft and "
        f"of all experts together: {steps}. {len(seeds)} seed(s). Tokens per round (the corrected "
        "or bonus one included) with 4 drafted, greedy, replayed from whether a draft agrees with "
        "the target's own answer position by position, which decides every round. Intervals of "
        "95 % by bootstrap over prompts, translations of one together, seeds summed up. Prompts "
        "have at most 384 tokens. *Topic known* is an oracle of topics, which only the mixed "
        "prompts have; *best* and *worst in hindsight* choose by the answer itself, prompt by "
        "prompt; *any* is a router that draws. *Languages* are all but English. The "
        "target knows four kinds of English text: on "
        "other prompts acceptance says how a draft follows it, and nothing of the text."
    )
    parts = (
        _against(figures["rows"]),
        _by_group(figures["rows"]),
        _languages(figures["languages"]),
        _confidence(figures),
        _choices(figures),
        _check(figures),
    )
    return "\n\n".join((head, *(part for part in parts if part)))


def _against(rows: Sequence[Mapping[str, Any]]) -> str:
    headings = ("prompts", "draft", "tokens per round", "acceptance rate", "over one online draft")
    lines = [
        [
            f"{row['group']} ({row['prompts']})",
            NAMES[row["policy"]],
            interval(row["mean_acceptance_length"], 2),
            number(row["acceptance_rate"]["value"]),
            interval(row["over_single"], 2),
        ]
        for row in rows
        if row["group"] in WHOLE
    ]
    return table(headings, lines)


def _by_group(rows: Sequence[Mapping[str, Any]]) -> str:
    """Single topics, files and languages."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["group"] not in WHOLE:
            name = f"{row['group']} ({row['prompts']})"
            groups.setdefault(name, {})[row["policy"]] = row
    headings = ["tokens per round", *(NAMES[policy] for policy in _SHORT)]
    headings.append("classifier + Hedge over one online draft")
    lines = [
        [
            group,
            *(number(own[policy]["mean_acceptance_length"]["value"], 2) for policy in _SHORT),
            interval(own["measured"]["over_single"], 2),
        ]
        for group, own in groups.items()
    ]
    return table(headings, lines)


def _languages(pairs: Sequence[Mapping[str, Any]]) -> str:
    """A language beside English, on the same items."""
    if not pairs:
        return ""
    headings = ("the same items in", "", "items", "one online draft", "in English")
    headings += ("classifier + Hedge", "in English", "lost to English (95 %)")
    lines = [
        [
            pair["language"],
            pair["part"],
            str(pair["items"]),
            *(
                number(pair[policy][side], 2)
                for policy in ("single", "measured")
                for side in ("own", "english")
            ),
            interval(pair["measured"]["lost"], 2),
        ]
        for pair in pairs
    ]
    return f"Languages, tokens per round:\n\n{table(headings, lines)}"


def _confidence(figures: Mapping[str, Any]) -> str:
    """What the classifier's rule brings by how sure it must be."""
    found = figures["confidence"]
    groups = [group for group in WHOLE if any(group in own for own in found.values())]
    lines = [
        [least, *(number(own.get(group), 2) for group in groups)] for least, own in found.items()
    ]
    own = figures["settings"]["router"]["min_confidence"]
    own = next(iter(own.values())) if isinstance(own, Mapping) else own
    return (
        f"Tokens per round by `router.min_confidence` ({own:g} here): below it a prompt goes to "
        f"`general`.\n\n{table(['at least', *groups], lines)}"
    )


def _choices(figures: Mapping[str, Any]) -> str:
    """What the first seed's classifier chose, and with Hedge where the counts are others."""
    choices = next(iter(figures["choices"].values()))
    experts = sorted({e for own in choices.values() for found in own.values() for e in found})
    lines = []
    for group in sorted(choices["rule"]):
        shown = [p for p in choices if p == "rule" or choices[p][group] != choices["rule"][group]]
        for policy in shown:
            counts = choices[policy][group]
            lines.append([group, NAMES[policy], *(str(counts.get(e, 0)) for e in experts)])
    return table(["prompts sent to", "", *experts], lines)


def _check(figures: Mapping[str, Any]) -> str:
    check = figures["check"]
    if check is None:
        return ""
    engine, replayed = check["engine"], check["replayed"]
    return (
        f"The replay against the engine, initial draft, {check['prompts']} prompts: accepted "
        f"{replayed['accepted']} against {engine['accepted']}, rounds {replayed['rounds']} against "
        f"{engine['rounds']}."
    )
