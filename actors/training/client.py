"""What a trainer sees of the rest: shards, registry, board. Each may be dead at any time."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import ray

from paceline.actors.replay.record import RecordError, ReplayRecord, decode
from paceline.actors.training.permits import Note, Tenant, Turn
from paceline.actors.training.progress import Ousted
from paceline.actors.training.topic_schedule import Want, best
from paceline.actors.weights.flat_weights import FlatWeights
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

    def notes(self) -> dict[str, Note]:
        """What other trainers said last of the topics that they had last."""

    def take(self, wanted: Sequence[Want]) -> Turn:
        """A topic of these for a round, which :meth:`give_back` ends."""

    def may_train(self) -> bool:
        """Leave for one micro-step; raises Ousted where the round is to end at once."""

    def rest(self) -> None:
        """No micro-step for a while: others may have the processor."""

    def give_back(self, note: Note | None) -> None:
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
        board: Any,
        timeout_s: float,
        tenant: Tenant | None = None,
    ) -> None:
        """Take actor handles.

        Args:
            shards: topic to ReplayShard.
            registry: WeightRegistry.
            board: LoadBoard; None always gives leave.
            timeout_s: longest wait per call.
            tenant: who trains; None is somebody who computes now and then, and takes no topic.
        """
        self._shards = dict(shards)
        self._registry = registry
        self._board = board
        self._timeout_s = timeout_s
        self._tenant = tenant
        self._life = uuid.uuid4().hex  # a trainer that comes back is another to the board
        self._topics = TopicsView(etag="")

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

    def notes(self) -> dict[str, Note]:
        """What other trainers said; nothing where there are none."""
        if self._board is None or self._tenant is None or self._tenant.alone:
            return {}
        told = self._get(self._board.notes.remote(self._tenant.name)) or {}
        return {topic: Note(**note) for topic, note in told.items()}

    def take(self, wanted: Sequence[Want]) -> Turn:
        """A topic of these; none where the board does not answer."""
        if self._board is None or self._tenant is None:
            return Turn(best(wanted))
        gains = {want.topic: want.gain for want in wanted}
        who = self._tenant
        answer = self._get(self._board.ask.remote(who.name, self._life, who.fractions, gains))
        if answer is None:
            return Turn(None)
        # Whatever a board that was restarted believes: beside one that is alone nobody had it.
        return Turn(answer["topic"], answer["anew"] and not who.alone)

    def may_train(self) -> bool:
        """Leave for one micro-step; a board that does not answer gives none."""
        if self._board is None:
            return True
        if self._tenant is None:
            return bool(self._get(self._board.may_train.remote(), 1.0))
        verdict = self._get(self._board.check.remote(self._tenant.name, self._life), 1.0)
        if verdict == "stop":
            raise Ousted
        return bool(verdict == "go")

    def rest(self) -> None:
        """Tell the board; nothing waits for it."""
        self._tell("rest")

    def give_back(self, note: Note | None) -> None:
        """Tell the board; what it does not hear of, the next question tells it."""
        self._tell("release", None if note is None else asdict(note))

    def _tell(self, method: str, *arguments: Any) -> None:
        if self._board is None or self._tenant is None:
            return
        try:
            getattr(self._board, method).remote(self._tenant.name, self._life, *arguments)
        except Exception as error:
            logger.info("the board was not told (%s)", type(error).__name__)

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
        asked = self._registry.wait_topics.remote(self._topics.etag, 0.0)
        view: TopicsView | None = self._get(asked)
        if view is not None:
            self._topics = view
            for topic, parts in view.parts.items():
                self._shards.setdefault(topic, parts.shard)
        return {topic.name: topic.like for topic in self._topics.topics}

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The stable weight_version and its weights."""
        newest = self._get(self._registry.newest.remote(topic))
        if newest is None:
            return None
        version, references = newest
        if not references:
            return version, None
        flat = self._get(references[0])
        return None if flat is None else (version, flat)

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
