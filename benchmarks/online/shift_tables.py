"""The results page's section on shifting topics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from online.figures import WITHIN
from online.tables import interval, number, table


def shifts(figures: dict[str, Any], pictures: Sequence[str]) -> list[str]:
    """Section on shifts, its paragraphs.

    Args:
        figures: from ``results.collect``.
        pictures: file names of plots beside the page.
    """
    kinds = figures["shifts"]
    if not kinds:
        return []
    phase, size = (figures["settings"]["sizes"][name] for name in ("phase", "window"))
    parts = [
        "## When the topic shifts",
        f"Phases of {phase} requests. *One draft* is `general`, learning from everything; "
        "*experts* are one draft per topic, with the same micro-steps offered in all, and requests "
        "routed by their true topics. Here no draft rests after rejected rounds. A cell is the "
        "acceptance on a topic's test after a phase. *Recovered*: the first window of "
        f"{size} requests whose acceptance rate is within {WITHIN:g} of what the topic's stream of "
        "its own had by the end of as many requests. *Most lost*: the deepest that a topic's test "
        "fell, at any phase, below the best that it had been before. *Backward transfer*: the "
        "mean over topics of what phases after a topic's own did to it, and each of them; what is "
        "lost of a topic before its phase comes is not in it. A topic whose own stream gained "
        "nothing has nothing to recover, and its first window counts. Matrix, recovery and "
        "transfer are of one seed where no others are listed, and without intervals.",
    ]
    if "shift.png" in pictures:
        parts.append("![Acceptance by phase](shift.png)")
    for kind, systems in kinds.items():
        for system, facts in systems.items():
            parts.append(f"{kind}, {system}:")
            parts.append(_matrix(facts["matrix"]))
        parts.append(_recovery(systems))
        parts += _seeds(systems)
    return parts


def _matrix(matrix: dict[str, dict[str, float]]) -> str:
    topics = list(next(iter(matrix.values())))
    rows = [[name, *(number(found[t]) for t in topics)] for name, found in matrix.items()]
    return table(["after", *topics], rows)


def _recovery(systems: dict[str, Any]) -> str:
    """Transfer and recovery of abrupt shifts, side by side; of mixed ones what there is."""
    headings = ["system", "micro-steps", "mean over tests at the end"]
    headings += ["acceptance rate of the stream"]
    abrupt = any("backward_transfer" in facts for facts in systems.values())
    if abrupt:
        headings += ["backward transfer", "most lost", "requests until recovery"]
    rows = []
    for system, facts in systems.items():
        row = [system, str(facts["learning"]["micro_steps"])]
        row += [interval(facts["mean_at_the_end"]), number(facts["acceptance_rate"])]
        if abrupt:
            recovery = ", ".join(
                f"{topic} {'never' if n is None else n}" for topic, n in facts["recovery"].items()
            )
            row += [_transfer(facts), _lost(facts["most_lost"]), recovery or "-"]
        rows.append(row)
    return table(headings, rows)


def _transfer(facts: dict[str, Any]) -> str:
    """The mean, and in brackets its terms: what one topic gains may hide what another loses."""
    terms = ", ".join(f"{topic} {value:+.3f}" for topic, value in facts["transfers"].items())
    return f"{number(facts['backward_transfer'])} ({terms})"


def _seeds(systems: dict[str, Any]) -> list[str]:
    """What other seeds of training came to; none where there is one."""
    lines = []
    for system, facts in systems.items():
        runs = facts["seeds"]
        if len(runs) < 2:
            continue
        ends = [
            f"{topic} {_each(run['at_the_end'][topic] for run in runs)}"
            for topic in runs[0]["at_the_end"]
        ]
        line = [system, _each(run["mean_at_the_end"] for run in runs), "; ".join(ends)]
        if "most_lost" in runs[0]:
            line += [_each(run["backward_transfer"] for run in runs)]
            line += ["; ".join(_lost(run["most_lost"]) for run in runs)]
        lines.append(line)
    if not lines:
        return []
    headings = ["system", "mean over tests at the end", "tests at the end"]
    headings += ["backward transfer", "most lost"][: len(lines[0]) - len(headings)]
    note = "By training seed: the first served the phases, the others learnt from recorded answers."
    return [note, table(headings, lines)]


def _each(values: Iterable[float]) -> str:
    return ", ".join(number(value) for value in values)


def _lost(found: dict[str, Any]) -> str:
    return f"{found['topic']} {number(found['lost'])}" if found["lost"] > 0 else "nothing"
