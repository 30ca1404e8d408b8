"""The registry's history in memory and on disk, which never keeps a decision from being taken."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from paceline.actors.weights.history import decision_time, finite
from paceline.actors.weights.store import WeightStore

logger = logging.getLogger(__name__)

_GATE = ("candidate_expected_acceptance", "served_expected_acceptance")


class Decisions:
    """What was decided about all topics; the file keeps all of it, memory the last ones.

    Attributes:
        counts: decisions since the start, by topic and outcome; of what was published,
            ``canary`` is on trial and ``deployed`` serves all at once.
        gates: by topic, what the gate last expected of the candidate and of the served draft.
    """

    def __init__(self, store: WeightStore, clock: Callable[[], float], limit: int) -> None:
        """Read what is on disk.

        Args:
            store: of all topics.
            clock: unix seconds.
            limit: decisions kept in memory.
        """
        self._store = store
        self._clock = clock
        self._limit = limit
        self._kept = store.read_history(limit)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.gates: dict[str, tuple[float | None, float | None]] = {}
        for decision in self._kept:
            self._note_gate(decision)

    def add(self, topic: str, decision: Mapping[str, Any]) -> None:
        """Keep a decision, with the time now where it has none.

        A line that cannot be written is lost from the file and no more: what it tells of counts.
        """
        entry = finite({"time": self._clock(), "topic": topic, **decision})
        self._kept.append(entry)
        del self._kept[: -self._limit]
        self.counts[topic, outcome_of(entry)] += 1
        self._note_gate(entry)
        try:
            self._store.append_history(topic, entry)
        except OSError:
            logger.exception("%s: a decision is missing in the history's file", topic)

    def _note_gate(self, decision: Mapping[str, Any]) -> None:
        if _GATE[0] in decision:
            candidate, served = (decision.get(name) for name in _GATE)
            self.gates[str(decision.get("topic"))] = candidate, served

    def complete(self, topic: str) -> None:
        """Add the decision that the topic's manifest was written for, if it is missing.

        A kill or a full disk between the two has left it out.
        """
        decision = self._store.manifest(topic).get("decision")
        if not isinstance(decision, dict) or self._has(topic, decision):
            return
        self.add(topic, decision)

    def _has(self, topic: str, decision: Mapping[str, Any]) -> bool:
        full = len(self._kept) >= self._limit
        if full and 0.0 < decision_time(decision) < decision_time(self._kept[0]):
            return True  # older than what was read: the file may have it
        return any(
            entry.get("topic") == topic and decision.items() <= entry.items()
            for entry in reversed(self._kept)
        )

    def of(self, topic: str | None) -> list[dict[str, Any]]:
        """Those of a topic, or of all (None), oldest first."""
        return [d for d in self._kept if topic is None or d.get("topic") == topic]


def outcome_of(decision: Mapping[str, Any]) -> str:
    """A decision's outcome; of what was published, whether it is on trial or serves all."""
    outcome = str(decision.get("outcome", "unknown"))
    if outcome == "published":
        return "canary" if decision.get("canary") else "deployed"
    return outcome
