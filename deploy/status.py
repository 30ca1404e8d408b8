"""What the parts say of themselves, gathered for one look at the whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 2.0
_DECISIONS = 20


@dataclass(frozen=True, slots=True)
class LearningActors:
    """Handles of the actors that learn; each may be dead at any moment, or None.

    ``scorer`` compares experts, and lives in the trainer's process.
    """

    shards: Mapping[str, Any]
    registry: Any
    board: Any
    trainer: Any
    scorer: Any = None


async def _ask(answer: Awaitable[Any]) -> Any:
    """An actor's answer, or ``{"error": why}``: status never fails over a dead part."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await answer
    except Exception as error:
        return {"error": type(error).__name__}


async def gather_status(target: Any, actors: LearningActors) -> dict[str, Any]:
    """Target, weight versions, last gate decisions, trainer, routing, load board and shards."""
    asked: dict[str, Awaitable[Any]] = {"target": target.describe.remote()}
    if actors.registry is not None:
        asked["weight_versions"] = actors.registry.current.remote()
        asked["live_drafts"] = actors.registry.live.remote()
        asked["decisions"] = actors.registry.history.remote(None)
    if actors.trainer is not None:
        asked["trainer"] = actors.trainer.status.remote()
    if actors.scorer is not None:
        asked["routing"] = actors.scorer.table.remote()
    if actors.board is not None:
        asked["board"] = actors.board.snapshot.remote()
    shards = {topic: shard.stats.remote() for topic, shard in actors.shards.items()}
    answers = await asyncio.gather(*(_ask(a) for a in [*asked.values(), *shards.values()]))
    status = dict(zip(asked, answers, strict=False))
    if isinstance(status.get("decisions"), list):
        status["decisions"] = status["decisions"][-_DECISIONS:]
    status["shards"] = dict(zip(shards, answers[len(asked) :], strict=True))
    return status
