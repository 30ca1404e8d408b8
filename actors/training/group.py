"""The process group that the ranks of a trainer share: join it, leave it, make it anew."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

from paceline.actors.training.ops import forbid_compiling, prepare_environment

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
