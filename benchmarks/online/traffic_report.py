"""Table, plot and summary file of the traffic's blocks."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Timing, geometric_mean, paired_ratio
from rich.console import Console
from rich.table import Table

from online import fragments
from online.traffic_plan import FROZEN, ONLINE, PLAIN, VARIANTS

COLOURS = {PLAIN: "#6b7280", FROZEN: "#b0482f", ONLINE: "#0b6e4f"}
DECISIONS = ("published", "promoted", "rolled_back")
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_PAIRS = ((FROZEN, PLAIN), (ONLINE, PLAIN), (ONLINE, FROZEN))
Unit = Mapping[str, Any]
Key = tuple[str, float, str]


def rows_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row per trace, load and variant; repeats are averaged, latencies geometrically."""
    grouped: dict[Key, list[Unit]] = {}
    for unit in units:
        block = unit["settings"]["block"]
        key = block["trace"], block["load"], unit["settings"]["variant"]
        grouped.setdefault(key, []).append(unit["result"])
    order = sorted(grouped, key=lambda key: (key[0], key[1], VARIANTS.index(key[2])))
    return [_row(key, grouped[key]) for key in order]


def _row(key: Key, results: Sequence[Unit]) -> dict[str, Any]:
    trace, load, variant = key
    found = [result["summary"] for result in results]
    row: dict[str, Any] = {"trace": trace, "load": load, "variant": variant, "blocks": len(found)}
    for name in (*LATENCIES, "pause_s", "lag_s"):
        for point in ("p50", "p99"):
            values = [s[name][point] for s in found if s[name][point] is not None]
            positive = bool(values) and min(values) > 0.0
            row[f"{name[:-2]}_{point}_s"] = geometric_mean(values) if positive else None
    for name in ("goodput", "within_limits", "tokens_per_s"):
        row[name] = sum(s[name] for s in found) / len(found)
    for name in ("requests", "failed"):
        row[name] = sum(s[name] for s in found)
    for name in ("acceptance_rate", "mean_acceptance_length", "first"):
        values = [s["acceptance"][name] for s in found if s["acceptance"][name] is not None]
        row[name] = sum(values) / len(values) if values else None
    topics: dict[str, Counter[str]] = {}
    for one in found:
        for topic, counts in one.get("by_topic", {}).items():  # older blocks lack it
            topics.setdefault(topic, Counter()).update(counts)
    row["by_topic"] = {topic: dict(counts) for topic, counts in topics.items()}
    for name in DECISIONS:
        row[name] = sum(result["decisions"].get(name, 0) for result in results)
    spent = [sum(result["cpu_s"].values()) for result in results]
    row["cpu_s"] = sum(spent) / len(found)
    row["trainer_cpu_s"] = sum(r["cpu_s"].get("trainer", 0.0) for r in results) / len(found)
    row["prompts_repeated"] = sum(result["prompts_repeated"] for result in results)
    return row


def lesson_of(result: Unit) -> dict[str, Any]:
    """What the lesson came to: traffic, what was learnt, acceptance as it began and ended."""
    summary, trainer = result["summary"], result["trainer"] or {}
    parts = [part["first"] for part in summary["over_time"] if part["first"] is not None]
    return {
        "requests": summary["requests"],
        "seconds": summary["seconds"],
        "micro_steps": trainer.get("micro_steps"),
        "trainer_cpu_s": result["cpu_s"].get("trainer", 0.0),
        "cpu_s": sum(result["cpu_s"].values()),
        "decisions": {name: result["decisions"].get(name, 0) for name in DECISIONS},
        "first": [parts[0], parts[-1]] if parts else None,
    }


def ratios_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """How many times shorter a variant's latencies are than another's, by load, over its blocks.

    Intervals are of 95 % over blocks, traces being fixed strata; None where too few ran.
    """
    found = []
    loads = sorted({unit["settings"]["block"]["load"] for unit in units})
    for load in loads:
        own = [unit for unit in units if unit["settings"]["block"]["load"] == load]
        for name in LATENCIES:
            for point in ("p50", "p99"):
                timings = _timings(own, name, point)
                for variant, other in _PAIRS:
                    row = {"load": load, "figure": f"{name[:-2]} {point}", "variant": variant}
                    found.append(row | {"against": other} | _ratio(timings, variant, other))
    return found


def _timings(units: Sequence[Unit], name: str, point: str) -> list[Timing]:
    blocks: dict[tuple[str, int], int] = {}
    timings = []
    for unit in units:
        settings = unit["settings"]
        block, value = settings["block"], unit["result"]["summary"][name][point]
        number = blocks.setdefault((block["trace"], block["repeat"]), len(blocks))
        if value is not None and value > 0.0:
            timings.append(Timing(settings["variant"], number, block["trace"], 1, value))
    return timings


def _ratio(timings: Sequence[Timing], variant: str, other: str) -> dict[str, Any]:
    both = [t for t in timings if t.variant == variant], [t for t in timings if t.variant == other]
    common = {t.block for t in both[0]} & {t.block for t in both[1]}
    if not common:
        return {"ratio": None, "low": None, "high": None, "blocks": 0}
    kept = [t for side in both for t in side if t.block in common]
    ratio = paired_ratio(kept, variant, other)
    return {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high, "blocks": ratio.blocks}


