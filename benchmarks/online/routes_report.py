"""What came of the arms: table, plot, summary file, and the page's section."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from online.routes_figures import (
    EXPERTS,
    SINGLE,
    Unit,
    along_of,
    chosen,
    confidence_of,
    items_of,
    languages_of,
    rows_of,
)
from online.routes_plot import NAMES, WHOLE, draw
from online.routes_section import routes as section
from online.store import Store
from paceline.actors.router.policy import MinConfidence


def report(
    store: Store, common: Mapping[str, Any], rule: MinConfidence, out: Path, command: str
) -> None:
    """Print the table; write ``routes.json``, ``routes.md`` and ``routes.png``.

    Args:
        store: where the arms are.
        common: settings that they share.
        rule: how sure the classifier must be, as it is served; the arms have its probabilities.
        out: the folder.
        command: that makes all this again.
    """
    wanted = json.loads(json.dumps(common))
    arms: dict[int, dict[str, Unit]] = {}
    for unit in store.every("routes-arm-"):
        if all(unit["settings"].get(n) == value for n, value in wanted.items()):
            seed = unit["settings"]["learning"]["seed"]
            arms.setdefault(seed, {})[unit["settings"]["arm"]] = unit["result"]
    whole = {seed: own for seed, own in sorted(arms.items()) if len(own) == 2}
    router = dict(common["router"]) | {"min_confidence": rule}
    judged = {seed: chosen(own, router, seed) for seed, own in whole.items()}
    groups = next(iter(whole.values()))[SINGLE]["groups"]
    tallies, items = {seed: found for seed, (found, _) in judged.items()}, items_of(groups)
    rows = rows_of(tallies, items)
    along = {seed: along_of(own, router) for seed, own in whole.items()}
    names = ("micro_steps", "positions", "published", "rejected", "seconds")
    figures = {
        "settings": dict(common) | {"router": router},
        "seeds": list(whole),
        "check": store.find("routes-check", common),
        "machine": next(iter(whole.values()))[SINGLE]["machine"],
        "training": {
            seed: {arm: {n: own[arm]["learning"][n] for n in names} for arm in (SINGLE, EXPERTS)}
            for seed, own in whole.items()
        },
        "rows": rows,
        "languages": languages_of(tallies, items),
        "confidence": confidence_of(whole, items),
        "choices": {
            seed: {n: c[n] for n in ("rule", "measured")} for seed, (_, c) in judged.items()
        },
        "along": along,
    }
    (out / "routes.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / "routes.md").write_text(section(figures, command) + "\n", encoding="utf-8")
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
        cells = [_cell(found[g]["mean_acceptance_length"]) if g in found else "" for g in groups]
        table.add_row(name, *cells)
    return table


def _cell(found: Mapping[str, float | None]) -> str:
    if found["value"] is None or found["low"] is None or found["high"] is None:
        return ""
    return f"{found['value']:.2f} ({found['low']:.2f}-{found['high']:.2f})"
