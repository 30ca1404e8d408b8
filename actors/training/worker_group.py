"""Several ranks: rank 0 tells the others what to do, and all step together.

Rank 0 lives in the trainer. Every further rank is a process with a :class:`Member`, which holds
the same distillers and does what it is told, one thing after the other. Whatever needs all ranks
at once (building an engine, which copies rank 0's weights to all; a micro-step; gathering the
optimizer's state) is told to the members first and then done by rank 0 itself.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller, MicroStep
from paceline.actors.training.optimizer_state import OptimizerState
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.shares import Share, split

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """A process' place in the group.

    Attributes:
        rank: from 0.
        ranks: how many there are.
        address: of rank 0's node.
        port: on it, where the ranks find each other.
        device: that each of them trains on, ``auto`` is the GPU where there is one.
    """

    rank: int
    ranks: int
    address: str
    port: int
    device: str = "auto"


def join(place: Place, timeout_s: float) -> None:
    """Become a rank; returns when all are there.

    Every rank sees one device, its own, so that its local rank is 0.

    Args:
        place: of this process.
        timeout_s: longest wait for the others, here and in every collective after.

    Raises:
        RuntimeError: the others did not come, or it is in a group already.
    """
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.ranks),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    if place.address == _LOOPBACK:
        # else gloo listens where the host's name points to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    prepare_environment(place.device)
    forbid_compiling()
    import deepspeed
    import torch

    if torch.distributed.is_initialized():
        raise RuntimeError("this process is in a group already")
    deepspeed.init_distributed(timeout=timedelta(seconds=timeout_s), verbose=False)


def leave() -> None:
    """End this process' part, whatever state it is in, so that it can join another group."""
    import deepspeed
    import torch

    if not torch.distributed.is_initialized():
        return
    try:
        deepspeed.comm.destroy_process_group()
    finally:
        # DeepSpeed takes its handle for the group; without one it makes both anew.
        deepspeed.comm.comm.cdb = None


def free_port(address: str = _LOOPBACK) -> int:
    """A port that is free on an address of this host."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


logger = logging.getLogger(__name__)

T = TypeVar("T")


class CrewLost(RuntimeError):  # noqa: N818 - what was lost is a crew
    """A rank has died or failed: nothing that the ranks held together can be used any more."""


class Hand(Protocol):
    """A further rank, as rank 0 sees it."""

    def tell(self, method: str, *arguments: Any) -> None:
        """Have it call a method of its Member; returns at once, calls keep their order."""

    def dismiss(self) -> None:
        """End its process, whatever it is doing."""


class Member:
    """What a further rank does.

    Where any of it raises, its process has to end: only then do the others, which wait for it in
    the same step, raise too. Leaving the group is not enough, engines keep its connections open.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        """Join the group; returns when all ranks are there."""
        join(place, timeout_s)
        self._distillers: dict[str, Distiller] = {}

    def build(self, topic: str, path: str, settings: DistillerSettings) -> None:
        """Make the topic's engine, anew where there is one; rank 0's weights come with it."""
        if topic in self._distillers:
            self._distillers[topic].reset(None)
        else:
            self._distillers[topic] = Distiller(path, settings)

    def scale_rate(self, topic: str, share: float) -> None:
        """Learn at this share of the rate."""
        self._distillers[topic].scale_rate(share)

    def refresh_rate(self, topic: str) -> None:
        """Hold the full rate again."""
        self._distillers[topic].refresh_rate()

    def learn(self, topic: str, share: Share) -> None:
        """Learn from a share."""
        self._distillers[topic].learn(share)

    def optimizer_state(self, topic: str) -> None:
        """Hand out this rank's part."""
        self._distillers[topic].live_state()

    def resume(self, topic: str, state: OptimizerState) -> None:
        """Take this rank's part."""
        self._distillers[topic].resume(state)


class Crew:
    """Rank 0's side: hires the members when first needed, and again after :meth:`disband`."""

    def __init__(
        self,
        ranks: int,
        hire: Callable[[Place], Hand],
        address: str,
        timeout_s: float,
        device: str = "auto",
    ) -> None:
        """Nobody is hired yet.

        Args:
            ranks: all of them, rank 0 counted in.
            hire: starts a process with a Member in that place.
            address: of this node, at which the others find rank 0.
            timeout_s: longest wait for the others, at the start and in every step.
            device: of every rank's training.
        """
        self.ranks = ranks
        self._hire = hire
        self._address = address
        self._timeout_s = timeout_s
        self._device = device
        self._hands: list[Hand] = []

    def gather(self) -> None:
        """Have all ranks there; does nothing where they are.

        Raises:
            CrewLost: not all came in time.
        """
        if self._hands:
            return
        port = free_port(self._address)
        where = self._address, port, self._device
        places = [Place(rank, self.ranks, *where) for rank in range(self.ranks)]
        try:
            self._hands = [self._hire(place) for place in places[1:]]
            join(places[0], self._timeout_s)
        except Exception as error:
            self.disband()
            raise CrewLost(f"the ranks did not come together: {error}") from error
        logger.info("%d ranks train together", self.ranks)

    def tell(self, method: str, *arguments: Any) -> None:
        """Have every member call a method with the same arguments."""
        for hand in self._hands:
            hand.tell(method, *arguments)

    def deal(self, method: str, topic: str, parts: Sequence[Any]) -> None:
        """Have every member call a method with a part of its own."""
        for hand, part in zip(self._hands, parts, strict=True):
            hand.tell(method, topic, part)

    def disband(self) -> None:
        """End the members and the group; the distillers made under it are of no use after."""
        hands, self._hands = self._hands, []
        for hand in hands:
            try:
                hand.dismiss()
            except Exception:
                logger.info("a rank could not be dismissed", exc_info=True)
        leave()


class SharedDistiller(Distiller):
    """Rank 0's distiller: what it does, the members do with it."""

    def __init__(self, topic: str, path: str, settings: DistillerSettings, crew: Crew) -> None:
        """See Distiller.

        Raises:
            CrewLost: another rank failed.
        """
        self._topic = topic
        self._crew = crew
        crew.gather()
        super().__init__(path, settings)

    def _build(self, draft: Any) -> None:
        self._crew.tell("build", self._topic, self.path, self.settings)
        self._together(super()._build, draft)

    def scale_rate(self, share: float) -> None:
        """Have every rank learn at this share of the rate."""
        super().scale_rate(share)
        self._crew.tell("scale_rate", self._topic, share)

    def refresh_rate(self) -> None:
        """Have every rank hold the full rate again."""
        super().refresh_rate()
        self._crew.tell("refresh_rate", self._topic)

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        """Learn from a batch together, some of its records each.

        ``before_step`` is never called: the others wait for rank 0 in the middle of the step.

        Raises:
            CrewLost: another rank failed.
        """
        del before_step
        mine, *others = split(share, self._crew.ranks)
        self._crew.deal("learn", self._topic, others)
        return self._together(super().learn, mine)

    def live_state(self) -> OptimizerState:
        """Gather the ranks' parts, which are copies then.

        Raises:
            CrewLost: another rank failed.
        """
        self._crew.tell("optimizer_state", self._topic)
        return self._together(super().live_state)

    def resume(self, state: OptimizerState) -> None:
        """Go on, every rank with its part; see Distiller."""
        super().resume(state)  # first: where it does not fit, the members must not hear of it
        self._crew.tell("resume", self._topic, state)

    def _together(self, call: Callable[..., T], *arguments: Any) -> T:
        try:
            return call(*arguments)
        except Exception as error:
            raise CrewLost(f"another rank failed: {error}") from error
