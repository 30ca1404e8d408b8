"""Versions of all topics: numbers, files, object references and history."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

from paceline.actors.handles import Reference
from paceline.actors.weights.flat_weights import FlatWeights, load_model
from paceline.actors.weights.history import Decision, decision_time, finite
from paceline.actors.weights.notifications import SlotWeights, changed_weights
from paceline.actors.weights.slots import candidate_of
from paceline.actors.weights.topic_store import TopicStore, WeightFiles
from paceline.actors.weights.versions import TopicVersions

logger = logging.getLogger(__name__)


class DecisionLog:
    """Decisions on all topics; the file keeps all, memory the last ones.

    Attributes:
        counts: decisions since the start, by topic and outcome, see :func:`outcome_of`.
        gates: by topic, the gate's last expected acceptance of the candidate and of the served
            draft.
    """

    def __init__(self, files: WeightFiles, clock: Callable[[], float], limit: int) -> None:
        """Read the last decisions from disk.

        Args:
            files: of all topics.
            clock: unix seconds.
            limit: decisions kept in memory.
        """
        self._files = files
        self._clock = clock
        self._limit = limit
        self._kept = files.read_history(limit)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.gates: dict[str, tuple[float | None, float | None]] = {}
        for decision in self._kept:
            self._note_gate(decision)

    def add(self, topic: str, decision: Decision) -> None:
        """Append a decision, with the present time if it has none.

        A line that cannot be written is missing in the file only; the decision holds.
        """
        entry: Decision = finite({"time": self._clock(), "topic": topic, **decision})
        self._kept.append(entry)
        del self._kept[: -self._limit]
        self.counts[topic, outcome_of(entry)] += 1
        self._note_gate(entry)
        try:
            self._files.append_history(topic, entry)
        except OSError:
            logger.exception("%s: a decision could not be written to the history", topic)

    def _note_gate(self, decision: Decision) -> None:
        if "candidate_expected_acceptance" in decision:
            self.gates[decision.get("topic", "")] = (
                decision["candidate_expected_acceptance"],
                decision.get("served_expected_acceptance"),
            )

    def complete(self, topic: str) -> None:
        """Append the decision in the topic's manifest if a kill or a full disk left it out."""
        found = self._files.manifest(topic).get("decision")
        if isinstance(found, dict) and not self._has(topic, found):
            self.add(topic, cast(Decision, found))

    def _has(self, topic: str, decision: Mapping[str, object]) -> bool:
        full = len(self._kept) >= self._limit
        if full and 0.0 < decision_time(decision) < decision_time(self._kept[0]):
            return True  # older than what was read
        return any(
            entry.get("topic") == topic and decision.items() <= entry.items()
            for entry in reversed(self._kept)
        )

    def of(self, topic: str | None) -> list[Decision]:
        """Decisions of a topic, or of all (None), oldest first."""
        return [d for d in self._kept if topic is None or d.get("topic") == topic]


def outcome_of(decision: Decision) -> str:
    """A decision's outcome; of ``published``, ``canary`` if on trial, else ``deployed``."""
    outcome = decision.get("outcome", "unknown")
    if outcome == "published":
        return "canary" if decision.get("canary") else "deployed"
    return outcome


_HISTORY = 2_000  # decisions in memory


