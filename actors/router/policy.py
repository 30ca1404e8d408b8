"""Which expert drafts for a prompt, given what the classifier thinks of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

GENERAL = "general"
UNNAMED = 0.5  # what topics need that a mapping does not name

# What the likeliest topic needs: one probability for all, or that of each topic that the
# classifier was made for; topics that were added to it are learnt from few examples, and less sure.
LeastConfidence = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes: ``topic`` is what it is about, ``draft`` the expert that proposes.

    Replay is kept by topic, whoever drafted.
    """

    topic: str
    draft: str


def choose(
    probabilities: Mapping[str, float], experts: Collection[str], min_confidence: LeastConfidence
) -> str:
    """The likeliest topic, or ``general`` when that is unsure: the rule without measurements.

    A wrong expert costs more than a right one gains, so the generalist is the floor.

    Args:
        probabilities: by topic, as `TopicClassifier.classify` gives them; may be empty.
        experts: names of the experts that there are.
        min_confidence: probability in [0, 1] that the likeliest topic needs. A topic that a
            mapping names must have it among the named ones and ``general``, for which the
            classifier was calibrated: an added topic that looks a little like a prompt takes
            nothing from it. Other topics need :data:`UNNAMED`, among all.

    Returns:
        One of `experts`, or ``general``. Equal probabilities go to the first name in the
        alphabet, so that the choice depends on nothing else.
    """
    known = {topic: p for topic, p in probabilities.items() if math.isfinite(p)}
    if not known:
        return GENERAL
    topic = min(known, key=lambda name: (-known[name], name))
    return topic if topic in experts and _is_sure(topic, known, min_confidence) else GENERAL


def _is_sure(topic: str, known: Mapping[str, float], min_confidence: LeastConfidence) -> bool:
    if not isinstance(min_confidence, Mapping):
        return known[topic] >= min_confidence
    if topic not in min_confidence:
        return known[topic] >= UNNAMED
    rivals = sum(p for name, p in known.items() if name in min_confidence or name == GENERAL)
    return known[topic] >= min_confidence[topic] * rivals


def route(
    probabilities: Mapping[str, float],
    experts: Collection[str],
    min_confidence: LeastConfidence,
    weights: Mapping[str, Mapping[str, float]] | None = None,
) -> Route:
    """Topic and expert of a prompt.

    The topic is :func:`choose`'s. Its expert drafts as long as nothing is measured of it; then
    the one with the largest weight, over all topics by their probabilities. Where the topic is
    unsure ``general`` drafts, and so it does where no expert has more weight.

    Args:
        probabilities: by topic.
        experts: names of the experts that there are.
        min_confidence: see :func:`choose`.
        weights: topic to expert to weight, each topic's sum 1, of the measured topics; what the
            others, and ``general``, have of the probability speaks for ``general``.
    """
    topic = choose(probabilities, experts, min_confidence)
    if topic == GENERAL or not weights or topic not in weights:
        return Route(topic, topic)
    votes = dict.fromkeys(experts, 0.0) | {GENERAL: 0.0}
    for name, probability in probabilities.items():
        if not math.isfinite(probability):
            continue
        row = weights.get(name) if name != GENERAL else None
        for expert, weight in (row or {GENERAL: 1.0}).items():
            if expert in votes and math.isfinite(weight):
                votes[expert] += probability * weight
    best = min(votes, key=lambda name: (-votes[name], name != GENERAL, name != topic, name))
    return Route(topic, best)
