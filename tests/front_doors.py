"""The ingress over a target in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from paceline.actors.engine.request import GenerationChunk, GenerationRequest
from paceline.actors.engine.target import TargetReplica
from paceline.cluster.learning_actors import LearningActors
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.deploy.api.ingress import Ingress, IngressSettings

CONTEXT = 4096  # of the targets whose answers shall take long


class Stream:
    """A stream as Serve's handles give it: an iterator with a way to cancel it."""

    def __init__(self, chunks: AsyncIterator[GenerationChunk]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> GenerationChunk:
        return await anext(self._chunks)

    def cancel(self) -> None:
        """Closing, which cancellation has done already where there is no wire in between."""


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class Handle:
    """Serve's handle of a target that runs here."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.describe = Method(target.describe)
        self.generate = Method(self._generate)

    def _generate(self, request: GenerationRequest, whole: bool) -> Stream:
        return Stream(self._target.generate(request, whole))

    def options(self, **_: object) -> Handle:
        return self


class SchedulerHandle:
    """The handle of a real trainer scheduler that runs here; ``told`` counts announcements."""

    def __init__(self) -> None:
        self.scheduler, self.told = TrainerScheduler(), 0
        self.announce_request, self.snapshot = Method(self._announce), Method(self._snapshot)

    def _announce(self) -> None:
        self.told += 1
        self.scheduler.announce_request()

    async def _snapshot(self) -> dict[str, Any]:
        return self.scheduler.snapshot()


def application(
    target: Any,
    folder: Path,
    *,
    front: type[Ingress] = Ingress,
    scheduler: Any = None,
    **more: Any,
) -> FastAPI:
    """A front door over a target and its folder, with a trainer scheduler and further settings."""
    settings = IngressSettings("m", str(folder), None, ("general",), 1.0, 0.5, 8, **more)
    nobody = LearningActors(shards={}, registry=None, scheduler=scheduler, trainer=None)
    return front(settings, Handle(target), None, nobody).__serve_build_asgi_app__()


def front_door(target: Any, folder: Path, **more: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application(target, folder, **more))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def freed(target: TargetReplica) -> None:
    """Return once nothing runs."""
    deadline = time.monotonic() + 5
    while (facts := await target.describe())["running"] or facts["waiting"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
