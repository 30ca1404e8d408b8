"""docs/results.md from the figures. Every number on the page is out of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from online.shift_tables import shifts
from online.tables import interval, number, table

_OSD = (
    "OSD (Liu et al., arXiv 2310.07177) reports gains of 0.1 to 0.65 in token acceptance rate, "
    "visible after 100 to 200 requests, and as good as offline distillation on 70 to 100 % of "
    "the data. Its targets and drafts are other ones (7 B and 160 M and the like): only the shape "
    "of the curves compares."
)


def page(
    figures: dict[str, Any],
    pictures: Sequence[str],
    fragments: Sequence[str],
    imagined: Sequence[str] = (),
) -> str:
    """The whole page.

    Args:
        figures: from ``results.collect``.
        pictures: file names of plots beside the page.
        fragments: further sections, Markdown.
        imagined: paragraphs on what imagined prompts bring, of ``imagined_tables``.
    """
    parts = [
        "# Results: what learning brings",
        _head(figures),
        *_topics(figures, pictures, imagined),
        *shifts(figures, pictures),
        *_cost(figures),
        *fragments,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(figures: dict[str, Any]) -> str:
    settings = figures["settings"]
    learning, serving, sizes = settings["learning"], settings["serving"], settings["sizes"]
    mode = "greedy" if serving["temperature"] == 0 else f"temperature {serving['temperature']:g}"
    return (
        f"Command: `{figures['command']}`\n\n"
        f"{_machines(figures)}; {settings['threads']} thread(s). "
        f"Models: the embedded target, and `draft-general` as the start of every draft. "
        f"Decoding: {mode}, 8 requests at once, at most {serving['max_tokens']} tokens, always "
        f"{serving['num_speculative_tokens']} drafted per round. Learning: after every "
        f"{learning['requests_per_round']} requests {learning['micro_steps']} micro-steps of "
        f"{learning['micro_batch']} records at {learning['learning_rate']:g}, gate included; seed "
        f"{learning['seed']}; leave to train is always given, {learning['held_out_fraction']:g} "
        "of the prompts are held out, and a version that passes the gate is served to all at once: "
        "a server tries it on a share of the requests first (`training.canary_share`), which takes "
        f"a topic some dozens to hundreds of them. Tests have {sizes['test']} prompts that no "
        "stream holds. Intervals are 95 %, by bootstrap over prompts (2,000 resamples), and those "
        "of a test alone: they say nothing of another seed of training. Acceptance does not depend "
        "on how busy the machine is, seconds do."
    )


def _machines(figures: dict[str, Any]) -> str:
    """Where the streams ran; a page may hold those of several machines."""
    every = [facts["machine"] for facts in figures["topics"].values()] or [figures["machine"]]
    kinds = {f"{m['cpu']}, {m['cores']} cores, torch {m['torch']}" for m in every}
    loads = sorted(m["load_average"][0] for m in every)
    return f"Machine: {'; '.join(sorted(kinds))} (load average {loads[0]:g} to {loads[-1]:g})"


def _topics(
    figures: dict[str, Any], pictures: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    topics = figures["topics"]
    if not topics:
        return []
    parts = [
        "## Per data set: online, frozen, offline ceiling",
        "Acceptance is teacher-forced on the target's answers to the test prompts: the chance "
        "that the served draft's next token is accepted (greedy: the same argmax; sampled: "
        "Σ min(p, q)). The ceiling is the same draft distilled offline on the whole train side "
        "until held-out answers gain no more; beside it the same with the stream's own prompts "
        "alone, which is what there was to learn. The goal is 90 % of a gap of at least 0.15, "
        "elsewhere within 0.02 of the ceiling.",
    ]
    if "online.png" in pictures:
        parts.append("![Acceptance over the stream](online.png)")
    parts += [
        _stages(topics, "acceptance"),
        "The same by Σ min(p, q) at temperature 1, whatever the decoding:",
        _stages(topics, "overlap"),
        "The test served for real, at a constant number of drafted tokens:",
        _live(topics),
        "Acceptance on the test after so many requests:",
        _curves(topics),
        "The stream itself, acceptance rate / mean acceptance length of some of its requests:",
        _windows(topics),
        _offline(topics),
        _seeds(topics),
        *extra,
        _OSD,
    ]
    return parts


def _stages(topics: dict[str, Any], measure: str) -> str:
    headings = ["topic", "frozen", "online", "offline, the same prompts", "ceiling"]
    headings += ["gain", "gap closed", "goal"]
    rows = []
    for topic, facts in topics.items():
        stages = facts[measure]
        rows.append(
            [
                topic,
                interval(stages["frozen"]),
                interval(stages["online"]),
                interval(stages["same_prompts"]) if "same_prompts" in stages else "-",
                interval(stages["ceiling"]) if "ceiling" in stages else "-",
                interval(stages["gain"]),
                interval(stages["gap_closed"], 2) if "gap_closed" in stages else "-",
                {True: "reached", False: "missed"}.get(stages.get("reached"), "-"),
            ]
        )
    return table(headings, rows)


def _live(topics: dict[str, Any]) -> str:
    headings = ["topic", "draft", "acceptance rate", "mean acceptance length"]
    rows = [
        [
            topic,
            name,
            interval(live["acceptance_rate"]),
            interval(live["mean_acceptance_length"], 2),
        ]
        for topic, facts in topics.items()
        for name, live in facts["live_test"].items()
    ]
    return table(headings, rows)


def _curves(topics: dict[str, Any]) -> str:
    looks = sorted({int(at) for facts in topics.values() for at in facts["curve"]})
    rows = []
    for topic, facts in topics.items():
        curve = {int(at): found for at, found in facts["curve"].items()}
        visible = facts["visible_after"]
        cells = [number(curve[at]["value"]) if at in curve else "-" for at in looks]
        rows.append([topic, *cells, "-" if visible is None else str(visible)])
    return table(["topic", *map(str, looks), "gain of 0.1 seen after"], rows)


def _windows(topics: dict[str, Any]) -> str:
    """Five windows of the streams, first and last of the longest among them."""
    rows = [(t, name, own) for t, facts in topics.items() for name, own in facts["windows"].items()]
    longest = max((own for _, _, own in rows), key=len, default=[])
    if not longest:
        return ""
    shown = [longest[at] for at in sorted({round(i * (len(longest) - 1) / 4) for i in range(5)})]
    headings = [f"{part['first'] + 1} to {part['end']}" for part in shown]
    lines = []
    for topic, name, own in rows:
        parts = {part["first"]: part for part in own}
        cells = [_window(parts.get(part["first"])) for part in shown]
        lines.append([topic, name, *cells])
    return table(["topic", "draft", *headings], lines)


def _window(part: dict[str, Any] | None) -> str:
    if part is None:
        return "-"
    return f"{number(part['acceptance_rate'])} / {number(part['mean_acceptance_length'], 2)}"


def _offline(topics: dict[str, Any]) -> str:
    known = {topic: facts["offline"] for topic, facts in topics.items() if "offline" in facts}
    if not known:
        return ""
    rows = [
        [
            topic,
            str(facts["records"]),
            f"{100 * topics[topic]['requests'] / facts['records']:.0f} %",
            str(facts["steps"]),
            "yes" if facts["converged"] else "no",
        ]
        for topic, facts in known.items()
    ]
    headings = ["topic", "answers of the ceiling", "stream's share of them", "steps", "converged"]
    return table(headings, rows)


def _seeds(topics: dict[str, Any]) -> str:
    known = {topic: facts["seeds"] for topic, facts in topics.items() if len(facts["seeds"]) > 1}
    if not known:
        return ""
    rows = [
        [
            topic,
            ", ".join(number(run["acceptance"]) for run in runs),
            ", ".join(number(run["gap_closed"], 2) for run in runs),
        ]
        for topic, runs in known.items()
    ]
    note = (
        "By training seed: the first served its stream; the others learnt from the frozen twin's "
        "records, which are the same answers."
    )
    return f"{note}\n\n{table(['topic', 'acceptance at the end', 'gap closed'], rows)}"


def _cost(figures: dict[str, Any]) -> list[str]:
    topics, learning = figures["topics"], figures["settings"]["learning"]
    if not topics:
        return []
    headings = [
        "topic",
        "training, s",
        "micro-steps of those offered",
        "rounds published / rejected",
        "tokens learnt / served",
        "s per point",
        "tokens per point",
        "speed-up, training counted in",
        "without training",
        "last quarter",
        "pays after",
    ]
    rows = []
    for topic, facts in topics.items():
        cost = facts["cost"]
        pays = cost["pays_after"]
        offered = facts["requests"] // learning["requests_per_round"] * learning["micro_steps"]
        rows.append(
            [
                topic,
                number(cost["training_s"], 0),
                f"{cost['micro_steps']} of {offered}",
                f"{cost['rounds_published']} / {cost['rounds_rejected']}",
                f"{cost['tokens_learnt']:,} / {cost['tokens_served']:,}",
                interval(cost["seconds_per_point"], 2),
                interval(cost["tokens_per_point"], 0),
                number(cost["speedup"], 2),
                number(cost["speedup_without_training"], 2),
                number(cost["speedup_at_the_end"], 2),
                "not within the stream" if pays is None else f"{pays} requests",
            ]
        )
    return [
        "## What it costs",
        "A point is 0.01 of acceptance on the test. Seconds are of the processor, which other "
        "programs on the machine do not change much, each of one pass by an engine that does "
        "nothing else; those of training hold the rounds' drawing, "
        "judging and swapping too, with micro-steps of several records (a server on CPUs takes one "
        "at a time to yield sooner, which costs a third more). Training takes turns with serving "
        "on the same thread, so the speed-up over the frozen twin is that of a machine without any "
        "idle time.",
        table(headings, rows),
    ]
