"""Further ranks of the trainer: an actor each, which ends with the trainer that started it.

No ``from __future__ import annotations`` here: Ray reads the annotations of what it wraps.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import ray

from paceline.actors.training.trainer import lower_priority
from paceline.actors.training.worker_group import Place

logger = logging.getLogger(__name__)


class RankActor:
    """A process with a Member; its constructor returns when all ranks have met."""

    def __init__(self, place: Place, num_threads: int, timeout_s: float) -> None:
        """Lower the priority, then join.

        Args:
            place: in the group.
            num_threads: of torch.
            timeout_s: longest wait for the other ranks.
        """
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        lower_priority()
        import torch

        from paceline.actors.training.worker_group import Member

        torch.set_num_threads(num_threads)
        self._member = Member(place, timeout_s)

    def call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Call a method of the Member; what raises ends the process, see there."""
        try:
            getattr(self._member, method)(*arguments)
        except Exception:
            logger.exception("a rank failed and ends")
            os._exit(1)


class RankHand:
    """A RankActor as rank 0 sees it."""

    def __init__(self, actor: Any) -> None:
        """Take the actor's handle."""
        self._actor = actor

    def tell(self, method: str, *arguments: Any) -> None:
        """Call and go on; what goes wrong there ends the group, which is how rank 0 learns."""
        self._actor.call.remote(method, arguments)

    def dismiss(self) -> None:
        """Kill it."""
        ray.kill(self._actor, no_restart=True)


def hiring(num_threads: int, timeout_s: float, num_gpus: float) -> Callable[[Place], RankHand]:
    """What starts a rank in its place, for a Crew.

    Args:
        num_threads: of torch, per rank.
        timeout_s: longest wait for the other ranks.
        num_gpus: of each; NCCL wants a whole device per rank.
    """
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "max_task_retries": 0}

    def hire(place: Place) -> RankHand:
        actor = ray.remote(**options)(RankActor).remote(place, num_threads, timeout_s)
        return RankHand(actor)

    return hire


def node_address() -> str:
    """This node's, at which other nodes' processes find it."""
    return str(ray.util.get_node_ip_address())
