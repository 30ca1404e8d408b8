"""The trainer: the actor that trains drafts while serving is idle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.actors.handles import remote_method
from paceline.actors.training.background import BackgroundLoop
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.permits import PermitHandle, TrainerIdentity
from paceline.actors.training.progress import TrainerStatus

if TYPE_CHECKING:
    from paceline.actors.replay.shard import ShardHandle
    from paceline.actors.training.settings import TrainerSettings
    from paceline.actors.training.training_loop import TrainingLoop
    from paceline.actors.training.worker_group import WorkerGroup, WorkerHandle, WorkerSpec
    from paceline.actors.weights.subscriber import RegistryHandle


class Trainer:
    """Runs the training loop in a thread of its own, from construction to death.

    Killed at any moment and restarted, it goes on from the registry's weights, the shards' records
    and the optimizer checkpoint of the last publication.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        shards: Mapping[str, ShardHandle],
        registry: RegistryHandle,
        scheduler: PermitHandle | None,
        start_worker: Callable[[WorkerSpec], WorkerHandle] | None = None,
        address: str = "127.0.0.1",
        identity: TrainerIdentity | None = None,
    ) -> None:
        """Start training.

        Args:
            settings: see TrainerSettings.
            shards: topic to actor handle of its ReplayShard.
            registry: actor handle of the WeightRegistry.
            scheduler: actor handle of the TrainerScheduler; None always grants permits.
            start_worker: starts the process of a further rank; needed with more than one.
            address: of this node, for the rendezvous of the ranks.
            identity: of this trainer; None for the only one.
        """
        # Before torch runs anything: threads that wait must not burn the server's cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        prepare_environment(settings.distiller.device)
        self._settings = settings
        self._handles = (dict(shards), registry, scheduler)
        self._start_worker, self._address = start_worker, address
        self._identity = identity or TrainerIdentity()
        self._loop: TrainingLoop | None = None
        self._workers: WorkerGroup | None = None
        self._started = time.time()
        self._background = BackgroundLoop(
            "paceline-trainer",
            self._prepare,
            settings.refresh_s,
            low_priority=settings.low_priority,
            close=self._stop_workers,
        )
        self._background.start()

    def status(self) -> TrainerStatus:
        """Progress and failures."""
        return replace(
            self._loop.progress if self._loop else TrainerStatus(),
            failures=self._background.failures,
            last_error=self._background.last_error,
            alive=self._background.alive,
            pid=os.getpid(),
            started=self._started,
        )

    def ping(self) -> bool:
        """True: the actor answers."""
        return True

    def stop(self) -> None:
        """End the thread within a micro-step; the actor stays."""
        self._background.stop(self._settings.timeout_s)

    def _prepare(self) -> Callable[[], bool]:
        # The heavy imports happen here, at low priority and outside the constructor.
        import torch

        from paceline.actors.training.client import RayTrainerClient
        from paceline.actors.training.training_loop import TrainingLoop
        from paceline.actors.training.worker_group import WorkerGroup

        own = self._settings
        torch.set_num_threads(own.num_threads)
        client = RayTrainerClient(*self._handles, own.timeout_s, self._identity)
        forbid_compiling()
        if own.ranks > 1 and self._start_worker is not None:
            self._workers = WorkerGroup(
                own.ranks,
                self._start_worker,
                self._address,
                own.group_timeout_s,
                own.distiller.device,
            )
        stopped = self._background.stopping.is_set
        self._loop = TrainingLoop(own, client, workers=self._workers, stopped=stopped)
        return self._loop.run_round

    def _stop_workers(self) -> None:
        if self._workers is not None:
            self._workers.stop()


class TrainerHandle:
    """Actor handle of a Trainer."""

    status = remote_method(Trainer.status)
    ping = remote_method(Trainer.ping)