def answers_that_differ(units: Sequence[Unit]) -> dict[str, dict[str, int]]:
    """Per variant: answers compared with plain's in the same block, and how many differ."""
    plain: dict[str, list[str | None]] = {}
    for unit in units:
        if unit["settings"]["variant"] == PLAIN:
            plain[_block(unit)] = _answers(unit)
    found = {v: {"compared": 0, "differ": 0} for v in (FROZEN, ONLINE)}
    for unit in units:
        variant, block = unit["settings"]["variant"], _block(unit)
        if variant == PLAIN or block not in plain:
            continue
        pairs = [p for p in zip(_answers(unit), plain[block], strict=True) if None not in p]
        found[variant]["compared"] += len(pairs)
        found[variant]["differ"] += sum(own != other for own, other in pairs)
    return found


def _block(unit: Unit) -> str:
    return json.dumps(unit["settings"]["block"], sort_keys=True)


def _answers(unit: Unit) -> list[str | None]:
    outcomes = unit["result"]["outcomes"]
    return [o["answer"] if o["error"] is None else None for o in outcomes]


def report(
    units: Sequence[Unit],
    capacities: Mapping[str, Unit],
    common: Mapping[str, Any],
    out: Path,
    command: str,
    lesson: Unit | None = None,
) -> int:
    """Print the table; write ``traffic.json``, ``.md`` and ``.png``; 1 where a draft failed.

    Args:
        units: all blocks of the plan, settings and result each.
        capacities: by trace.
        common: settings of all blocks.
        out: folder of results.
        command: that made them.
        lesson: what ``online`` learnt from before the blocks; None where there was none.
    """
    rows, ratios = rows_of(units), ratios_of(units)
    results = [unit["result"] for unit in units] + ([] if lesson is None else [lesson])
    failures = sum(result["draft_failures"] or 0 for result in results)
    figures = {
        "settings": dict(common),
        "machines": [unit["result"]["machine"] for unit in units[:1]],
        "load_averages": [unit["result"]["machine"]["load_average_before"] for unit in units],
        "capacity": dict(capacities),
        "lesson": None if lesson is None else lesson_of(lesson),
        "rows": rows,
        "ratios": ratios,
        "answers": answers_that_differ(units),
        "draft_failures": failures,
    }
    (out / "traffic.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    (out / "traffic.md").write_text(fragments.traffic(figures, command) + "\n", encoding="utf-8")
    draw(out / "traffic.png", rows, units)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(rows))
    console.print(f"answers against plain's: {figures['answers']}; draft failures: {failures}")
    return int(failures > 0)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """For the terminal; times in milliseconds as p50 / p99. The rest is in the files."""
    table = Table(title="Open-loop traffic, ms as p50 / p99", title_justify="left")
    names = ("trace", "load", "variant", "first token", "per token", "goodput/s", "tokens/s")
    for name in (*names, "length", "failed"):
        table.add_column(name, justify="left" if name in names[:3] else "right", no_wrap=True)
    for row in rows:
        length = row["mean_acceptance_length"]
        table.add_row(
            row["trace"].removeprefix("azure "),
            f"{row['load']:g}",
            row["variant"],
            *(_pair(row, name) for name in ("ttft", "tpot")),
            f"{row['goodput']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            "" if length is None else f"{length:.2f}",
            str(row["failed"]),
        )
    return table


def _pair(row: Mapping[str, Any], name: str) -> str:
    return f"{_milli(row[f'{name}_p50_s'])} / {_milli(row[f'{name}_p99_s'])}"


def _milli(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.{0 if seconds >= 0.1 else 1}f}"


def draw(path: Path, rows: Sequence[Mapping[str, Any]], units: Sequence[Unit]) -> None:
    """Latencies and goodput over load, and acceptance over the blocks' time, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = sorted({row["trace"] for row in rows})
    figure, grid = pyplot.subplots(
        max(1, len(traces)), 4, figsize=(16, 3.6 * max(1, len(traces))), squeeze=False, dpi=120
    )
    panels = (("ttft", "s to the first token"), ("tpot", "s per output token"))
    for line, trace in zip(grid, traces, strict=False):
        for axes, (name, title) in zip(line, panels, strict=False):
            for point, style in (("p50", "-"), ("p99", ":")):
                _lines(axes, rows, trace, f"{name}_{point}_s", style)
            axes.set(title=f"{trace}: {title} (p50 -, p99 ..)", yscale="log", xlabel="load")
        _lines(line[2], rows, trace, "goodput", "-")
        line[2].set(title="requests a second within limits", xlabel="load")
        _over_time(line[3], [u for u in units if u["settings"]["block"]["trace"] == trace])
    grid[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _lines(axes: Any, rows: Sequence[Mapping[str, Any]], trace: str, name: str, style: str) -> None:
    for variant in VARIANTS:
        own = [r for r in rows if r["trace"] == trace and r["variant"] == variant]
        points = [(r["load"], r[name]) for r in own if r[name] is not None]
        if points:
            label = variant if style == "-" else None
            line = {"color": COLOURS[variant], "label": label, "marker": "."}
            axes.plot(*zip(*points, strict=True), style, **line)


def _over_time(axes: Any, units: Sequence[Unit]) -> None:
    """First-position acceptance along all blocks of a trace, one after the other."""
    for variant in (FROZEN, ONLINE):
        own = [u for u in units if u["settings"]["variant"] == variant]
        own.sort(key=lambda u: (u["settings"]["block"]["repeat"], u["settings"]["block"]["load"]))
        values = [part["first"] for u in own for part in u["result"]["summary"]["over_time"]]
        axes.plot([v if v is not None else float("nan") for v in values], color=COLOURS[variant])
    axes.set(title="first drafted token accepted", xlabel="sixths of blocks", ylim=(0, 1))
