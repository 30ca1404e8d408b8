"""Further ranks of the trainer: an actor each, which ends with the trainer that started it.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import ray

from paceline.actors.handles import remote_method
from paceline.actors.priority import lower_process_priority

if TYPE_CHECKING:  # imports torch
    from paceline.actors.training.worker_group import Worker, WorkerSpec

logger = logging.getLogger(__name__)

P = ParamSpec("P")


class RankActor:
    """A process with a Worker; its constructor returns when all ranks have joined."""

    def __init__(self, spec: "WorkerSpec", num_threads: int, timeout_s: float) -> None:
        """Lower the priority, then join.

        Args:
            spec: its place in the group.
            num_threads: of torch.
            timeout_s: longest wait for the other ranks.
        """
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        lower_process_priority()
        import torch

        from paceline.actors.training.worker_group import Worker

        torch.set_num_threads(num_threads)
        self._worker = Worker(spec, timeout_s)

    def call(
        self, method: Callable[..., None], arguments: tuple[object, ...], named: dict[str, object]
    ) -> None:
        """Call a method of the Worker; what raises ends the process, see there."""
        try:
            method(self._worker, *arguments, **named)
        except Exception:
            logger.exception("a rank failed and ends")
            os._exit(1)


class RankActorHandle:
    """Actor handle of a RankActor."""

    call = remote_method(RankActor.call)


class RankHandle:
    """A RankActor's handle at rank 0."""

    def __init__(self, actor: "RankActorHandle") -> None:
        self._actor = actor

    def call(
        self,
        method: Callable[Concatenate["Worker", P], None],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> None:
        """Call without waiting; a failure there ends the group, which raises at rank 0."""
        self._actor.call.remote(method, arguments, dict(named))

    def stop(self) -> None:
        """Kill it."""
        ray.kill(self._actor, no_restart=True)


def worker_starter(
    num_threads: int, timeout_s: float, options: Mapping[str, Any]
) -> Callable[["WorkerSpec"], RankHandle]:
    """The ``start_worker`` of a WorkerGroup.

    Args:
        num_threads: of torch, per rank.
        timeout_s: longest wait for the other ranks.
        options: Ray's actor options of each.
    """
    rank_actor = ray.remote(**options, max_restarts=0, max_task_retries=0)(RankActor)

    def start_worker(spec: "WorkerSpec") -> RankHandle:
        return RankHandle(rank_actor.remote(spec, num_threads, timeout_s))

    return start_worker


def node_address() -> str:
    """Address of this node for other nodes."""
    return str(ray.util.get_node_ip_address())
