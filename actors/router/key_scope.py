"""Topics and experts of one API key, ``acme.sql``, apart from those of all others. Pure.

Without a scope by key no name has a key, and every expert may draft for every topic.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from paceline.actors.general import GENERAL
from paceline.actors.router.policy import MinConfidence, Route, route

_SEPARATOR = "."  # in the name of no topic and no key


def key_topic(key: str, topic: str) -> str:
    """Name of a key's topic, and of the expert that learns from it."""
    return f"{key}{_SEPARATOR}{topic}"


def key_of(name: str) -> str:
    """The key of a topic or expert; empty if it belongs to none."""
    return name.rpartition(_SEPARATOR)[0]


def topic_of(name: str) -> str:
    """The topic as the classifier and the config name it, without the key."""
    return name.rpartition(_SEPARATOR)[2]


def may_draft(expert: str, topic: str) -> bool:
    """Whether an expert has learnt from no other key than the topic's."""
    return key_of(expert) in ("", key_of(topic))


def experts_for(key: str, experts: Collection[str]) -> list[str]:
    """The experts that may draft for a key's requests, in their order."""
    return [expert for expert in experts if key_of(expert) in ("", key)]


def key_route(
    key: str,
    probabilities: Mapping[str, float],
    experts: Collection[str],
    min_confidence: MinConfidence,
    weights: Mapping[str, Mapping[str, float]] | None = None,
) -> Route:
    """Topic and expert of a key's prompt, see :func:`route`.

    An uncertain prompt belongs to the key's own ``general``. The ``general`` of no key, which has
    learnt from nobody, drafts for a topic if it is measured to be the best.

    Args:
        key: its name.
        probabilities: by topic of the classifier, see :func:`route` as the others.
        experts: of all keys.
        min_confidence: by topic of the classifier, or one for all.
        weights: by topic and expert of all keys.
    """
    own = {t if t == GENERAL else key_topic(key, t): p for t, p in probabilities.items()}
    if isinstance(min_confidence, Mapping):
        min_confidence = {key_topic(key, topic): p for topic, p in min_confidence.items()}
    found = route(own, experts_for(key, experts), min_confidence, weights)
    general = key_topic(key, GENERAL)
    return Route(general, general) if found.topic == GENERAL else found
