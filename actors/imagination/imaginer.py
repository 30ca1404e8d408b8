"""The thread that imagines, in the first trainer's process: it asks the target, and waits."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from paceline.actors.decoding.request import (
    FINISH_ERROR,
    FINISH_YIELDED,
    GenerationChunk,
    GenerationRequest,
    joined,
)
from paceline.actors.imagination.composer import Composer, Said
from paceline.actors.imagination.settings import ImaginationSettings

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_LEAVE_EVERY_S = 0.1
_LONGEST_S = 120.0


class ServedTarget:
    """The target's deployment as a voice.

    Serve's handles may want to live in a running event loop: they have one of their own here.
    """

    def __init__(self, handle: Callable[[], Any], leave: Callable[[], bool]) -> None:
        """Nothing is asked yet.

        Args:
            handle: gives the deployment's handle; raises where it is not deployed yet.
            leave: whether serving is idle; asked again and again while anything is under way.
        """
        self._find, self._leave = handle, leave
        self._handle: Any = None
        self._events = asyncio.new_event_loop()
        name = "paceline-imagined"
        threading.Thread(target=self._events.run_forever, name=name, daemon=True).start()

    def say(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        """Ask for all at once, and drop all where leave is withdrawn, on whichever replica.

        Raises:
            TimeoutError: it takes longer than any answer should.
            Exception: any error of Ray's or of the replica's.
        """
        answers = asyncio.run_coroutine_threadsafe(self._all(requests), self._events)
        deadline = time.monotonic() + _LONGEST_S
        while time.monotonic() < deadline:
            done, _ = futures.wait([answers], _LEAVE_EVERY_S)
            if done:
                return answers.result()
            if not self._leave():
                answers.cancel()
                return [Said((), FINISH_YIELDED)] * len(requests)
        answers.cancel()
        raise TimeoutError("the target does not answer")

    async def _all(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        if self._handle is None:
            self._handle = self._find().options(stream=True)
        async with asyncio.TaskGroup() as group:  # one that fails takes the others along
            tasks = [group.create_task(self._one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _one(self, request: GenerationRequest) -> Said:
        response = self._handle.generate.remote(request, True)
        try:
            chunks: list[GenerationChunk] = [chunk async for chunk in response]
        finally:
            response.cancel()  # of one that has ended it does nothing
        whole = joined(chunks) if chunks else GenerationChunk("", (), FINISH_ERROR)
        return Said(whole.token_ids, whole.finish_reason or FINISH_ERROR)


class Imaginer:
    """Imagines in a thread of its own, from construction to the process' end."""

    def __init__(
        self,
        settings: ImaginationSettings,
        shards: Mapping[str, Any],
        registry: Any,
        board: Any,
        target: Callable[[], Any],
    ) -> None:
        """Start the thread.

        Args:
            settings: see ImaginationSettings.
            shards: topic to actor handle of its ReplayShard.
            registry: actor handle of the WeightRegistry, which knows of added topics.
            board: actor handle of the LoadBoard; None always gives leave.
            target: see ServedTarget.
        """
        self._settings = settings
        self._handles = (dict(shards), registry, board)
        self._composer = Composer(settings)
        self._target = target
        self._failures = 0
        self._error: str | None = None
        threading.Thread(target=self._run, name="paceline-imaginer", daemon=True).start()

    def figures(self) -> dict[str, Any]:
        """Counts since the start, see Composer, ``failures``, and the last one's ``last_error``."""
        own = {"failures": self._failures, "last_error": self._error}
        return dict(self._composer.counts) | own

    def _run(self) -> None:
        from paceline.actors.training.trainer import lower_priority

        lower_priority()
        from paceline.actors.training.world import RayWorld

        shards, registry, board = self._handles
        world = RayWorld(shards, registry, board, self._settings.timeout_s)
        voice = ServedTarget(self._target, world.may_train)
        while True:
            try:
                world.added()
                if not self._composer.tick(world, voice):
                    time.sleep(self._settings.refresh_s)
            except Exception as error:
                self._failures += 1
                self._error = f"{type(error).__name__}: {error}"
                logger.info("nothing was imagined, trying again", exc_info=True)
                time.sleep(_RETRY_S)
