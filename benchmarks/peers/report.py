"""Figures of the blocks, the bars that they are held against, and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from harness import (
    Interval,
    Timing,
    geometric_mean,
    interval,
    paired_ratio,
    topic_rates,
)

from peers.catalogue import ALONE, AUTO, DAY0, LEARNT, LLAMA_BF16, PLAIN, Peer

_MS = 1e3
Unit = Mapping[str, Any]


def summary(units: Sequence[Unit], peers: Sequence[Peer]) -> dict[str, Any]:
    """Figures of a cell: per peer, and its ratios to plain Paceline and to the best peer.

    The best peer is the fastest of those measured that is not Paceline; the best of the same
    weights decodes plainly in bfloat16. Peers that failed in any block are left out.
    """
    names = [p.name for p in peers if all(_figures(unit, p.name) for unit in units)]
    timings = [
        Timing(name, unit["block"], unit["topic"], own["tokens"], own["seconds"])
        for unit in units
        for name in names
        for own in (unit["peers"][name],)
    ]
    rates = {name: geometric_mean(list(topic_rates(timings, name).values())) for name in names}
    others = [p for p in peers if p.name in rates and not p.ours]
    best = _fastest(rates, others)
    same = _fastest(rates, [p for p in others if p.same_weights])
    found = {}
    for name in names:
        own = [unit["peers"][name] for unit in units]
        tpot = np.concatenate([each["tpot_s"] for each in own]) * _MS
        found[name] = {
            "tokens_per_s": rates[name],
            "tpot_ms_p50": float(np.median(tpot)),
            "tpot_ms_p99": float(np.quantile(tpot, 0.99)),
            "wait_ms_p99": _p99_of_waits(own),
            "ttft_ms_p50": float(np.median(np.concatenate([each["ttft_s"] for each in own]))) * _MS,
            "processor_ms_per_answer": _processor_ms(own),
            "to_plain": _ratio(timings, name, PLAIN, names),
            "to_best": _ratio(timings, name, best, names),
            "to_best_same_weights": _ratio(timings, name, same, names),
            "to_llama_bf16": _ratio(timings, name, LLAMA_BF16, names),
        }
    return {
        "best_peer": best,
        "best_peer_of_the_same_weights": same,
        "peers": found,
        "http_adds": _http_adds(units, names),
    }


def _figures(unit: Unit, name: str) -> Mapping[str, Any] | None:
    own = unit["peers"].get(name)
    return None if own is None or "failed" in own else own


def _fastest(rates: Mapping[str, float], peers: Sequence[Peer]) -> str | None:
    return max((p.name for p in peers), key=lambda name: rates[name], default=None)


def _ratio(
    timings: Sequence[Timing], upper: str, lower: str | None, names: Sequence[str]
) -> dict[str, Any] | None:
    if lower not in names or lower is None or upper == lower:
        return None
    return asdict(paired_ratio(timings, upper, lower))


def _p99_of_waits(blocks: Sequence[Mapping[str, Any]]) -> float:
    """Of all waits between events; each block has kept its longest fiftieth."""
    longest = np.sort(np.concatenate([block["longest_waits_s"] for block in blocks]))[::-1]
    at = sum(block["waits"] for block in blocks) // 100
    return float(longest[min(at, len(longest) - 1)]) * _MS


def _processor_ms(blocks: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of each of its processes by role, and of the client, per answer of whole length."""
    answers = sum(block["whole_answers"] for block in blocks)
    spent = Counter[str]()
    for block in blocks:
        spent.update(block.get("processor_s", {}))
    return {role: used * _MS / answers for role, used in spent.most_common()}


