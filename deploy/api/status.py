"""Gather the status of target, drafts, trainers and replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.actors.engine.target_handle import TargetHandle, TargetStatus
from paceline.actors.replay.buffer import ShardStats
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.scorer import ScorerTable
from paceline.actors.weights.history import Decision
from paceline.actors.weights.versions import TopicStatus
from paceline.cluster.learning_actors import LearningActors
from paceline.cluster.scheduler.leases import SchedulerStatus
from paceline.cluster.supervisor import SupervisorStatus
from paceline.deploy.api.actor_calls import FailedCall, call_or_error

_TIMEOUT_S = 2.0
_MAX_DECISIONS = 60  # some 15 minutes of continuous learning

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStatus:
    """The status of every part; a FailedCall for one that does not answer.

    Attributes:
        target: one replica.
        weight_versions: stable weight_version by topic.
        live_drafts: by topic.
        decisions: the last ones, oldest first.
        scheduler: of trainers.
        shards: by topic.
        trainer: the first one; None if training is off.
        further_trainers: by name.
        routing: weights of experts by measured acceptance; None if experts are not evaluated.
        supervisor: on a cluster; else None.
    """

    target: TargetStatus | FailedCall
    weight_versions: Mapping[str, int] | FailedCall
    live_drafts: Mapping[str, TopicStatus] | FailedCall
    decisions: Sequence[Decision] | FailedCall
    scheduler: SchedulerStatus | FailedCall
    shards: Mapping[str, ShardStats | FailedCall]
    trainer: TrainerStatus | FailedCall | None
    further_trainers: Mapping[str, TrainerStatus | FailedCall]
    routing: ScorerTable | FailedCall | None
    supervisor: SupervisorStatus | FailedCall | None


async def gather_status(target: TargetHandle, actors: LearningActors) -> ServerStatus:
    """Call every part at once."""
    async with asyncio.TaskGroup() as group:

        def call(method: Callable[[], Awaitable[T]]) -> asyncio.Task[T | FailedCall]:
            return group.create_task(call_or_error(method, _TIMEOUT_S))

        registry, trainer, scorer = actors.registry, actors.trainer, actors.scorer
        own = call(target.status.remote)
        versions = call(registry.stable_versions.remote)
        live = call(registry.topic_status.remote)
        history = call(registry.history.remote)
        scheduler = call(actors.scheduler.status.remote)
        first = None if trainer is None else call(trainer.status.remote)
        further = {name: call(one.status.remote) for name, one in actors.further_trainers.items()}
        table = None if scorer is None else call(scorer.table.remote)
        supervisor = None if actors.supervisor is None else call(actors.supervisor.status.remote)
        shards = {topic: call(shard.stats.remote) for topic, shard in actors.shards.items()}
    decisions = history.result()
    return ServerStatus(
        target=own.result(),
        weight_versions=versions.result(),
        live_drafts=live.result(),
        decisions=decisions if isinstance(decisions, FailedCall) else decisions[-_MAX_DECISIONS:],
        scheduler=scheduler.result(),
        shards={topic: task.result() for topic, task in shards.items()},
        trainer=None if first is None else first.result(),
        further_trainers={name: task.result() for name, task in further.items()},
        routing=None if table is None else table.result(),
        supervisor=None if supervisor is None else supervisor.result(),
    )
