"""Open-loop clients over real HTTP: a request is sent when it is due, whatever has come back."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from clients import Reply, ask

UNFINISHED = "not finished when the block ended"


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that is due ``due_s`` after the block's begin."""

    due_s: float
    topic: str
    prompt_tokens: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request; seconds are from when it was due, not from when it was sent.

    ``lag_s`` is how late the client sent it. ``ttft_s`` and ``tpot_s`` (the time per output
    token after those that came first, which with speculation may be several) are None where there
    were no such tokens. ``pause_s`` is the
    longest wait between two events. ``first_accepted`` counts the speculative rounds whose first
    token was accepted. ``error`` is None where the answer came to its end.
    """

    due_s: float
    topic: str
    prompt_tokens: int
    lag_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    pause_s: float
    tokens: int
    answer: str
    rounds: int
    drafted: int
    accepted: int
    first_accepted: int
    draft: str | None
    routed: str | None
    weight_version: int | None
    error: str | None


def outcome_of(planned: Planned, sent_s: float, began: float, reply: Reply) -> Outcome:
    """A reply measured against its plan.

    Args:
        planned: the request.
        sent_s: when it was sent, seconds after the block's begin.
        began: the block's begin, of ``time.monotonic``.
        reply: as ``ask`` left it.
    """
    due = began + planned.due_s
    first, last = reply.first_token_at, reply.last_at
    count = len(reply.token_ids)
    further = count - reply.first_tokens
    spoken = reply.speculative
    rounds = int(spoken.get("num_spec_steps", 0))
    histogram = spoken.get("acceptance_histogram") or [rounds]
    ids = ",".join(map(str, reply.token_ids)).encode()
    return Outcome(
        due_s=planned.due_s,
        topic=planned.topic,
        prompt_tokens=planned.prompt_tokens,
        lag_s=sent_s - planned.due_s,
        ttft_s=None if first is None else first - due,
        tpot_s=None if first is None or last is None or further < 1 else (last - first) / further,
        e2e_s=(due if last is None else last) - due,
        pause_s=max(reply.pauses_s[1:], default=0.0),
        tokens=count,
        answer=hashlib.sha256(ids).hexdigest()[:16],
        rounds=rounds,
        drafted=int(spoken.get("num_draft_tokens", 0)),
        accepted=int(spoken.get("num_accepted_draft_tokens", 0)),
        first_accepted=rounds - int(histogram[0]) if rounds else 0,
        draft=spoken.get("draft"),
        routed=spoken.get("topic"),
        weight_version=spoken.get("weight_version"),
        error=reply.error,
    )


async def replay(url: str, planned: Sequence[Planned], drain_s: float) -> list[Outcome]:
    """Send every request when it is due; returns when all have ended.

    Args:
        url: of the server.
        planned: in any order; ``store`` and all else is in their bodies.
        drain_s: how long the answers may take after the last request was due. What is open
            then is given up, and counted as that.

    Returns:
        an outcome per request, in order.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    replies = [Reply() for _ in planned]
    sent = [0.0] * len(planned)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        began = time.monotonic()

        async def one(index: int) -> None:
            await asyncio.sleep(max(0.0, began + planned[index].due_s - time.monotonic()))
            sent[index] = time.monotonic() - began
            await ask(http, planned[index].body, replies[index])

        tasks = [asyncio.create_task(one(index)) for index in range(len(planned))]
        until = max((p.due_s for p in planned), default=0.0) + drain_s
        _, late = await asyncio.wait(tasks, timeout=until - (time.monotonic() - began))
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
    for task, reply in zip(tasks, replies, strict=True):
        if task in late:
            reply.error = reply.error or UNFINISHED
        elif (error := task.exception()) is not None:
            reply.error = f"{type(error).__name__}: {error}"
    return [
        outcome_of(plan, sent_s, began, reply)
        for plan, sent_s, reply in zip(planned, sent, replies, strict=True)
    ]


async def one_by_one(url: str, planned: Sequence[Planned]) -> list[Outcome]:
    """Each request when the one before has ended: what an idle server needs."""
    outcomes = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        for plan in planned:
            began, reply = time.monotonic(), Reply()
            await ask(http, plan.body, reply)
            outcomes.append(outcome_of(plan, plan.due_s, began - plan.due_s, reply))
    return outcomes
