"""What the parts say of themselves, gathered for one look at the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_S = 2.0
_DECISIONS = 60  # a quarter of an hour of them, on a server that learns all the time


@dataclass(frozen=True, slots=True)
class LearningActors:
    """Handles of the actors that learn; each may be dead at any moment, or None.

    ``scorer`` compares experts, and lives in the trainer's process. ``supervisor`` is the Serve
    handle of what keeps them all on a cluster. ``further_trainers`` are by their names.
    """

    shards: Mapping[str, Any]
    registry: Any
    scheduler: Any
    trainer: Any
    scorer: Any = None
    supervisor: Any = None
    further_trainers: Mapping[str, Any] = field(default_factory=dict)


async def _ask(actor: Any, method: str, *arguments: Any) -> Any:
    """An actor's answer, or ``{"error": why}``: status never fails over a dead part."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await getattr(actor, method).remote(*arguments)
    except Exception as error:
        return {"error": type(error).__name__}


async def gather_status(target: Any, actors: LearningActors) -> dict[str, Any]:
    """Status of target, registry, trainers, scorer, trainer scheduler and shards."""
    asked: dict[str, Awaitable[Any]] = {"target": _ask(target, "describe")}
    if actors.registry is not None:
        asked["weight_versions"] = _ask(actors.registry, "current")
        asked["live_drafts"] = _ask(actors.registry, "live")
        asked["decisions"] = _ask(actors.registry, "history", None)
    if actors.trainer is not None:
        asked["trainer"] = _ask(actors.trainer, "status")
    if actors.scorer is not None:
        asked["routing"] = _ask(actors.scorer, "table")
    if actors.scheduler is not None:
        asked["board"] = _ask(actors.scheduler, "snapshot")
    if actors.supervisor is not None:
        asked["steward"] = _ask(actors.supervisor, "describe")
    further = {name: _ask(one, "status") for name, one in actors.further_trainers.items()}
    shards = {topic: _ask(shard, "stats") for topic, shard in actors.shards.items()}
    first, others, found = await asyncio.gather(
        *(asyncio.gather(*group.values()) for group in (asked, further, shards))
    )
    status = dict(zip(asked, first, strict=True))
    if further:
        status["further_trainers"] = dict(zip(further, others, strict=True))
    if isinstance(status.get("decisions"), list):
        status["decisions"] = status["decisions"][-_DECISIONS:]
    status["shards"] = dict(zip(shards, found, strict=True))
    return status
