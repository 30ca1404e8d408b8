"""The thread that imagines, in the first trainer's process: it asks the target, and waits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from paceline.actors.decoding.request import (
    FINISH_ERROR,
    GenerationChunk,
    GenerationRequest,
    joined,
)
from paceline.actors.imagination.composer import Composer, Said
from paceline.actors.imagination.settings import ImaginationSettings

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class ServedTarget:
    """The target's deployment as a voice."""

    def __init__(self, handle: Callable[[], Any], at_once: int) -> None:
        """Nothing is asked yet.

        Args:
            handle: gives the deployment's handle; raises where it is not deployed yet.
            at_once: requests under way at most.
        """
        self._find = handle
        self._handle: Any = None
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="paceline-imagined")

    def say(self, requests: Sequence[GenerationRequest]) -> list[Said]:
        """Ask for all at once; any error of Ray's or of the replica's raises."""
        if self._handle is None:
            self._handle = self._find().options(stream=True)
        return list(self._threads.map(self._one, requests))

    def _one(self, request: GenerationRequest) -> Said:
        chunks: list[GenerationChunk] = list(self._handle.generate.remote(request, True))
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
        self._voice = ServedTarget(target, settings.at_once)
        self._stop = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="paceline-imaginer", daemon=True)
        self._thread.start()

    def figures(self) -> dict[str, int]:
        """Counts since the start, see Composer, and ``failures``."""
        return dict(self._composer.counts) | {"failures": self._failures}

    def stop(self) -> None:
        """End the thread after what is under way."""
        self._stop.set()
        self._thread.join(self._settings.timeout_s)

    def _run(self) -> None:
        from paceline.actors.training.trainer import lower_priority

        lower_priority()
        from paceline.actors.training.world import RayWorld

        shards, registry, board = self._handles
        world = RayWorld(shards, registry, board, self._settings.timeout_s)
        while not self._stop.is_set():
            try:
                world.added()
                if not self._composer.tick(world, self._voice):
                    self._stop.wait(self._settings.refresh_s)
            except Exception as error:
                self._failures += 1
                logger.info("nothing was imagined (%s), trying again", error)
                self._stop.wait(_RETRY_S)
