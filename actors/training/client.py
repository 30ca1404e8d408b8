"""What a trainer sees of the rest: shards, registry, scheduler. Each may be dead at any time."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import ray

from paceline.actors.replay.record import RecordError, ReplayRecord, decode
from paceline.actors.training.permits import Assignment, Permit, TopicProgress, TrainerIdentity
from paceline.actors.training.progress import Ousted
from paceline.actors.training.topic_schedule import Want, best
from paceline.actors.weights.flat_weights import FlatWeights
from paceline.actors.weights.notifications import SlotWeights
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicsView

logger = logging.getLogger(__name__)


class World(Protocol):
    """The trainer's outside. Methods answer empty-handed rather than raise, but publish."""

    def stats(self) -> dict[str, dict[str, Any]]:
        """Topic to shard statistics, of the shards that answered."""

    def sample(self, topic: str, count: int, split: str) -> Iterable[ReplayRecord]:
        """At most ``count`` records of a topic; each may take time to be had."""

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        """Tell a topic's shard the latest loss on records, by request id; nothing waits for it."""

    def notes(self) -> dict[str, TopicProgress]:
        """What other trainers said last of the topics that they had last."""

    def take(self, wanted: Sequence[Want]) -> Assignment:
        """A topic of these for a round, which :meth:`give_back` ends."""

    def may_train(self) -> bool:
        """Leave for one micro-step; raises Ousted where the round is to end at once."""

    def rest(self) -> None:
        """No micro-step for a while: others may have the processor."""

    def give_back(self, note: TopicProgress | None) -> None:
        """The round has ended; None: it taught nothing."""

    def versions(self) -> dict[str, int] | None:
        """Topic to stable weight_version; None where the registry does not answer."""

    def live(self) -> dict[str, dict[str, Any]] | None:
        """See WeightRegistry.live; None where the registry does not answer."""

    def added(self) -> dict[str, str]:
        """Added topics, each with the expert that it began as a copy of."""

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The stable weight_version and its weights; None where the registry does not answer.

        Without weights the initial ones stand for the version: at 0, or after files were lost.
        """

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        """The new weight_version; raises where it is not known to be published.

        NotNow: the registry takes none of the topic at the moment.
        ValueError: it does not take these weights.
        """

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        """Note a rejected candidate."""

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        """Note something else that was decided, by its ``outcome``."""


class RayWorld:
    """The outside over Ray: every call bounded in time, every failure survived."""

    def __init__(
        self,
        shards: Mapping[str, Any],
        registry: Any,
        scheduler: Any,
        timeout_s: float,
        identity: TrainerIdentity | None = None,
    ) -> None:
        """Take actor handles.

        Args:
            shards: topic to ReplayShard.
            registry: WeightRegistry.
            scheduler: TrainerScheduler; None always grants permits.
            timeout_s: longest wait per call.
            identity: of the trainer; None for a client that computes without a topic.
        """
        self._shards = dict(shards)
        self._registry = registry
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._identity = identity
        self._incarnation = uuid.uuid4().hex
        self._topics = TopicsView(etag="")
        self._subscriber = RegistrySubscriber(registry, on_topics=self._take_topics)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Topic to shard statistics, of the shards that answered."""
        asked = {topic: shard.stats.remote() for topic, shard in self._shards.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=self._timeout_s)
        answers = {topic: self._get(reference, 0.1) for topic, reference in asked.items()}
        return {topic: answer for topic, answer in answers.items() if answer is not None}

    def sample(self, topic: str, count: int, split: str) -> Iterator[ReplayRecord]:
        """At most ``count`` records of a topic, decoded one by one."""
        shard = self._shards.get(topic)
        if shard is None or count <= 0:
            return
        for data in self._get(shard.sample.remote(count, split)) or []:
            try:
                yield decode(data)
            except RecordError as error:
                logger.warning("%s: %s", topic, error)

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        """Tell a topic's shard the latest loss on records; its answer is not waited for."""
        shard = self._shards.get(topic)
        if shard is None or not losses:
            return
        try:
            shard.update_losses.remote(losses)
        except Exception as error:
            logger.info("%s: losses were not handed on (%s)", topic, type(error).__name__)

    def notes(self) -> dict[str, TopicProgress]:
        """What other trainers said; nothing where there are none."""
        if self._scheduler is None or self._identity is None or self._identity.sole:
            return {}
        progress: dict[str, TopicProgress] | None = self._get(
            self._scheduler.topic_progress.remote(self._identity.name)
        )
        return progress or {}

    def take(self, wanted: Sequence[Want]) -> Assignment:
        """A topic of these; none where the scheduler does not answer."""
        if self._scheduler is None or self._identity is None:
            return Assignment(best(wanted))
        gains = {want.topic: want.gain for want in wanted}
        answer: Assignment | None = self._get(
            self._scheduler.request_topic.remote(self._identity, self._incarnation, gains)
        )
        if answer is None:
            return Assignment(None)
        # A scheduler that was restarted calls every topic stale.
        return replace(answer, stale=answer.stale and not self._identity.sole)

    def may_train(self) -> bool:
        """Whether one micro-step is permitted; not if the scheduler does not answer."""
        if self._scheduler is None:
            return True
        if self._identity is None:
            return bool(self._get(self._scheduler.may_train.remote(), 1.0))
        call = self._scheduler.acquire_permit.remote(self._identity.name, self._incarnation)
        permit: Permit | None = self._get(call, 1.0)
        if permit is Permit.UNASSIGNED:
            raise Ousted
        return permit is Permit.GRANTED

    def rest(self) -> None:
        """End the lease without waiting for an answer."""
        self._send("release_permit")

    def give_back(self, note: TopicProgress | None) -> None:
        """Best effort; the next request for a topic implies it."""
        self._send("release_topic", note)

    def _send(self, method: str, *arguments: Any) -> None:
        if self._scheduler is None or self._identity is None:
            return
        try:
            call = getattr(self._scheduler, method)
            call.remote(self._identity.name, self._incarnation, *arguments)
        except Exception as error:
            logger.info("the scheduler was not called (%s)", type(error).__name__)

    def versions(self) -> dict[str, int] | None:
        """Topic to stable weight_version."""
        versions: dict[str, int] | None = self._get(self._registry.current.remote())
        return versions

    def live(self) -> dict[str, dict[str, Any]] | None:
        """What live drafts did, by topic."""
        live: dict[str, dict[str, Any]] | None = self._get(self._registry.live.remote())
        return live

    def added(self) -> dict[str, str]:
        """Added topics, each with its origin, as last heard; notes the shards of new ones."""
        self._subscriber.poll(0.0, self._timeout_s)
        return {topic.name: topic.like for topic in self._topics.topics}

    def _take_topics(self, view: TopicsView) -> None:
        self._topics = view
        for topic, parts in view.parts.items():
            self._shards.setdefault(topic, parts.shard)

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The stable weight_version and its weights."""
        stable: SlotWeights | None = self._get(self._registry.stable_weights.remote(topic))
        if stable is None or stable.reference is None:
            return None if stable is None else (stable.weight_version, None)
        flat = self._get(stable.reference)
        return None if flat is None else (stable.weight_version, flat)

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        """The new weight_version; raises Ray's error where the registry does not confirm."""
        call = self._registry.publish.remote(topic, flat, decision)
        return int(ray.get(call, timeout=self._timeout_s))

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        """Note a rejected candidate."""
        self._get(self._registry.reject.remote(topic, decision))

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        """Note something else that was decided."""
        self._get(self._registry.note.remote(topic, decision))

    def _get(self, reference: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s or self._timeout_s)
        except Exception as error:
            logger.info("no answer (%s), going on without", type(error).__name__)
            return None
