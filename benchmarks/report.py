"""The benchmark's figures for people: tables on the terminal, and a chart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

AUTO, OFF, GENERATE = "paceline auto", "paceline off", "generate"
_COLOURS = {AUTO: "#0b6e4f", OFF: "#7fa99b", GENERATE: "#b0482f"}
_INK, _FAINT = "#22262b", "#8a929a"


def show(console: Console, figures: dict[str, Any]) -> None:
    """Print everything that was measured."""
    for cell in figures["cells"]:
        console.print(_cell_table(cell))
    for table in (_pairs_table(figures["pairs"]), _phases_table(figures["phases"])):
        if table.row_count:
            console.print(table)
    memory = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in figures["memory_mib"].items())
    console.print(f"Resident memory: {memory}")
    wrong, total = differing_answers(figures["cells"])
    dtype = figures["settings"]["dtype"]
    if failures := figures["draft_failures"]:
        console.print(
            f"[bold red]Drafts failed in {failures} rounds, which went on without speculation: "
            "no figure of speculation counts."
        )
    console.print(f"Greedy answers that differ from generate's, {dtype}: {wrong} of {total}")


def differing_answers(cells: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Greedy answers that are not those of `generate`, and how many were compared."""
    found = [
        (facts["answers_that_differ"], facts["answers"])
        for cell in cells
        for name, facts in cell["variants"].items()
        if "answers" in facts and name != GENERATE
    ]
    return sum(wrong for wrong, _ in found), sum(count for _, count in found)


def interval(facts: dict[str, Any]) -> str:
    """A ratio with its interval."""
    if facts["low"] is None:
        return f"{facts['ratio']:.2f}x"
    return f"{facts['ratio']:.2f}x ({facts['low']:.2f} to {facts['high']:.2f})"


def _cell_table(cell: dict[str, Any]) -> Table:
    topics = "mixed topics" if cell["mixed"] else "one topic per batch"
    title = f"Batch {cell['batch']}, temperature {cell['temperature']:g}, {topics}"
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    headings = ("variant", "tokens/s", "acceptance length", "acceptance rate", "differ")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "variant" else "right")
    for name, facts in sorted(cell["variants"].items(), key=lambda item: -item[1]["tokens_per_s"]):
        differ = f"{facts['answers_that_differ']}/{facts['answers']}" if "answers" in facts else ""
        table.add_row(
            name,
            f"{facts['tokens_per_s']:.0f}",
            _number(facts["mean_acceptance_length"]),
            _number(facts["acceptance_rate"]),
            differ,
        )
    table.caption = "\n".join(f"{name}: {interval(r)}" for name, r in cell["ratios"].items())
    return table


def _pairs_table(pairs: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="Speculation on (auto) against off, interleaved pairs")
    for heading in ("temperature", "batch", "pairs", "on / off", "low", "high"):
        table.add_column(heading, justify="right")
    for facts in pairs:
        bounds = [_number(facts[name], 3) for name in ("ratio", "low", "high")]
        table.add_row(
            f"{facts['temperature']:g}", str(facts["batch"]), str(facts["pairs"]), *bounds
        )
    return table


def _phases_table(phases: dict[str, dict[str, Any]]) -> Table:
    table = Table(title="A round's time by phase, batch 1, greedy (prefill left out)")
    table.add_column("variant")
    for name in next(iter(phases.values()))["shares"] if phases else ():
        table.add_column(name, justify="right")
    table.add_column("outside forwards", justify="right")
    for variant, facts in phases.items():
        cells = [f"{100 * share:.1f} %" for share in facts["shares"].values()]
        table.add_row(variant, *cells, f"{100 * facts['overhead']:.1f} %")
    return table


def _number(value: float | None, places: int = 2) -> str:
    return "" if value is None else f"{value:.{places}f}"


def draw(path: Path, figures: dict[str, Any]) -> None:
    """Write the chart: tokens per second by batch and how variants compare at batch 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {
        "font.size": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "axes.edgecolor": _FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": "#e3e7ea",
    }
    settings, machine = figures["settings"], figures["machine"]
    with pyplot.rc_context(style):
        figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), dpi=130)
        _bars(left, figures["cells"])
        _lines(right, figures["cells"])
        figure.suptitle(
            f"Decoding: {settings['prompts']} prompts, {settings['dtype']}, "
            f"{settings['threads']} threads, {machine['cpu']}",
            x=0.02,
            ha="left",
            weight="bold",
        )
        figure.tight_layout()
        figure.savefig(path)
        pyplot.close(figure)


def _of_one_topic(cells: Sequence[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    return [c for c in cells if not c["mixed"] and c["temperature"] == temperature]


def _bars(axes: Any, cells: Sequence[dict[str, Any]]) -> None:
    """Tokens per second at batch 1, a bar per variant."""
    first = next((c for c in cells if c["batch"] == 1), None)
    axes.set_title("batch 1" if first is None else f"batch 1, temperature {first['temperature']:g}")
    if first is None:
        return
    items = sorted(first["variants"].items(), key=lambda item: item[1]["tokens_per_s"])
    names = [name for name, _ in items]
    rates = [facts["tokens_per_s"] for _, facts in items]
    bars = axes.barh(names, rates, color=[_COLOURS.get(name, "#c3ccd3") for name in names])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel("tokens/s, geometric mean over topics")


def _lines(axes: Any, cells: Sequence[dict[str, Any]]) -> None:
    """Tokens per second over the batch size."""
    temperatures = sorted({cell["temperature"] for cell in cells})
    for temperature, dash in zip(temperatures, ("-", "--", ":"), strict=False):
        own = _of_one_topic(cells, temperature)
        for name, colour in _COLOURS.items():
            points = [(c["batch"], c["variants"][name]["tokens_per_s"]) for c in own]
            label = f"{name}, temperature {temperature:g}"
            axes.plot(*zip(*points, strict=True), dash, marker="o", color=colour, label=label)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({c["batch"] for c in cells}), sorted({c["batch"] for c in cells}))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.set_title("one topic per batch")
    axes.set_xlabel("prompts at once")
    axes.set_ylabel("tokens/s, geometric mean over topics")
    axes.legend(frameon=False, fontsize=8)
