"""The ingress over a target, in this process, without Ray."""

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
from paceline.cluster.scheduler.leases import SchedulerStatus
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.deploy.api.ingress import Ingress, IngressSettings

CONTEXT_LENGTH = 4096  # of targets with long responses


class Stream:
    """The response stream of a Serve handle: an iterator that can be cancelled."""

    def __init__(self, chunks: AsyncIterator[GenerationChunk]) -> None:
        self._chunks = chunks

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> GenerationChunk:
        return await anext(self._chunks)

    def cancel(self) -> None:
        """Nothing to do: cancellation has closed the iterator already."""


class Method:
    def __init__(self, call: Any) -> None:
        self.remote = call


class Broadcast:
    """A call of Serve to all replicas, of which there are none."""

    async def _fetch_replica_results_async(self) -> list[Any]:
        return []


class Handle:
    """A Serve handle of a target in this process."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self.status = Method(target.status)
        self.generate = Method(self._generate)

    def _generate(self, request: GenerationRequest, whole: bool) -> Stream:
        return Stream(self._target.generate(request, whole))

    def broadcast(self, *_: object) -> Broadcast:
        return Broadcast()

    def options(self, **_: object) -> Handle:
        return self


class DeadRegistry:
    """A handle of a weight registry that does not answer."""

    def __getattr__(self, name: str) -> Method:
        def call(*_: object) -> Any:
            raise ConnectionError(name)

        return Method(call)


class SchedulerHandle:
    """A handle of a trainer scheduler in this process; ``announced`` counts requests."""

    def __init__(self) -> None:
        self.scheduler, self.announced = TrainerScheduler(), 0
        self.announce_request, self.status = Method(self._announce), Method(self._status)
        self.drain = Method(self._drain)

    def _announce(self) -> None:
        self.announced += 1
        self.scheduler.announce_request()

    async def _drain(self, on: bool) -> None:
        self.scheduler.drain(on)

    async def _status(self) -> SchedulerStatus:
        return self.scheduler.status()


def nothing_learns(scheduler: Any = None, **more: Any) -> LearningActors:
    """The actors of a server without training, whose registry does not answer."""
    scheduler = SchedulerHandle() if scheduler is None else scheduler
    registry: Any = DeadRegistry()
    return LearningActors({}, registry, scheduler, None, **more)


def application(
    target: Any,
    folder: Path,
    *,
    ingress_class: type[Ingress] = Ingress,
    scheduler: Any = None,
    **more: Any,
) -> FastAPI:
    """The ingress application over a target and its folder."""
    settings = IngressSettings("m", str(folder), None, ("general",), 1.0, 0.5, 8, **more)
    actors = nothing_learns(scheduler)
    return ingress_class(settings, Handle(target), None, actors).api()


def ingress_client(target: Any, folder: Path, **more: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(application(target, folder, **more))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def wait_until_idle(target: TargetReplica) -> None:
    """Wait until no request runs or waits."""
    deadline = time.monotonic() + 5
    while (status := await target.status()).running or status.waiting:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)
