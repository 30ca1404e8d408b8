"""All topics' versions: their numbers and files, their references in the object store, history."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from paceline.actors.weights.flat_weights import FlatWeights, load_model
from paceline.actors.weights.history import decision_time, finite
from paceline.actors.weights.notifications import SlotWeights, changed_weights
from paceline.actors.weights.slots import candidate_of
from paceline.actors.weights.store import Shelf, WeightStore
from paceline.actors.weights.versions import TopicVersions

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


_HISTORY = 2_000  # decisions kept in memory; the file keeps all


class WeightArchive:
    """Carries out what was decided: on disk first, then it counts, then whoever asked hears of it.

    The arrays are put into the object store by this process: an object dies with the process that
    put it.
    """

    def __init__(
        self,
        directory: str,
        marks: Mapping[str, str],
        *,
        keep_versions: int,
        canary: bool,
        initial: Mapping[str, str],
        put: Callable[[Any], Any],
        clock: Callable[[], float],
        on_change: Callable[[str], None],
    ) -> None:
        """Come back with the newest versions on disk.

        Args:
            directory: where versions live; this process's alone.
            marks: topic to the fingerprint of the target and its initial draft.
            keep_versions: files kept per topic, beside those that are in use.
            canary: whether new weights go on trial first.
            initial: topic to the folder of its initial draft.
            put: places an object in the object store and returns its reference.
            clock: unix seconds.
            on_change: called with a topic whose versions have changed; not during construction.
        """
        self._marks = dict(marks)
        self._keep_versions = keep_versions
        self._canary = canary
        self._initial = dict(initial)
        self._put = put
        self._clock = clock
        self._on_change = on_change
        self._store = WeightStore(directory, marks)
        self.decisions = Decisions(self._store, clock, _HISTORY)
        self._shelves = {topic: self._shelf(topic) for topic in marks}
        self._references: dict[str, Any] = {}  # by slot
        for topic in marks:
            self._restore(topic)

    def _shelf(self, topic: str) -> Shelf:
        initial = partial(self.weights, topic, 0)
        return Shelf(self._store, topic, self._keep_versions, canary=self._canary, initial=initial)

    def _restore(self, topic: str) -> None:
        self.decisions.complete(topic)
        found = self._shelves[topic].restore()
        if found.stable is not None:
            self._references[topic] = self._put(found.stable)
        if found.candidate is not None:
            self._references[candidate_of(topic)] = self._put(found.candidate)
        if found.decision is not None:
            self.decisions.add(topic, found.decision)

    def __contains__(self, topic: object) -> bool:
        return topic in self._shelves

    def __iter__(self) -> Iterator[str]:
        return iter(self._shelves)

    def state(self, topic: str) -> TopicVersions:
        """A topic's version numbers.

        Raises:
            KeyError: for an unknown topic.
        """
        return self._shelves[topic].state

    def states(self) -> dict[str, TopicVersions]:
        """Those of all topics."""
        return {topic: shelf.state for topic, shelf in self._shelves.items()}

    def stable(self, topic: str) -> SlotWeights:
        """See WeightRegistry.stable_weights."""
        return SlotWeights(self.state(topic).stable, self._references.get(topic))

    def changed(self, known: Mapping[str, int]) -> dict[str, SlotWeights]:
        """See :func:`changed_weights`."""
        return changed_weights(known, self.states(), self._references)

    def weights(self, topic: str, version: int) -> FlatWeights | None:
        """The weights of a version, 0 being the initial ones; None where they cannot be read."""
        if version > 0:
            return self._shelves[topic].read(version)
        folder = self._initial.get(topic)
        return None if folder is None else load_model(folder)

    def announce(self, topic: str, flat: FlatWeights, entry: dict[str, Any], *, trial: bool) -> int:
        """Serve weights under a new number, which is returned.

        Args:
            topic: whose draft they are.
            flat: the weights.
            entry: of the history; ``restored_from`` and ``audit`` in it say so of the candidate.
            trial: whether live requests are to judge them first.
        """
        state = self.state(topic)
        version = state.version + 1
        entry = entry | {"version": version} | ({"canary": True} if trial else {})
        if trial:
            audit = entry.get("audit") is True
            new = state.on_trial(version, entry.get("restored_from"), audit=audit)
        else:
            new = state.published(version)
        self.commit(topic, new, entry, (version, flat))
        return version

    def commit(
        self,
        topic: str,
        state: TopicVersions,
        entry: dict[str, Any],
        new: tuple[int, FlatWeights] | None = None,
    ) -> None:
        """Put and write, which may fail; then take and announce, which may not.

        Args:
            topic: whose versions change.
            state: what they are afterwards.
            entry: of the history.
            new: a version with its weights, where there is a new one.
        """
        entry = entry | {"time": self._clock(), "topic": topic}
        before, slot = self.state(topic), candidate_of(topic)
        reference = None if new is None else self._put(new[1])
        self._shelves[topic].commit(state, entry, new)
        if new is not None:
            self._references[slot if state.candidate == new[0] else topic] = reference
        elif before.candidate is not None and state.stable == before.candidate:
            self._references[topic] = self._references[slot]
        if state.candidate is None:
            self._references.pop(slot, None)
        self._on_change(topic)
        self.decisions.add(topic, entry)

    def add(self, name: str, like: str, enter: Callable[[], None]) -> int:
        """Take a topic in, whose first version is a copy of another's stable weights.

        Args:
            name: of the topic.
            like: whose copy it is, and whose initial draft is its own.
            enter: called when the weights are written; from then on the topic is there.

        Returns:
            its weight_version.

        Raises:
            KeyError: for an unknown ``like``.
            ValueError: the weights to be copied cannot be read.
            OSError: of the disk. The topic is not there then.
        """
        flat = self.weights(like, self.state(like).stable) or self.weights(like, 0)
        if flat is None:
            raise ValueError(f"{name}: the weights of {like} cannot be read")
        self._marks[name] = self._marks[like]
        if like in self._initial:
            self._initial[name] = self._initial[like]
        self._store.open(name, self._marks[name])
        shelf = self._shelf(name)
        shelf.restore()
        version, reason = shelf.state.version + 1, f"a copy of {like}"
        entry = {"outcome": "added", "version": version, "parent": 0, "reason": reason}
        entry |= {"time": self._clock(), "topic": name}
        reference = self._put(flat)
        shelf.commit(shelf.state.published(version), entry, (version, flat))
        enter()
        self._references[name] = reference
        self._shelves = {**self._shelves, name: shelf}  # others may be looking through it
        self._on_change(name)
        self.decisions.add(name, entry)
        return version
