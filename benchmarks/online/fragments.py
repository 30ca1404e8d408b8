"""The results page's section on traffic, from its summary file, and commands for people."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from online.rows import HUB
from online.tables import interval, number, table

_LEAST_BLOCKS = 3  # of an interval


def command_of(target: str, argv: Sequence[str] | None) -> str:
    """The command for people: where the rows lie is theirs to say."""
    words = [
        part
        for word in (sys.argv[1:] if argv is None else argv)
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    for option, name in (("--data", "FOLDER"), ("--out", "OUT")):
        if option in words[:-1] and words[words.index(option) + 1] != HUB:
            words[words.index(option) + 1] = name
    return f'make {target} ARGS="{shlex.join(words)}"' if words else f"make {target}"


def take_published(parser: ArgumentParser, name: str, what: str) -> None:
    """Give a bench whose units are not published the option that the others have.

    Args:
        parser: of its command line.
        name: of its section.
        what: is too large to publish, for people.
    """
    parser.add_argument(
        "--published",
        type=Path,
        help=f"folder of published results: where {name}.md is in it nothing is run, and "
        "bench-online puts that on the page, whatever it was run with; no unit is read or added, "
        f"since {what} are too large",
    )


def published_section(name: str, published: Path | None) -> Path | None:
    """Where a section lies that need not be made; None where it is not published.

    Args:
        name: of the section.
        published: folder of published results.
    """
    path = None if published is None else published / f"{name}.md"
    return path if path is not None and path.is_file() else None


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
        "whole application; clients, server and training share the machine. `plain` is the server "
        "without drafts, router and training, `frozen` has drafts that learn nothing and a router, "
        "`online` is the server as it comes. The time axis is "
        "stretched to a share (load) of what `plain` answers when it always has 16 requests "
        f"({capacity} requests/s). A request's prompt has, by length, the rank among the block's "
        "prompts that it has in the trace; prompts are of the four topics and at most 384 tokens. "
        "Greedy answers end where the target ends them, or at the trace's length, scaled so that "
        "its 99th percentile is 256 tokens of the target's 1,024, and never stretched. Latencies "
        "count from when a request was due, the time per token from the first tokens, however many "
        "came at once, to the last; they are of the answers that came whole, and refused requests "
        "count as missed in *within limits* and goodput alone. Blocks run in the tables' order of "
        "loads, each by the variants in turn, and `online` begins "
        f"each with what it had learnt by the end of the one before, {_lesson(figures)}. "
        "Within limits: first token and time per token of at "
        f"most five times an idle plain server's medians. {_machines(figures)}Load average before "
        f"the blocks: {busy}. {plan['repeats']} window(s) of each trace, "
        f"{plan['seconds']:g} s each. {_fresh(figures['rows'])}"
    )
    return "\n\n".join(
        (head, _latencies(figures["rows"]), _speculation(figures["rows"]), _ratios(figures))
    )


def _lesson(figures: Mapping[str, Any]) -> str:
    """What ``online`` had learnt from before the first block."""
    lesson = figures["lesson"]
    if lesson is None:
        return "the first with nothing"
    load, made = figures["settings"]["plan"]["lesson_load"], lesson["decisions"]
    first = "" if lesson["first"] is None else "; first drafted token accepted "
    first += " to ".join(number(value) for value in lesson["first"] or ())
    return (
        f"the first from a lesson: {lesson['requests']} further requests of the first trace at "
        f"{load:g} in {lesson['seconds']:.0f} s ({made['published']} versions on trial, "
        f"{made['promoted']} promoted, {made['rolled_back']} rolled back{first}; "
        f"{lesson['trainer_cpu_s']:.0f} of {lesson['cpu_s']:.0f} CPU s were the "
        "trainer's)"
    )


def _latencies(rows: Sequence[Mapping[str, Any]]) -> str:
    headings = ("trace", "load", "variant", "first token, ms, p50 / p99", "per token, ms")
    headings += ("whole answer, ms", "longest pause, ms, p99", "client late, ms, p99")
    headings += ("within limits", "goodput, requests/s", "tokens/s", "failed")
    headings += ("CPU s, all processes, to the last answer", "of these the trainer's")
    lines = []
    for row in rows:
        pairs = [
            f"{_milli(row[f'{name}_p50_s'])} / {_milli(row[f'{name}_p99_s'])}"
            for name in ("ttft", "tpot", "e2e")
        ]
        tails = [_milli(row[f"{name}_p99_s"]) for name in ("pause", "lag")]
        rates = [f"{row['within_limits']:.0%}", f"{row['goodput']:.2f}"]
        failed = f"{row['failed']} of {row['requests']}"
        spent = [f"{row[name]:.1f}" for name in ("cpu_s", "trainer_cpu_s")]
        tokens = f"{row['tokens_per_s']:.0f}"
        lines.append([*_names(row), *pairs, *tails, *rates, tokens, failed, *spent])
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
        "measured goodput: variants draft in other rounds, and acceptance compares by topic, if at "
        "all: a draft that gains nothing is not asked, and lowers no mean. By topic, the first "
        "drafted token accepted, and in brackets how many rounds drafted for every 100 "
        f"tokens:\n\n{_topics(rows)}\n\nThe "
        "application starts anew with every block, and with it the trials of versions that are "
        "still undecided: their requests are counted from nothing again, so that fewer come to an "
        "end than on a server that goes on."
    )


def _topics(rows: Sequence[Mapping[str, Any]]) -> str:
    topics = sorted({topic for row in rows for topic in row["by_topic"]})
    lines = [
        [*_names(row), *(_share(row["by_topic"].get(topic)) for topic in topics)]
        for row in rows
        if row["first"] is not None
    ]
    return table(("trace", "load", "variant", *topics), lines)


def _share(counts: Mapping[str, int] | None) -> str:
    """One of a topic's cells: acceptance, and rounds that drafted per 100 tokens."""
    if not counts or not counts["rounds"]:
        return "-"
    first = number(counts["first_accepted"] / counts["rounds"])
    return f"{first} ({100 * counts['rounds'] / counts['tokens']:.0f})"


