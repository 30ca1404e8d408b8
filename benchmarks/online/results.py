"""The figures of all units that are there, as one JSON, plots, and Markdown for docs/results.md."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine

from online import rows
from online.bench import Bench
from online.ceiling import SAME, WHOLE, Offline
from online.ceiling import find as find_ceiling
from online.imagined import find as find_imagined
from online.imagined_tables import paragraphs as imagined_paragraphs
from online.learning import Imagining, Learning
from online.markdown import page
from online.plots import draw_imagined, draw_shifts, draw_streams
from online.rows import EXTRA
from online.shifts import KINDS, ORDER, SYSTEMS, rehearsal_name, shift_settings
from online.streams import stream_settings
from online.summary import (
    imagined_summary,
    level_of,
    seeds_summary,
    shift_seeds,
    shift_summary,
    topic_summary,
)
from paceline.deploy.recipes.data import DataError

# Written by the other parts of the benchmark, from their own figures.
_FRAGMENTS = ("grid", "routes", "medusa", "traffic")


def collect(
    bench: Bench,
    learning: Learning,
    offline: Offline,
    imagined: Sequence[Imagining],
    command: str,
) -> dict[str, Any]:
    """Summaries of every unit that was made with these settings.

    Args:
        bench: see Bench.
        learning: of streams and shifts.
        offline: of ceilings.
        imagined: how much was imagined, where anything was.
        command: that makes all of it.
    """
    label = rows.label(bench.data)
    topics: dict[str, Any] = {}
    levels: dict[str, float] = {}
    for topic in (*ORDER, *EXTRA):
        try:
            settings = stream_settings(bench, topic, learning)
        except DataError:
            continue
        stream = bench.store.find(f"stream-{label}-{topic}", settings)
        if stream is None:
            continue
        ceiling = find_ceiling(bench, topic, offline, WHOLE)
        same = find_ceiling(bench, topic, offline, SAME)
        topics[topic] = topic_summary(stream, ceiling, bench.sizes.window, same)
        runs = [stream, *_rehearsals(bench, topic, learning)]
        topics[topic]["machine"] = stream["machine"]
        topics[topic]["seeds"] = seeds_summary(runs, ceiling)
        topics[topic]["imagined"] = [
            imagined_summary(run, amount, ceiling)
            for amount in imagined
            if (run := find_imagined(bench, topic, learning, amount)) is not None
        ]
        if ceiling is not None:
            names = ("records", "steps", "converged")
            topics[topic]["offline"] = {name: ceiling[name] for name in names}
        if (level := level_of(stream, bench.sizes.window, bench.sizes.phase)) is not None:
            levels[topic] = level
    return {
        "command": command,
        "machine": machine.facts(),
        "settings": {
            "data": label,
            "serving": asdict(bench.serving),
            "learning": asdict(learning),
            "offline": asdict(offline),
            "sizes": asdict(bench.sizes),
            "imagined": [asdict(amount) for amount in imagined],
            "threads": bench.threads,
        },
        "topics": topics,
        "shifts": _shifts(bench, learning, levels),
    }


def _rehearsals(bench: Bench, topic: str, learning: Learning) -> list[dict[str, Any]]:
    """Those of seeds 1, 2 and so on, as far as they go without a hole."""
    name = f"rehearsal-{rows.label(bench.data)}-{topic}"
    return _seeded(bench, name, learning, lambda own: stream_settings(bench, topic, own))


def _seeded(
    bench: Bench, name: str, learning: Learning, settings: Callable[[Learning], dict[str, Any]]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        run = bench.store.find(name, settings(replace(learning, seed=len(found) + 1)))
        if run is None:
            return found
        found.append(run)


def _shifts(bench: Bench, learning: Learning, levels: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    label = rows.label(bench.data)
    for kind in KINDS:
        for system in SYSTEMS:
            try:
                settings = shift_settings(bench, kind, system, learning, ORDER)
            except DataError:
                return found
            name = f"shift-{label}-{kind}-{system.replace(' ', '-')}"
            shift = bench.store.find(name, settings)
            if shift is not None:
                abrupt = kind == "abrupt"
                own = shift_summary(shift, levels, bench.sizes.window, abrupt=abrupt)
                runs = [shift, *_shift_rehearsals(bench, kind, system, learning)]
                own["seeds"] = shift_seeds(runs, abrupt=abrupt)
                found.setdefault(kind, {})[system] = own
    return found


def _shift_rehearsals(
    bench: Bench, kind: str, system: str, learning: Learning
) -> list[dict[str, Any]]:
    """Those of seeds 1, 2 and so on, as far as they go without a hole."""
    name = rehearsal_name(bench, kind, system)
    return _seeded(
        bench, name, learning, lambda own: shift_settings(bench, kind, system, own, ORDER)
    )


def write(
    figures: dict[str, Any], out: Path, docs: Path | None = None, published: Path | None = None
) -> list[Path]:
    """Plots and the page, under ``out`` and, where wanted, as documentation; what was written.

    Args:
        figures: from :func:`collect`.
        out: folder of the benchmarks' results.
        docs: Markdown file; its pictures go beside it.
        published: folder of earlier results: the other parts' sections are taken from it where
            ``out`` has none, and kept there.
    """
    fragments = {name: _fragment(name, out / "online", published) for name in _FRAGMENTS}
    written = []
    for path in (out / "online" / "results.md", docs):
        if path is None:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures = [*_pictures(figures, path.parent)]
        sections = []
        for name, text in fragments.items():
            own = out / "online" / f"{name}.png"
            made = own if text == _text(own.with_suffix(".md")) else None
            sections.append(text)
            beside = path.parent / own.name
            if text and (made is not None or beside != own) and _picture(made, beside):
                sections.append(f"![{name}]({own.name})")
                pictures.append(own.name)
        text = page(figures, pictures, sections, imagined_paragraphs(figures, pictures))
        path.write_text(text, encoding="utf-8")
        written += [path, *(path.parent / name for name in pictures)]
    return written


def _pictures(figures: dict[str, Any], folder: Path) -> Sequence[str]:
    names = []
    if figures["topics"]:
        draw_streams(folder / "online.png", figures)
        names.append("online.png")
    if any(facts.get("imagined") for facts in figures["topics"].values()):
        draw_imagined(folder / "imagined.png", figures)
        names.append("imagined.png")
    if figures["shifts"].get("abrupt"):
        draw_shifts(folder / "shift.png", figures)
        names.append("shift.png")
    return names


def _fragment(name: str, own: Path, published: Path | None) -> str:
    text = _text(own / f"{name}.md")
    if published is None:
        return text
    kept = published / f"{name}.md"
    if text and "--quick" not in text:  # that of a short run shall not replace a long one's
        kept.write_text(text + "\n", encoding="utf-8")
    return _text(kept) or text


def _picture(made: Path | None, kept: Path) -> bool:
    """Whether a section's plot lies beside the page; put there where this machine has made it."""
    if made is not None and made.is_file() and made.resolve() != kept.resolve():
        shutil.copyfile(made, kept)
    return kept.is_file()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""
