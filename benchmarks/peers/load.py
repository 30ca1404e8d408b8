"""The client of every server: streamed completions of token ids, timed event by event."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from peers.environments import PeerError

COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class Reply:
    """Reply to one request; times are of ``time.monotonic``.

    Attributes:
        sent: when.
        events: times of the events with tokens, and of an empty last one where there is one.
        tokens: generated, by the server's count.
        first_tokens: tokens of the first event: those of a whole round of speculation.
    """

    sent: float
    events: list[float] = field(default_factory=list)
    tokens: int = 0
    first_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.events[0] - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per token after those of the first event; None if there were none."""
        further = self.tokens - self.first_tokens
        return (self.events[-1] - self.events[0]) / further if further > 0 else None


@dataclass(frozen=True, slots=True)
class Work:
    """A block of prompts and the lengths of their answers, ``at_once`` of them in flight."""

    prompts: Sequence[Sequence[int]]
    lengths: Sequence[int]
    temperature: float
    at_once: int


def tokens_of(line: str) -> int:
    """Tokens of an event; one where the server does not give them, as llama.cpp's."""
    (choice,) = json.loads(line.removeprefix("data: "))["choices"]
    ids = choice.get("token_ids")
    return 1 if ids is None else len(ids)


async def _ask(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Reply:
    reply = Reply(time.monotonic())
    async with http.stream("POST", COMPLETIONS, json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode("utf-8", "replace")
            raise PeerError(f"HTTP {response.status_code}: {text[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            if '"error"' in line and '"choices"' not in line:
                raise PeerError(line[:300])
            if '"choices":[]' not in line and '"choices": []' not in line:
                reply.events.append(time.monotonic())
                reply.first_tokens = reply.first_tokens or tokens_of(line)
            if '"usage":{' in line or '"usage": {' in line:
                usage = json.loads(line.removeprefix("data: "))["usage"]
                reply.tokens = usage["completion_tokens"]
    if not (reply.events and reply.tokens):
        raise PeerError("an answer without tokens, or without their count")
    return reply


async def _run(url: str, work: Work, extra: Mapping[str, Any]) -> list[Reply]:
    gate = asyncio.Semaphore(work.at_once)
    # A connection per request: llama.cpp's server sometimes ends one that is to be used again.
    limits, timeout = httpx.Limits(max_keepalive_connections=0), httpx.Timeout(60, read=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits) as http:

        async def one(prompt: Sequence[int], length: int) -> Reply:
            async with gate:
                body = {
                    "prompt": list(prompt),
                    "max_tokens": length,
                    "temperature": work.temperature,
                    "top_p": 1.0,
                    "top_k": 0,
                    "min_p": 0.0,
                    "ignore_eos": True,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                return await _ask(http, body | dict(extra))

        return list(await asyncio.gather(*map(one, work.prompts, work.lengths)))


def answer(url: str, work: Work, extra: Mapping[str, Any], timeout_s: float) -> list[Reply]:
    """Replies of a server to all prompts of a block, in order.

    Args:
        url: scheme, host and port.
        work: the block.
        extra: fields of the body that this server needs.
        timeout_s: of the block.

    Raises:
        PeerError: any request failed, or the block took longer.
    """
    try:
        return asyncio.run(asyncio.wait_for(_run(url, work, extra), timeout_s))
    except TimeoutError as error:
        raise PeerError(f"no whole block within {timeout_s:.0f} s") from error
    except httpx.HTTPError as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error
