"""Data-parallel training: rank 0 in the trainer, and a worker process for each further rank.

Every :class:`Worker` holds the same distillers and runs the calls of rank 0 in their order. What
is collective (building an engine, which copies rank 0's weights to all; a micro-step; gathering the
optimizer's state) rank 0 calls on the workers first and then runs itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from paceline.actors.training.deepspeed_setup import (
    LOOPBACK,
    forbid_compiling,
    free_port,
    prepare_environment,
)
from paceline.actors.training.distiller import Distiller, MicroStep
from paceline.actors.training.optimizer_state import OptimizerState
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.shares import Share, split_share
from paceline.actors.weights.eagle import Draft

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A process' place in the group.

    Attributes:
        rank: from 0.
        ranks: number of them.
        address: of rank 0's node.
        port: on it, of the rendezvous.
        device: that each rank trains on, ``auto`` is the GPU if there is one.
    """

    rank: int
    ranks: int
    address: str
    port: int
    device: str = "auto"


def join_group(spec: WorkerSpec, timeout_s: float) -> None:
    """Join the process group; returns when all ranks have.

    Every rank sees one device, its own, so that its local rank is 0.

    Args:
        spec: of this process.
        timeout_s: longest wait for the others, here and in every collective after.

    Raises:
        RuntimeError: another rank did not join, or this process is in a group already.
    """
    os.environ |= {
        "RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": spec.address,
        "MASTER_PORT": str(spec.port),
    }
    if spec.address == LOOPBACK:
        # else gloo listens where the host's name points to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    prepare_environment(spec.device)
    forbid_compiling()
    import deepspeed
    import torch

    if torch.distributed.is_initialized():
        raise RuntimeError("this process is in a group already")
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s), verbose=False)


def leave_group() -> None:
    """Leave the process group, whatever its state, so that this process can join another one."""
    import deepspeed
    import torch

    if not torch.distributed.is_initialized():
        return
    try:
        deepspeed.comm.destroy_process_group()
    finally:
        # DeepSpeed takes its handle for the group; without one it makes both again.
        deepspeed.comm.comm.cdb = None


logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class WorkerGroupError(RuntimeError):
    """A rank has died or failed: nothing that the ranks held together can be used any more."""


class WorkerHandle(Protocol):
    """A worker's handle at rank 0."""

    def call(
        self, method: Callable[Concatenate[Worker, P], None], *arguments: P.args, **named: P.kwargs
    ) -> None:
        """Call a method of the Worker; returns at once, calls keep their order."""

    def stop(self) -> None:
        """Kill its process."""


class Worker:
    """A further rank.

    If a call raises, the process must end: only then do the others, which wait for it in the same
    step, raise too. Leaving the group is not enough, engines keep its connections open.
    """

    def __init__(self, spec: WorkerSpec, timeout_s: float) -> None:
        """Join the group; returns when all ranks have."""
        join_group(spec, timeout_s)
        self._distillers: dict[str, Distiller] = {}

    def build(self, topic: str, path: str, settings: DistillerSettings) -> None:
        """Build the topic's engine, again if there is one; rank 0's parameters come with it."""
        if topic in self._distillers:
            self._distillers[topic].reset(None)
        else:
            self._distillers[topic] = Distiller(path, settings)

    def scale_rate(self, topic: str, share: float) -> None:
        """Scale the learning rate."""
        self._distillers[topic].scale_rate(share)

    def refresh_rate(self, topic: str) -> None:
        """Restart the learning-rate schedule."""
        self._distillers[topic].refresh_rate()

    def set_vocabulary(self, topic: str, ids: Tensor) -> None:
        """Replace an EAGLE draft's tokens."""
        self._distillers[topic].set_vocabulary(ids)

    def learn(self, topic: str, share: Share) -> None:
        """Run a micro-step on this rank's share."""
        self._distillers[topic].learn(share)

    def optimizer_state(self, topic: str) -> None:
        """Take part in gathering the optimizer's state."""
        self._distillers[topic].live_state()

    def resume(self, topic: str, state: OptimizerState) -> None:
        """Load this rank's part."""
        self._distillers[topic].resume(state)