def _http_adds(units: Sequence[Unit], names: Sequence[str]) -> dict[str, Any] | None:
    """Share of the time per token that HTTP, Ray and the event path add.

    Its interval is over blocks: requests of one share the machine's pace, and each other's rounds.
    """
    if PLAIN not in names or ALONE not in names:
        return None
    timings = [
        Timing(name, unit["block"], unit["topic"], 1, geometric_mean(unit["peers"][name]["tpot_s"]))
        for unit in units
        for name in (PLAIN, ALONE)
    ]
    found = paired_ratio(timings, ALONE, PLAIN)
    ends = (None if x is None else x - 1.0 for x in (found.ratio, found.low, found.high))
    return asdict(Interval(*ends))


def failures(cells: Iterable[Iterable[Unit]]) -> dict[str, str]:
    """Peers that could not be measured, with the cause."""
    return {
        name: own["failed"]
        for units in cells
        for unit in units
        for name, own in unit["peers"].items()
        if "failed" in own
    }


def rows(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per peer."""
    keys = ("tokens_per_s", "tpot_ms_p50", "tpot_ms_p99", "wait_ms_p99", "ttft_ms_p50")
    return [
        {"server": name}
        | {key: own[key] for key in keys}
        | {"/ Paceline plain": _shown(own["to_plain"]), "/ best peer": _shown(own["to_best"])}
        for name, own in cell["peers"].items()
    ]


def processor_rows(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per role of a process, a column per peer."""
    used = {name: own["processor_ms_per_answer"] for name, own in cell["peers"].items()}
    roles = dict.fromkeys(role for own in used.values() for role in own)
    return [
        {"process": role} | {name: round(own.get(role, 0.0), 1) for name, own in used.items()}
        for role in roles
    ]


def _shown(ratio: Mapping[str, Any] | None) -> str:
    return "" if ratio is None else interval(ratio)


def bars(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What is wanted of Paceline, beside what was measured; no row for what was not."""
    found = []

    def row(cell: Mapping[str, Any], what: str, value: Any, wanted: str) -> None:
        if value is not None:
            at = f"{cell['in_flight']}, {cell['temperature']:g}"
            shown = interval(value) if isinstance(value, Mapping) else value
            found.append({"in flight, T": at, "what": what, "measured": shown, "wanted": wanted})

    for cell in cells:
        own = cell["peers"]
        plain, llama = own.get(PLAIN, {}), own.get(LLAMA_BF16)
        greedy_one = cell["in_flight"] == 1 and cell["temperature"] == 0
        if greedy_one:
            row(cell, f"plain / {LLAMA_BF16}", plain.get("to_llama_bf16"), ">= 1.1")
            row(cell, f"{DAY0} / plain", own.get(DAY0, {}).get("to_plain"), ">= 1.3")
            row(cell, "learnt / best peer measured", own.get(LEARNT, {}).get("to_best"), ">= 1.5")
        if plain and llama and greedy_one:
            value = f"{plain['tpot_ms_p99']:.1f} / {llama['tpot_ms_p99']:.1f} ms"
            row(cell, f"p99 of the time per token: plain, {LLAMA_BF16}", value, "no worse")
        if cell["in_flight"] == 8 and cell["temperature"] == 0:
            row(cell, "plain / best peer measured", plain.get("to_best"), ">= 1.5")
        for name in (DAY0, LEARNT, AUTO):
            row(cell, f"{name} / plain", own.get(name, {}).get("to_plain"), "lower end >= 0.97")
        limit = {1: "<= 0.05", 8: "<= 0.1"}.get(cell["in_flight"])
        if limit is not None:
            row(cell, "what HTTP adds", cell["http_adds"], limit)
    return found


def markdown(figures: Mapping[str, Any]) -> str:
    """Tokens per second of every server in every cell, as docs/performance.md shows them."""
    cells = figures["cells"]
    heads = [f"{c['in_flight']}, T {c['temperature']:g}" for c in cells]
    names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
    lines = [f"| tokens/s | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        values = [cell["peers"].get(name) for cell in cells]
        shown = ["" if own is None else f"{own['tokens_per_s']:.0f}" for own in values]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)
