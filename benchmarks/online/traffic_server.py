"""What traffic asks of a server besides its requests: to come up, to answer all, and how it is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from clients import Load

from online.open_loop import Planned

AT_ONCE = 16  # target.max_num_seqs
_UP_S = 120.0  # that a trainer may take to come up


async def closed(url: str, requests: Sequence[Planned]) -> list[float]:
    """When every answer had come, seconds; as many are under way as the target decodes at once."""
    began = time.monotonic()
    replies = await Load(url, [request.body for request in requests], AT_ONCE).run()
    if wrong := [reply.error for reply in replies if reply.error is not None]:
        raise RuntimeError(f"{len(wrong)} requests failed, the first: {wrong[0]}")
    return [reply.last_at - began for reply in replies if reply.last_at is not None]


def status(url: str) -> dict[str, Any]:
    return dict(httpx.get(f"{url}/v1/paceline/status", timeout=60).json())


def await_trainer(url: str) -> None:
    """Let the trainer come up before the clock runs: a server that goes on has had it for long.

    Raises:
        RuntimeError: it has not come up in two minutes.
    """
    until = time.monotonic() + _UP_S
    while not is_up(status(url).get("trainer") or {}):
        if time.monotonic() > until:
            raise RuntimeError(f"no trainer after {_UP_S:.0f} s")
        time.sleep(0.5)


def is_up(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer has loaded what it needs, as far as it has anything to teach.

    Args:
        trainer: its part of the server's status; empty where it does not answer.
    """
    return trainer.get("micro_steps", 0) > 0 or trainer.get("state") == "no new records"
