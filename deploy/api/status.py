"""Gather the status of target, drafts, trainers and replay."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from paceline.cluster.learning_actors import LearningActors
from paceline.deploy.api.actor_calls import call_or_error

_TIMEOUT_S = 2.0
_MAX_DECISIONS = 60  # some 15 minutes of continuous learning


async def gather_status(target: Any, actors: LearningActors) -> dict[str, Any]:
    """The status of every part; ``{"error": name}`` for one that does not answer."""

    def query(method: Any, *arguments: Any) -> Awaitable[Any]:
        return call_or_error(lambda: method.remote(*arguments), _TIMEOUT_S)

    queries = {"target": query(target.describe)}
    if (registry := actors.registry) is not None:
        queries["weight_versions"] = query(registry.stable_versions)
        queries["live_drafts"] = query(registry.topic_status)
        queries["decisions"] = query(registry.history, None)
    if actors.trainer is not None:
        queries["trainer"] = query(actors.trainer.status)
    if actors.scorer is not None:
        queries["routing"] = query(actors.scorer.table)
    if actors.scheduler is not None:
        queries["scheduler"] = query(actors.scheduler.status)
    if actors.supervisor is not None:
        queries["supervisor"] = query(actors.supervisor.status)
    further = {name: query(one.status) for name, one in actors.further_trainers.items()}
    shards = {topic: query(shard.stats) for topic, shard in actors.shards.items()}
    results, trainer_results, shard_results = await asyncio.gather(
        *(asyncio.gather(*group.values()) for group in (queries, further, shards))
    )
    status = dict(zip(queries, results, strict=True))
    if further:
        status["further_trainers"] = dict(zip(further, trainer_results, strict=True))
    if isinstance(status.get("decisions"), list):
        status["decisions"] = status["decisions"][-_MAX_DECISIONS:]
    status["shards"] = dict(zip(shards, shard_results, strict=True))
    return status
