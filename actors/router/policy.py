"""Choose topic and expert of a prompt from the classifier's probabilities. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paceline.actors.general import GENERAL

DEFAULT_MIN_CONFIDENCE = 0.5  # of topics that a mapping does not name

# Probability that the most probable topic needs: one for all, or by topic of the calibrated
# classifier. Added topics are trained on few examples and less certain.
MinConfidence = float | Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Route:
    """Topic of a request, by which it is recorded, and the expert that drafts for it.

    Attributes:
        topic: name.
        draft: the expert's name.
        classified: False for a prompt that the router was not asked about.
    """

    topic: str
    draft: str
    classified: bool = True


def choose_topic(
    probabilities: Mapping[str, float], experts: Collection[str], min_confidence: MinConfidence
) -> str:
    """The most probable topic, or ``general`` if it is uncertain.

    A wrong expert costs more than a right one gains, so the generalist is the floor.

    Args:
        probabilities: by topic, see `TopicClassifier.classify`; may be empty.
        experts: names of all experts.
        min_confidence: probability in [0, 1] that the most probable topic needs. For a topic that a
            mapping names it is the probability among the named ones and ``general``, for which
            the classifier was calibrated: a slightly similar added topic takes nothing away.
            Other topics need :data:`DEFAULT_MIN_CONFIDENCE`, among all.

    Returns:
        One of `experts`, or ``general``. Ties go to the first name in the alphabet.
    """
    known = {topic: p for topic, p in probabilities.items() if math.isfinite(p)}
    if not known:
        return GENERAL
    topic = min(known, key=lambda name: (-known[name], name))
    return topic if topic in experts and _is_certain(topic, known, min_confidence) else GENERAL


def _is_certain(topic: str, known: Mapping[str, float], min_confidence: MinConfidence) -> bool:
    if not isinstance(min_confidence, Mapping):
        return known[topic] >= min_confidence
    if topic not in min_confidence:
        return known[topic] >= DEFAULT_MIN_CONFIDENCE
    rivals = sum(p for name, p in known.items() if name in min_confidence or name == GENERAL)
    return known[topic] >= min_confidence[topic] * rivals


def route(
    probabilities: Mapping[str, float],
    experts: Collection[str],
    min_confidence: MinConfidence,
    weights: Mapping[str, Mapping[str, float]] | None = None,
) -> Route:
    """Topic and expert of a prompt.

    The topic is that of :func:`choose_topic`. Its expert drafts until acceptance is measured;
    then the expert with the largest weight, averaged over topics by their probabilities, or
    ``general`` if the topic is uncertain or no expert has more weight.

    Args:
        probabilities: by topic.
        experts: names of all experts.
        min_confidence: see :func:`choose_topic`.
        weights: topic to expert to weight, each topic's sum 1, of the measured topics; the
            probability of other topics, and of ``general``, counts for ``general``.
    """
    topic = choose_topic(probabilities, experts, min_confidence)
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