class VersionStore:
    """Versions of all topics: changes go to disk, then take effect, then are announced.

    This process puts the arrays into the object store; an object dies with the process that put
    it.
    """

    def __init__(
        self,
        directory: str,
        fingerprints: Mapping[str, str],
        *,
        keep_versions: int,
        canary: bool,
        initial: Mapping[str, str],
        put: Callable[[FlatWeights], Reference[FlatWeights]],
        clock: Callable[[], float],
        on_change: Callable[[str], None],
    ) -> None:
        """Restore all topics from disk.

        Args:
            directory: of all versions; used by this process alone.
            fingerprints: topic to the fingerprint of the target and its initial draft.
            keep_versions: files kept per topic, beside those in use.
            canary: whether new weights go on trial first.
            initial: topic to the folder of its initial draft.
            put: places an object in the object store and returns its reference.
            clock: unix seconds.
            on_change: called with a topic whose versions have changed; not during construction.
        """
        self._fingerprints = dict(fingerprints)
        self._keep_versions = keep_versions
        self._canary = canary
        self._initial = dict(initial)
        self._put = put
        self._clock = clock
        self._on_change = on_change
        self._files = WeightFiles(directory, fingerprints)
        self.decisions = DecisionLog(self._files, clock, _HISTORY)
        self._topics = {topic: self._topic_store(topic) for topic in fingerprints}
        self._references: dict[str, Reference[FlatWeights]] = {}  # by slot
        for topic in fingerprints:
            self._restore(topic)

    def _topic_store(self, topic: str) -> TopicStore:
        return TopicStore(
            self._files,
            topic,
            self._keep_versions,
            canary=self._canary,
            initial=partial(self.weights, topic, 0),
        )

    def _restore(self, topic: str) -> None:
        self.decisions.complete(topic)
        found = self._topics[topic].restore()
        if found.stable is not None:
            self._references[topic] = self._put(found.stable)
        if found.candidate is not None:
            self._references[candidate_of(topic)] = self._put(found.candidate)
        if found.decision is not None:
            self.decisions.add(topic, found.decision)

    def __contains__(self, topic: object) -> bool:
        return topic in self._topics

    def __iter__(self) -> Iterator[str]:
        return iter(self._topics)

    def state(self, topic: str) -> TopicVersions:
        """A topic's version numbers.

        Raises:
            KeyError: for an unknown topic.
        """
        return self._topics[topic].state

    def states(self) -> dict[str, TopicVersions]:
        """Version numbers of all topics."""
        return {topic: store.state for topic, store in self._topics.items()}

    def stable(self, topic: str) -> SlotWeights:
        """See WeightRegistry.stable_weights."""
        return SlotWeights(self.state(topic).stable, self._references.get(topic))

    def changed(self, known: Mapping[str, int]) -> dict[str, SlotWeights]:
        """See :func:`changed_weights`."""
        return changed_weights(known, self.states(), self._references)

    def weights(self, topic: str, version: int) -> FlatWeights | None:
        """The weights of a version, the initial ones for 0; None if they cannot be read."""
        if version > 0:
            return self._topics[topic].read(version)
        folder = self._initial.get(topic)
        return None if folder is None else load_model(folder)

    def publish(self, topic: str, flat: FlatWeights, entry: Decision, *, trial: bool) -> int:
        """Serve weights under a new version, which is returned.

        Args:
            topic: of the draft.
            flat: the weights.
            entry: of the history; its ``restored_from`` and ``audit`` apply to the candidate.
            trial: whether they become the candidate and not stable at once.
        """
        state = self.state(topic)
        version = state.version + 1
        entry = {**entry, "version": version}
        if trial:
            entry["canary"] = True
            new = state.on_trial(
                version, entry.get("restored_from"), audit=entry.get("audit", False)
            )
        else:
            new = state.published(version)
        self.commit(topic, new, entry, (version, flat))
        return version

    def commit(
        self,
        topic: str,
        state: TopicVersions,
        entry: Decision,
        new: tuple[int, FlatWeights] | None = None,
    ) -> None:
        """Change a topic's versions: put and write first, which may fail.

        Args:
            topic: name.
            state: the new version numbers.
            entry: of the history.
            new: a version with its weights, if there is a new one.
        """
        entry = {**entry, "time": self._clock(), "topic": topic}
        before, slot = self.state(topic), candidate_of(topic)
        put = {}
        if new is not None:
            put[slot if state.candidate == new[0] else topic] = self._put(new[1])
        self._topics[topic].commit(state, entry, new)
        self._references |= put
        if new is None and before.candidate is not None and state.stable == before.candidate:
            self._references[topic] = self._references[slot]
        if state.candidate is None:
            self._references.pop(slot, None)
        self._on_change(topic)
        self.decisions.add(topic, entry)

    def add(self, name: str, like: str, enter: Callable[[], None]) -> int:
        """Add a topic that starts as a copy of another's stable weights.

        Args:
            name: of the topic.
            like: the other topic; its initial draft becomes that of the new one too.
            enter: adds the topic to the catalogue, once the weights are written.

        Returns:
            its weight_version.

        Raises:
            KeyError: for an unknown ``like``.
            ValueError: the weights to be copied cannot be read.
            OSError: of the disk; nothing was added.
        """
        flat = self.weights(like, self.state(like).stable) or self.weights(like, 0)
        if flat is None:
            raise ValueError(f"{name}: the weights of {like} cannot be read")
        self._fingerprints[name] = self._fingerprints[like]
        if like in self._initial:
            self._initial[name] = self._initial[like]
        self._files.open(name, self._fingerprints[name])
        store = self._topic_store(name)
        store.restore()
        version, reason = store.state.version + 1, f"a copy of {like}"
        entry: Decision = {
            "outcome": "added",
            "version": version,
            "parent": 0,
            "reason": reason,
            "time": self._clock(),
            "topic": name,
        }
        reference = self._put(flat)
        store.commit(store.state.published(version), entry, (version, flat))
        enter()
        self._references[name] = reference
        self._topics = {**self._topics, name: store}  # other threads may iterate over it
        self._on_change(name)
        self.decisions.add(name, entry)
        return version
