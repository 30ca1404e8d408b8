"""The ingress over a target in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from paceline.actors.decoding.request import GenerationChunk, GenerationRequest
from paceline.deploy.ingress import Ingress, IngressSettings
from paceline.deploy.status import LearningActors


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


def front_door(target: Any, folder: Path, **more: Any) -> httpx.AsyncClient:
    settings = IngressSettings("m", str(folder), None, ("general",), 1.0, 0.5, 8, **more)
    nobody = LearningActors(shards={}, registry=None, board=None, trainer=None)
    api = Ingress(settings, Handle(target), None, nobody).__serve_build_asgi_app__()
    return httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1")