class WorkerGroup:
    """Rank 0's side: starts the workers when first needed, and again after :meth:`stop`."""

    def __init__(
        self,
        ranks: int,
        start_worker: Callable[[WorkerSpec], WorkerHandle],
        address: str,
        timeout_s: float,
        device: str = "auto",
    ) -> None:
        """Start no process yet.

        Args:
            ranks: number of ranks, rank 0 included.
            start_worker: starts a process with a Worker.
            address: of this node, for the rendezvous.
            timeout_s: longest wait for the other ranks, at the start and in every step.
            device: of every rank's training.
        """
        self.ranks = ranks
        self._start_worker = start_worker
        self._address = address
        self._timeout_s = timeout_s
        self._device = device
        self._handles: list[WorkerHandle] = []

    def start(self) -> None:
        """Start the workers and join the group; does nothing if they are running.

        Raises:
            WorkerGroupError: not all joined in time.
        """
        if self._handles:
            return
        port = free_port(self._address)
        where = self._address, port, self._device
        specs = [WorkerSpec(rank, self.ranks, *where) for rank in range(self.ranks)]
        try:
            self._handles = [self._start_worker(spec) for spec in specs[1:]]
            join_group(specs[0], self._timeout_s)
        except Exception as error:
            self.stop()
            raise WorkerGroupError(f"the ranks did not come together: {error}") from error
        logger.info("%d ranks train together", self.ranks)

    def broadcast(
        self, method: Callable[Concatenate[Worker, P], None], *arguments: P.args, **named: P.kwargs
    ) -> None:
        """Call a method of every worker with the same arguments."""
        for handle in self._handles:
            handle.call(method, *arguments, **named)

    def scatter(
        self, method: Callable[[Worker, str, T], None], topic: str, parts: Sequence[T]
    ) -> None:
        """Call a method of every worker with its own part."""
        for handle, part in zip(self._handles, parts, strict=True):
            handle.call(method, topic, part)

    def stop(self) -> None:
        """Stop the workers and leave the group; distillers made under it cannot be used after."""
        handles, self._handles = self._handles, []
        for handle in handles:
            try:
                handle.stop()
            except Exception:
                logger.info("a worker could not be stopped", exc_info=True)
        leave_group()


class DistributedDistiller(Distiller):
    """Rank 0's distiller; the workers' run along."""

    def __init__(
        self, topic: str, path: str, settings: DistillerSettings, workers: WorkerGroup
    ) -> None:
        """See Distiller.

        Raises:
            WorkerGroupError: another rank failed.
        """
        self._topic = topic
        self._workers = workers
        workers.start()
        super().__init__(path, settings)

    def _build(self, draft: Draft) -> None:
        self._workers.broadcast(Worker.build, self._topic, self.path, self.settings)
        self._collective(super()._build, draft)
        if (ids := self.vocabulary) is not None:  # a buffer, which does not come with the weights
            self._workers.broadcast(Worker.set_vocabulary, self._topic, ids.cpu())

    def scale_rate(self, share: float) -> None:
        """Scale every rank's learning rate."""
        super().scale_rate(share)
        self._workers.broadcast(Worker.scale_rate, self._topic, share)

    def refresh_rate(self) -> None:
        """Restart every rank's learning-rate schedule."""
        super().refresh_rate()
        self._workers.broadcast(Worker.refresh_rate, self._topic)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Replace every rank's tokens of an EAGLE draft."""
        super().set_vocabulary(ids)
        self._workers.broadcast(Worker.set_vocabulary, self._topic, ids)

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        """Learn from a batch together, some of its records each.

        ``before_step`` is never called: the others wait for rank 0 in the middle of the step.

        Raises:
            WorkerGroupError: another rank failed.
        """
        del before_step
        mine, *others = split_share(share, self._workers.ranks)
        self._workers.scatter(Worker.learn, self._topic, others)
        return self._collective(super().learn, mine)

    def live_state(self) -> OptimizerState:
        """Gather copies of the ranks' parts.

        Raises:
            WorkerGroupError: another rank failed.
        """
        self._workers.broadcast(Worker.optimizer_state, self._topic)
        return self._collective(super().live_state)

    def resume(self, state: OptimizerState) -> None:
        """Resume every rank with its part; see Distiller."""
        super().resume(state)  # first: the workers must not load what does not fit
        self._workers.broadcast(Worker.resume, self._topic, state)

    def _collective(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return call(*arguments, **named)
        except Exception as error:
            raise WorkerGroupError(f"another rank failed: {error}") from error
