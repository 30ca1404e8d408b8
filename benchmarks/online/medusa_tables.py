"""The figures of drafts and Medusa heads as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from report import interval


def section(figures: Mapping[str, Any], command: str) -> str:
    """Section ``Medusa``: what was taught, then a cell after the other.

    Args:
        figures: of ``medusa.json``.
        command: that made it.
    """
    settings = figures["settings"]
    teaching, prompts = settings["teaching"], settings["block"] * settings["blocks"]
    clock = "the processor" if settings["threads"] == 1 else "the clock"
    head = (
        f"## Medusa\n\nCommand: `{command}`\n\n"
        "Medusa heads (Cai et al., arXiv 2401.10774) on the same target, taught with the same "
        "answers in as many passes as drafts were, served by the same engine: "
        f"{teaching['answers']} answers a topic, {teaching['passes']} passes, a tenth held out, "
        f"one seed of teaching. One request at a time, {prompts} test prompts a topic, "
        f"{settings['max_tokens']} tokens at most, {settings['threads']} thread(s); tokens/s are "
        f"of {clock}'s seconds. Ratios are geometric means over topics with a 95 % interval "
        "from pairs of blocks. Heads draft from the target's last hidden state and cost no "
        "forward of their own; a chain is verified, no tree."
    )
    parts = [head, taught_table(figures["taught"])]
    for cell in figures["cells"]:
        parts.append(f"Temperature {cell['temperature']:g}, batch {cell['batch']}:")
        parts += [speed_table(cell), topic_table(cell)]
    return "\n\n".join(parts) + "\n"


def taught_table(taught: Mapping[str, Mapping[str, Any]]) -> str:
    """Held-out figures and cost of everything that learnt."""
    rows = []
    for name, facts in taught.items():
        held = facts.get("held_out_accuracy") or [facts["held_out_acceptance"]]
        rows.append(
            [
                name,
                str(facts["records"]),
                f"{facts['seconds']:.0f}",
                " / ".join(f"{share:.2f}" for share in held),
            ]
        )
    heading = ["taught", "answers", "seconds", "held-out top-1 agreement by position"]
    return _table(heading, rows)


def speed_table(cell: Mapping[str, Any]) -> str:
    """Speed and acceptance of every variant."""
    rows = []
    for name, facts in _ordered(cell):
        ratio = cell["ratios"].get(f"{name} / plain")
        rates = facts["position_rates"]
        rows.append(
            [
                name,
                f"{facts['tokens_per_s']:.0f}",
                interval(ratio) if ratio else "",
                _number(facts["mean_acceptance_length"]),
                " / ".join(f"{rate:.2f}" for rate in rates),
                f"{facts['answers_that_differ']} of {facts['answers']}"
                if "answers" in facts
                else "",
            ]
        )
    heading = ["variant", "tokens/s", "against plain", "acceptance length"]
    return _table([*heading, "accepted by position", "answers that differ"], rows)


def topic_table(cell: Mapping[str, Any]) -> str:
    """Acceptance length and speed per topic."""
    topics = sorted(cell["variants"]["plain"]["tokens_per_s_by_topic"])
    rows = []
    for name, facts in _ordered(cell):
        lengths = facts["mean_acceptance_length_by_topic"]
        speeds = facts["tokens_per_s_by_topic"]
        shown = [f"{speeds[t]:.0f} ({_number(lengths.get(t)) or '-'})" for t in topics]
        rows.append([name, *shown])
    return _table(["tokens/s (acceptance length)", *topics], rows)


def _ordered(cell: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Plain first, then by kind and k."""
    return sorted(cell["variants"].items(), key=lambda item: (item[0] != "plain", item[0]))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, ["---"] + ["---:"] * (len(heading) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
