"""The trainer's client of shards, registry and scheduler; each of them may be dead at any time."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, TypeVar

import ray

from paceline.actors.handles import Reference
from paceline.actors.replay.buffer import ShardStats, Split
from paceline.actors.replay.record import RecordError, ReplayRecord, decode
from paceline.actors.replay.shard import ShardHandle
from paceline.actors.training.permits import (
    IDLE_WAIT_S,
    Assignment,
    Permit,
    PermitHandle,
    TopicProgress,
    TrainerIdentity,
)
from paceline.actors.training.progress import LeaseRevoked
from paceline.actors.training.topic_schedule import TopicPriority, select_topic
from paceline.actors.weights.flat_weights import FlatWeights
from paceline.actors.weights.history import Decision
from paceline.actors.weights.subscriber import RegistryHandle, RegistrySubscriber
from paceline.actors.weights.topics import TopicsView
from paceline.actors.weights.versions import TopicStatus

logger = logging.getLogger(__name__)

# The registry gives way to serving, and a publication that the trainer has given up on would be
# taken for another trainer's.
_PUBLISH_TIMEOUT_S = 60.0

T = TypeVar("T")


class TrainerClient(Protocol):
    """Shards, registry and scheduler. Only ``publish`` raises when they do not answer."""

    def stats(self) -> dict[str, ShardStats]:
        """Statistics of the shards that answered, by topic."""

    def sample(self, topic: str, count: int, split: Split) -> Iterable[ReplayRecord]:
        """At most ``count`` records of a topic, decoded one by one."""

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        """Send a topic's shard the latest losses by request_id, without waiting."""

    def topic_progress(self) -> dict[str, TopicProgress]:
        """Progress of other trainers on the topics that they had last."""

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        """Acquire one of these topics for a round, until :meth:`release_topic`."""

    def acquire_permit(self) -> bool:
        """Acquire a permit for one micro-step; raises LeaseRevoked if the round is over."""

    def until_idle(self) -> None:
        """Wait for a moment at which a permit may be had, not for long."""

    def release_permit(self) -> None:
        """Release the permit: no micro-step follows for a while."""

    def release_topic(self, progress: TopicProgress | None) -> None:
        """End the round; ``progress`` is None if nothing was trained."""

    def versions(self) -> dict[str, int] | None:
        """Stable weight_version by topic; None if the registry does not answer."""

    def topic_status(self) -> dict[str, TopicStatus] | None:
        """See WeightRegistry.topic_status; None if the registry does not answer."""

    def added_topics(self) -> dict[str, str]:
        """Added topics, each with the expert that it started as a copy of."""

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The stable weight_version and its weights; None if the registry does not answer.

        Weights of None are the initial ones: at version 0, or after files were lost.
        """

    def publish(self, topic: str, flat: FlatWeights, decision: Decision, base: int) -> int:
        """Publish weights that go on from version ``base``; returns the new weight_version.

        Raises:
            CandidateRefusedError: the registry takes no candidate of the topic at the moment, or
                none that goes on from ``base``.
            ValueError: the registry refuses these weights.
            Exception: it is not known whether they are published.
        """

    def reject(self, topic: str, decision: Decision) -> None:
        """Record a rejected candidate."""

    def note(self, topic: str, decision: Decision) -> None:
        """Record another decision, by its ``outcome``."""


@contextmanager
def _best_effort() -> Iterator[None]:
    """Log what the call of a dead actor raises."""
    try:
        yield
    except Exception as error:
        logger.info("an actor was not called (%s)", type(error).__name__)


class RayTrainerClient:
    """The client over Ray: every call bounded in time, every failure survived."""

    def __init__(
        self,
        shards: Mapping[str, ShardHandle],
        registry: RegistryHandle,
        scheduler: PermitHandle | None,
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

    def stats(self) -> dict[str, ShardStats]:
        asked = {topic: shard.stats.remote() for topic, shard in self._shards.items()}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=self._timeout_s)
        answers = {topic: self._get(reference, 0.1) for topic, reference in asked.items()}
        return {topic: answer for topic, answer in answers.items() if answer is not None}

    def sample(self, topic: str, count: int, split: Split) -> Iterator[ReplayRecord]:
        shard = self._shards.get(topic)
        if shard is None or count <= 0:
            return
        for data in self._get(shard.sample.remote(count, split)) or []:
            try:
                yield decode(data)
            except RecordError as error:
                logger.warning("%s: %s", topic, error)

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        shard = self._shards.get(topic)
        if shard is None or not losses:
            return
        with _best_effort():
            shard.update_losses.remote(losses)

    def topic_progress(self) -> dict[str, TopicProgress]:
        if self._scheduler is None or self._identity is None or self._identity.sole:
            return {}
        return self._get(self._scheduler.topic_progress.remote(self._identity.name)) or {}

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        """Acquire one of these topics; none if the scheduler does not answer."""
        if self._scheduler is None or self._identity is None:
            return Assignment(select_topic(wanted))
        gains = {want.topic: want.gain for want in wanted}
        answer = self._get(
            self._scheduler.acquire_topic.remote(self._identity, self._incarnation, gains)
        )
        if answer is None:
            return Assignment(None)
        # A scheduler that was restarted calls every topic stale.
        return replace(answer, stale=answer.stale and not self._identity.sole)

    def acquire_permit(self) -> bool:
        """Acquire a permit for one micro-step; none if the scheduler does not answer."""
        if self._scheduler is None:
            return True
        if self._identity is None:
            return bool(self._get(self._scheduler.may_train.remote(), 1.0))
        call = self._scheduler.acquire_permit.remote(self._identity.name, self._incarnation)
        permit = self._get(call, 1.0)
        if permit is Permit.UNASSIGNED:
            raise LeaseRevoked
        return permit is Permit.GRANTED

    def until_idle(self) -> None:
        """Wait until serving is idle, for two seconds at most; not at all without a scheduler."""
        if self._scheduler is not None:
            self._get(self._scheduler.until_idle.remote(IDLE_WAIT_S), 2.0 * IDLE_WAIT_S)

    def release_permit(self) -> None:
        """Release the permit. Best effort."""
        if self._scheduler is None or self._identity is None:
            return
        with _best_effort():
            self._scheduler.release_permit.remote(self._identity.name, self._incarnation)

    def release_topic(self, progress: TopicProgress | None) -> None:
        """End the round. Best effort: the next ``acquire_topic`` implies it."""
        if self._scheduler is None or self._identity is None:
            return
        with _best_effort():
            self._scheduler.release_topic.remote(self._identity.name, self._incarnation, progress)

    def versions(self) -> dict[str, int] | None:
        return self._get(self._registry.stable_versions.remote())

    def topic_status(self) -> dict[str, TopicStatus] | None:
        return self._get(self._registry.topic_status.remote())

    def added_topics(self) -> dict[str, str]:
        """Added topics by the last answer; adds the shards of new ones."""
        self._subscriber.poll(0.0, self._timeout_s)
        return {topic.name: topic.like for topic in self._topics.topics}

    def _take_topics(self, view: TopicsView) -> None:
        self._topics = view
        for topic, parts in view.actors.items():
            self._shards.setdefault(topic, parts.shard)

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        stable = self._get(self._registry.stable_weights.remote(topic))
        if stable is None or stable.reference is None:
            return None if stable is None else (stable.weight_version, None)
        flat = self._get(stable.reference)
        return None if flat is None else (stable.weight_version, flat)

    def publish(self, topic: str, flat: FlatWeights, decision: Decision, base: int) -> int:
        call = self._registry.publish.remote(topic, flat, decision, base)
        return int(ray.get(call, timeout=_PUBLISH_TIMEOUT_S))

    def reject(self, topic: str, decision: Decision) -> None:
        self._get(self._registry.reject.remote(topic, decision))

    def note(self, topic: str, decision: Decision) -> None:
        self._get(self._registry.record_decision.remote(topic, decision))

    def _get(self, reference: Reference[T], timeout_s: float | None = None) -> T | None:
        try:
            value: T = ray.get(reference, timeout=timeout_s or self._timeout_s)
            return value
        except Exception as error:
            logger.info("no answer (%s)", type(error).__name__)
            return None