def _machines(figures: Mapping[str, Any]) -> str:
    """Where the capacities, and then the blocks, were measured; empty where nothing says."""
    found = [facts.get("machine") for facts in figures["capacity"].values()]
    names = sorted({f"{m['cpu']}, {m['cores']} cores" for m in found if m})
    return f"Machine: {'; '.join(names)}; dtype {figures['settings']['dtype']}. " if names else ""


def _fresh(rows: Sequence[Mapping[str, Any]]) -> str:
    """Whether any block was measured on what an earlier one had taught."""
    again = max((row["prompts_repeated"] for row in rows), default=0)
    if not again:
        return "No prompt comes in two blocks. The prefix cache is off."
    return (
        f"The pool of prompts was too small: up to {again} requests of a row had a prompt that an "
        "earlier block, or the lesson, had had. The prefix cache is off."
    )


def _ratios(figures: Mapping[str, Any]) -> str:
    lines = [
        [
            row["figure"],
            f"{row['load']:g}",
            row["variant"],
            row["against"],
            _times(row),
            str(row["blocks"]),
        ]
        for row in figures["ratios"]
        if row["ratio"] is not None
    ]
    headings = ("figure", "load", "variant", "against", "times shorter (95 %)", "blocks")
    answers = ", ".join(
        f"{variant} {facts['differ']} of {facts['compared']}"
        for variant, facts in figures["answers"].items()
    )
    return (
        f"{table(headings, lines)}\n\nNo interval from fewer than {_LEAST_BLOCKS} blocks. "
        "Answers other than `plain`'s to the same request (last bits "
        f"of bfloat16 in other batches): {answers}. Rounds whose drafts failed: "
        f"{figures['draft_failures']}."
    )


def _times(row: Mapping[str, Any]) -> str:
    """Two blocks, of two traces, say nothing about how far a third would lie."""
    if row["blocks"] < _LEAST_BLOCKS:
        return number(row["ratio"], 2)
    return interval({"value": row["ratio"], "low": row["low"], "high": row["high"]}, 2)


def _names(row: Mapping[str, Any]) -> list[str]:
    return [row["trace"], f"{row['load']:g}", row["variant"]]


def _milli(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f}"
