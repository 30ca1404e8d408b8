"""The trainer: the actor that learns while serving is idle."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.permits import TrainerIdentity

if TYPE_CHECKING:
    from paceline.actors.training.settings import TrainerSettings
    from paceline.actors.training.training_loop import Rounds
    from paceline.actors.training.worker_group import WorkerGroup, WorkerHandle, WorkerSpec

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Trainer:
    """Runs rounds in a thread of its own, from construction to death.

    It keeps nothing that matters: killed at any moment and restarted, it goes on from the
    registry's weights, the shards' records and the optimizer's state at the last publication.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        shards: Mapping[str, Any],
        registry: Any,
        scheduler: Any,
        start_worker: Callable[[WorkerSpec], WorkerHandle] | None = None,
        address: str = "127.0.0.1",
        identity: TrainerIdentity | None = None,
    ) -> None:
        """Start learning.

        Args:
            settings: see TrainerSettings.
            shards: topic to actor handle of its ReplayShard.
            registry: actor handle of the WeightRegistry.
            scheduler: actor handle of the TrainerScheduler; None always grants permits.
            start_worker: starts the process of a further rank; needed with more than one.
            address: of this node, at which further ranks find this one.
            identity: of this trainer; None for the only one.
        """
        # Before torch runs anything: threads that wait must not burn the server's cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        prepare_environment(settings.distiller.device)
        self._settings = settings
        self._handles = (dict(shards), registry, scheduler)
        self._start_worker, self._address = start_worker, address
        self._identity = identity or TrainerIdentity()
        self._stop = threading.Event()
        self._rounds: Rounds | None = None
        self._failures = 0
        self._error: str | None = None
        self._started = time.time()
        self._thread = threading.Thread(target=self._run, name="paceline-trainer", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """State, topic, steps, counts of rounds, decisions and failures; no figure is nan.

        ``last_error`` is the last failure in words, None before the first.
        """
        rounds = self._rounds
        progress = asdict(rounds.progress) if rounds else {"state": "starting", "topic": None}
        return progress | {
            "failures": self._failures,
            "last_error": self._error,
            "alive": self._thread.is_alive(),
            "pid": os.getpid(),
            "started": self._started,
        }

    def drifts(self) -> dict[str, dict[str, Any]]:
        """Per topic how its live acceptance moves, see Outlook.figures; empty at the start."""
        return self._rounds.drifts() if self._rounds else {}

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def stop(self) -> None:
        """End the thread within a micro-step; the actor stays."""
        self._stop.set()
        self._thread.join(self._settings.timeout_s)

    def _run(self) -> None:
        if self._settings.low_priority:
            lower_priority()
        # The heavy imports happen here, at low priority and outside the constructor.
        import torch

        from paceline.actors.training.client import RayWorld
        from paceline.actors.training.training_loop import Rounds

        torch.set_num_threads(self._settings.num_threads)
        shards, registry, scheduler = self._handles
        world = RayWorld(shards, registry, scheduler, self._settings.timeout_s, self._identity)
        forbid_compiling()
        workers = self._worker_group()
        self._rounds = Rounds(self._settings, world, workers=workers, stopped=self._stop.is_set)
        try:
            self._learn(self._rounds)
        finally:
            if workers is not None:
                workers.stop()

    def _worker_group(self) -> WorkerGroup | None:
        if self._settings.ranks == 1 or self._start_worker is None:
            return None
        from paceline.actors.training.worker_group import WorkerGroup

        own = self._settings
        how = own.group_timeout_s, own.distiller.device
        return WorkerGroup(own.ranks, self._start_worker, self._address, *how)

    def _learn(self, rounds: Rounds) -> None:
        from paceline.actors.training.progress import Stopped

        while not self._stop.is_set():
            try:
                if not rounds.tick():
                    self._stop.wait(self._settings.refresh_s)
            except Stopped:
                return
            except Exception as error:
                self._failures += 1
                self._error = f"{type(error).__name__}: {error}"
                logger.warning("a round failed, going on", exc_info=True)
                self._stop.wait(_RETRY_S)


def lower_priority() -> None:
    """Give way to everything else: SCHED_IDLE for this thread where allowed, else nice 19.

    On Linux both are of the thread and of those that it starts from now on.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):
        logger.info("no SCHED_IDLE here, nice 19 instead")
    try:
        os.setpriority(os.PRIO_PROCESS, 0, 19)
    except OSError:
        logger.info("could not lower the priority", exc_info=True)
