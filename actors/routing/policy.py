"""Which expert drafts for a prompt, given what the classifier thinks of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

GENERAL = "general"


def choose(
    probabilities: Mapping[str, float], experts: Collection[str], min_confidence: float
) -> str:
    """The expert to draft with: the likeliest topic's, or ``general`` when that is unsure.

    A wrong expert costs more than a right one gains, so the generalist is the floor.

    Args:
        probabilities: by topic, as `TopicClassifier.classify` gives them; may be empty.
        experts: names of the experts that there are.
        min_confidence: probability in [0, 1] that the likeliest topic needs.

    Returns:
        One of `experts`, or ``general``. Equal probabilities go to the first name in the
        alphabet, so that the choice depends on nothing else.
    """
    known = {topic: p for topic, p in probabilities.items() if math.isfinite(p)}
    if not known:
        return GENERAL
    topic = min(known, key=lambda name: (-known[name], name))
    return topic if topic in experts and known[topic] >= min_confidence else GENERAL
