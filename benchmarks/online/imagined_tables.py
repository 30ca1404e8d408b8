"""What imagined prompts bring, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from online.learning import Learning
from online.tables import interval, number, table


def paragraphs(figures: dict[str, Any], pictures: Sequence[str] = ()) -> list[str]:
    """Of the topics that were learnt so; none where none was.

    Args:
        figures: from ``results.collect``.
        pictures: files beside the page.
    """
    lines = [
        _line(topic, facts["acceptance"]["online"], own)
        for topic, facts in figures["topics"].items()
        for own in facts.get("imagined", ())
    ]
    if not lines:
        return []
    headings = ["topic", "imagined per record", "micro-steps of a round", "replay, MiB"]
    headings += ["held out", "rate held, steps", "mean's decay", "least gain"]
    headings += ["online", "online, imagining", "ceiling", "gap closed", "goal"]
    headings += ["acceptance rate, test served", "after 100, 200, 400 requests"]
    headings += ["prompts imagined", "left out: in the test", "s imagining"]
    headings += ["at once, in", "s training", "machine"]
    picture = "![Acceptance on the test, imagining](imagined.png)"
    return [
        "With `training.synthetic_per_record`: while it is idle, the target makes up prompts that "
        "begin like stored ones, and answers them; drafts learn from both kinds, and are judged by "
        "real ones alone. The same stream, in rehearsal: the records of its frozen twin; training "
        "seed 0 alone, and the prompts per record are the most that there may be. What steps "
        "alone would have brought is in *offline, the same prompts*. Held out: the share of the "
        "prompts that judge instead of teaching. Rate held: the steps after which the learning "
        "rate falls as one over the steps (`training.rate_hold_steps`; 0: never). Mean's decay: "
        "`training.average_decay`. Least gain: `training.min_gain`. Seconds are the processor's; "
        "the target imagines so many requests at once, in that dtype, all else is the page's.",
        *([picture] if "imagined.png" in pictures else []),
        table(headings, lines),
    ]


def _line(topic: str, alone: Any, own: dict[str, Any]) -> list[str]:
    stages = own["acceptance"]
    curve = {int(at): value for at, value in own["curve"].items()}
    return [
        topic,
        f"{own['per_record']:g}",
        str(own["micro_steps"]),
        str(own["capacity_mb"]),
        f"{own['held_out_fraction'] or Learning().held_out_fraction:g}",
        f"{own['rate_hold_steps']:,}",
        f"{own['average_decay']:g}",
        f"{own['min_gain']:g}",
        interval(alone),
        interval(stages["online"]),
        interval(stages["ceiling"]) if "ceiling" in stages else "-",
        interval(stages["gap_closed"], 2) if "gap_closed" in stages else "-",
        {True: "reached", False: "missed"}.get(stages.get("reached"), "-"),
        interval(own["live_test"]["acceptance_rate"]),
        ", ".join(number(curve.get(at)) for at in (100, 200, 400)),
        f"{own['made']:,}",
        "-" if own["in_test"] is None else str(own["in_test"]),
        number(own["imagining_s"], 0),
        f"{own['at_once']}, {own['dtype'] if own['dtype'] != 'auto' else 'the same'}",
        number(own["training_s"], 0),
        own["machine"]["cpu"],
    ]
