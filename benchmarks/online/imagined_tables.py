"""What imagined prompts bring, as Markdown."""

from __future__ import annotations

from typing import Any

from online.tables import interval, number, table


def paragraphs(figures: dict[str, Any]) -> list[str]:
    """Of the topics that were learnt so; none where none was.

    Args:
        figures: from ``results.collect``.
    """
    topics = {t: facts for t, facts in figures["topics"].items() if "imagined" in facts}
    if not topics:
        return []
    headings = ["topic", "online", "online, imagining", "ceiling", "gap closed", "goal"]
    headings += ["acceptance rate, test served", "after 100, 200, 400 requests"]
    headings += ["prompts imagined", "left out: in the test", "s imagining", "s training"]
    lines = []
    for topic, facts in topics.items():
        own, alone = facts["imagined"], facts["acceptance"]
        stages = own["acceptance"]
        curve = {int(at): value for at, value in own["curve"].items()}
        lines.append(
            [
                topic,
                interval(alone["online"]),
                interval(stages["online"]),
                interval(stages["ceiling"]) if "ceiling" in stages else "-",
                interval(stages["gap_closed"], 2) if "gap_closed" in stages else "-",
                {True: "reached", False: "missed"}.get(stages.get("reached"), "-"),
                interval(own["live_test"]["acceptance_rate"]),
                ", ".join(number(curve.get(at)) for at in (100, 200, 400)),
                f"{own['made']:,}",
                "-" if own["in_test"] is None else str(own["in_test"]),
                number(own["imagining_s"], 0),
                number(own["training_s"], 0),
            ]
        )
    per_record = figures["settings"]["imagined_per_record"]
    return [
        f"With `training.imagined_per_record: {per_record:g}`: while it is idle, the target makes "
        "up prompts that begin like stored ones, and answers them; drafts learn from both kinds, "
        "and are judged by real ones alone. The same stream, in rehearsal: the records of its "
        "frozen twin. Seconds are the processor's, what is imagined at 8 requests at once.",
        table(headings, lines),
    ]
