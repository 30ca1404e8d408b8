"""The weight registry: owns the published weights, announces versions, outlives restarts.

A *weight_version* is an integer per topic: 0 are the initial weights, which every process has
already, then 1, 2, ... The number never falls, not even when the registry is killed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from paceline.actors.weights.flat import FlatWeights
from paceline.actors.weights.history import finite
from paceline.actors.weights.lock import hold
from paceline.actors.weights.store import WeightStore

logger = logging.getLogger(__name__)

_HISTORY = 2_000  # decisions kept in memory; the file keeps all


class WeightRegistry:
    """Actor (asynchronous, for the long polls) that owns the newest weights of every topic.

    It puts the arrays into the object store itself, since an object dies with the process that
    put it. Disk first, announcement second: what a draft has seen survives a restart.
    """

    def __init__(
        self,
        directory: str,
        topics: Sequence[str],
        fingerprint: str | Mapping[str, str],
        *,
        keep_versions: int = 3,
        put: Callable[[Any], Any] = ray.put,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Come back with the newest versions on disk.

        Args:
            directory: where versions live; shared storage where there are several hosts. It is
                this process's alone until the process ends.
            topics: all experts, ``general`` included.
            fingerprint: of the target and the topic's initial draft, by topic; one for all
                where it is a string.
            keep_versions: files kept per topic.
            put: places an object in the object store and returns its reference.
            clock: unix seconds.

        Raises:
            StateFolderLocked: where another process has the directory.
        """
        hold(directory)
        self._topics = tuple(topics)
        marks = dict.fromkeys(topics, fingerprint) if isinstance(fingerprint, str) else fingerprint
        self._keep = keep_versions
        self._put = put
        self._clock = clock
        self._store = WeightStore(directory, {topic: marks[topic] for topic in topics})
        self._history = self._store.read_history(_HISTORY)
        self._versions = dict.fromkeys(self._topics, 0)
        self._references: dict[str, Any] = {}
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        for topic in self._topics:
            self._restore(topic)

    def _restore(self, topic: str) -> None:
        highest = self._store.version(topic)
        newest = self._store.read_newest(topic)
        if newest is None:
            if highest:  # all files are gone: keep counting from where drafts have been
                logger.warning(
                    "no readable weights of %s; its versions go on from %d", topic, highest
                )
            self._versions[topic] = highest
            return
        version, flat = newest
        if version < highest:
            # Drafts may have seen the unreadable one: the older weights get a number above it.
            self._publish(topic, flat, highest + 1, {"topic": topic, "outcome": "restored"})
        else:
            self._versions[topic] = version
            self._references[topic] = self._put(flat)

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        """Make weights the newest version of a topic.

        Args:
            topic: one of the registry's.
            flat: the weights, as they will be served.
            decision: the gate's figures, kept in the history.

        Returns:
            the new weight_version.

        Raises:
            KeyError: for an unknown topic.
        """
        version = self._versions[topic] + 1
        entry = decision | {"outcome": "published", "parent": self._versions[topic]}
        self._publish(topic, flat, version, entry)
        return version

    def _publish(self, topic: str, flat: FlatWeights, version: int, entry: dict[str, Any]) -> None:
        entry = entry | {"time": self._clock(), "topic": topic, "version": version}
        self._store.write(topic, version, flat, entry)
        self._references[topic] = self._put(flat)
        self._versions[topic] = version
        self._remember(entry)
        self._store.prune(topic, self._keep)
        for loop, event in self._waiters:
            loop.call_soon_threadsafe(event.set)

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        """Note that the gate turned a candidate down; nothing else changes.

        Raises:
            KeyError: for an unknown topic.
        """
        version = self._versions[topic]
        facts = {"time": self._clock(), "topic": topic, "outcome": "rejected", "version": version}
        self._remember(decision | facts | {"parent": version})

    def current(self) -> dict[str, int]:
        """Topic to newest weight_version; 0 are the initial weights."""
        return dict(self._versions)

    def newest(self, topic: str) -> tuple[int, list[Any]]:
        """A topic's weight_version with the reference of its FlatWeights, in a list of one.

        The list is empty where there are none: at version 0, and where files were lost. Then
        the initial weights stand for that version.

        Raises:
            KeyError: for an unknown topic.
        """
        reference = self._references.get(topic)
        return self._versions[topic], [] if reference is None else [reference]

    async def wait_newer(
        self, known: Mapping[str, int], timeout_s: float
    ) -> dict[str, tuple[int, list[Any]]]:
        """Wait for a version above the known ones.

        Args:
            known: topic to the weight_version that the caller has; a missing topic has 0.
            timeout_s: longest wait, seconds.

        Returns:
            topic to (weight_version, [reference of FlatWeights]); the reference lies in a list
            so that Ray does not resolve it. Empty after the time-out.
        """
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        self._waiters.add(waiter)
        try:
            news = self._newer(known)
            if not news:
                try:
                    await asyncio.wait_for(waiter[1].wait(), timeout_s)
                except TimeoutError:
                    return {}
                news = self._newer(known)
            return news
        finally:
            self._waiters.discard(waiter)

    def _newer(self, known: Mapping[str, int]) -> dict[str, tuple[int, list[Any]]]:
        return {
            topic: (self._versions[topic], [reference])
            for topic, reference in self._references.items()
            if self._versions[topic] > max(known.get(topic, 0), 0)
        }

    def history(self, topic: str | None = None) -> list[dict[str, Any]]:
        """Decisions of a topic, or of all, oldest first."""
        return [d for d in self._history if topic is None or d.get("topic") == topic]

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def _remember(self, decision: dict[str, Any]) -> None:
        decision = finite(decision)
        self._store.append_history(decision["topic"], decision)
        self._history.append(decision)
        del self._history[:-_HISTORY]
