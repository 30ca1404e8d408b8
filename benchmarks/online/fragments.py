"""The results page's sections on traffic and on routing, from their summary files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from online.markdown import interval, number, table
from online.routes_plot import NAMES, WHOLE


def command_of(target: str, argv: Sequence[str] | None) -> str:
    """The command for people: where the rows lie is theirs to say."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--data" in words[:-1]:
        words[words.index("--data") + 1] = "FOLDER"
    return f'make {target} ARGS="{" ".join(words)}"' if words else f"make {target}"


def traffic(figures: Mapping[str, Any], command: str) -> str:
    """Section ``Traffic``.

    Args:
        figures: of ``traffic.json``.
        command: that made it.
    """
    plan, loads = figures["settings"]["plan"], figures["load_averages"]
    busy = f"{min(x[0] for x in loads):g} to {max(x[0] for x in loads):g}" if loads else "unknown"
    capacity = "; ".join(
        f"{trace} {facts['requests_per_s']:.2f}" for trace, facts in figures["capacity"].items()
    )
    head = (
        f"## Traffic\n\nCommand: `{command}`\n\n"
        "Arrivals of request traces, open-loop, over HTTP, each block from a fresh start of the "
        "whole application; clients, server and training share the machine. The time axis is "
        "stretched to a share (load) of what `plain` answers when it always has 16 requests "
        f"({capacity} requests/s). A request's prompt has, by length, the rank among the block's "
        "prompts that it has in the trace; prompts are of the four topics and at most 384 tokens. "
        "Greedy answers end where the target ends them, or at the trace's length, scaled so that "
        "its 99th percentile is 256 tokens of the target's 1,024, and never stretched. Latencies "
        "count from when a request was due. Within limits: first token and time per token of at "
        "most five times an idle plain server's medians. Load average before the blocks: "
        f"{busy}. {plan['repeats']} window(s) of each trace, {plan['seconds']:g} s each. "
        f"{_fresh(figures['rows'])}"
    )
    return "\n\n".join(
        (head, _latencies(figures["rows"]), _speculation(figures["rows"]), _ratios(figures))
    )


def _latencies(rows: Sequence[Mapping[str, Any]]) -> str:
    headings = ("trace", "load", "variant", "first token, ms, p50 / p99", "per token, ms")
    headings += ("whole answer, ms", "longest pause, ms, p99", "client late, ms, p99")
    headings += ("within limits", "goodput, requests/s", "tokens/s", "failed")
    lines = []
    for row in rows:
        pairs = [
            f"{_milli(row[f'{name}_p50_s'])} / {_milli(row[f'{name}_p99_s'])}"
            for name in ("ttft", "tpot", "e2e")
        ]
        tails = [_milli(row[f"{name}_p99_s"]) for name in ("pause", "lag")]
        rates = [f"{row['within_limits']:.0%}", f"{row['goodput']:.2f}"]
        failed = f"{row['failed']} of {row['requests']}"
        lines.append([*_names(row), *pairs, *tails, *rates, f"{row['tokens_per_s']:.0f}", failed])
    return table(headings, lines)


def _speculation(rows: Sequence[Mapping[str, Any]]) -> str:
    headings = ("trace", "load", "variant", "first drafted token accepted", "acceptance rate")
    headings += ("mean acceptance length", "versions on trial", "promoted", "rolled back")
    names = ("first", "acceptance_rate", "mean_acceptance_length")
    lines = [
        [
            *_names(row),
            *(number(row[name]) for name in names),
            *(str(row[name]) for name in ("published", "promoted", "rolled_back")),
        ]
        for row in rows
        if row["first"] is not None
    ]
    return (
        f"{table(headings, lines)}\n\nHow many tokens are drafted, and whether any, follows "
        "measured goodput: variants draft in other rounds, and acceptance compares roughly. The "
        "application starts anew with every block, and with it the trials of versions that are "
        "still undecided: their requests are counted from nothing again, so that fewer come to an "
        "end than on a server that goes on."
    )


def _fresh(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether any block was measured on what an earlier one had taught."""
    again = max((row["prompts_repeated"] for row in rows), default=0)
    if not again:
        return "No prompt comes in two blocks. The prefix cache is off."
    return (
        f"The pool of prompts was too small: up to {again} requests of a row had a prompt that an "
        "earlier block had had. The prefix cache is off."
    )


def _ratios(figures: Mapping[str, Any]) -> str:
    lines = [
        [row["figure"], f"{row['load']:g}", row["variant"], _times(row), str(row["blocks"])]
        for row in figures["ratios_to_plain"]
        if row["ratio"] is not None
    ]
    headings = ("figure", "load", "variant", "times shorter than plain's (95 %)", "blocks")
    answers = ", ".join(
        f"{variant} {facts['differ']} of {facts['compared']}"
        for variant, facts in figures["answers"].items()
    )
    return (
        f"{table(headings, lines)}\n\nAnswers other than `plain`'s to the same request (last bits "
        f"of bfloat16 in other batches): {answers}. Rounds whose drafts failed: "
        f"{figures['draft_failures']}."
    )


def _times(row: Mapping[str, Any]) -> str:
    return interval({"value": row["ratio"], "low": row["low"], "high": row["high"]}, 2)


def _names(row: Mapping[str, Any]) -> list[str]:
    return [row["trace"], f"{row['load']:g}", row["variant"]]


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f}"


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
        "95 % by bootstrap over prompts, translations of one together, seeds summed up. The "
        "target knows four kinds of English text: on other prompts acceptance says how a draft "
        "follows it, and nothing of the text."
    )
    tables = _against(figures["rows"]), _by_group(figures), _choices(figures)
    return "\n\n".join((head, *tables, _check(figures)))


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


def _by_group(figures: Mapping[str, Any]) -> str:
    groups: dict[str, list[str]] = {}
    for row in figures["rows"]:
        if row["group"] not in WHOLE:
            cells = groups.setdefault(f"{row['group']} ({row['prompts']})", [])
            cells.append(number(row["mean_acceptance_length"]["value"], 2))
    policies = list(dict.fromkeys(row["policy"] for row in figures["rows"]))
    headings = ["tokens per round", *(NAMES[policy] for policy in policies)]
    return table(headings, [[group, *cells] for group, cells in groups.items()])


def _choices(figures: Mapping[str, Any]) -> str:
    """What the first seed's classifier chose, and what with Hedge."""
    choices = next(iter(figures["choices"].values()))
    experts = sorted({e for own in choices.values() for found in own.values() for e in found})
    lines = [
        [group, NAMES[policy], *(str(own[group].get(expert, 0)) for expert in experts)]
        for group in sorted(choices["rule"])
        for policy, own in choices.items()
    ]
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
