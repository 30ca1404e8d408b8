"""Clients over real HTTP that note all they see: tokens, text, pauses, how it ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.deploy.demo.prompts import TOPICS, generate

CHAT = "/v1/chat/completions"
_SEED = 4711


@dataclass(slots=True)
class Reply:
    """What one request brought.

    ``error`` is None where it came to its end, and ``broken`` True where the connection, not the
    server's word, ended it; ``finish`` is OpenAI's reason. ``pauses_s`` are the waits for each
    event of a stream, the first one's included, and the one that an error ended. ``first_tokens``
    came with the first event that had any: a whole round of speculation. ``last_at`` is
    when the last event came, or before the first when the request was sent: given, the first
    wait is counted from there.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    broken: bool = False
    pauses_s: list[float] = field(default_factory=list)
    last_at: float | None = None
    first_token_at: float | None = None
    first_tokens: int = 0
    speculative: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> tuple[tuple[int, ...], str, str | None]:
        """What must be the same in two runs."""
        return tuple(self.token_ids), self.text, self.finish

    @property
    def begun(self) -> bool:
        """True where some of the answer is there."""
        return bool(self.token_ids)

    def waited(self, now: float) -> None:
        """Note the wait that is over at ``now``, a time of ``time.monotonic``."""
        self.pauses_s.append(now - (now if self.last_at is None else self.last_at))


def bodies(count: int, max_tokens: int, *, stream: bool = True) -> list[dict[str, Any]]:
    """Chat requests over all topics, every other one sampled with a seed, the others greedy."""
    per_topic = -(-count // len(TOPICS))
    prompts = [p for group in zip(*(generate(t, per_topic, _SEED) for t in TOPICS)) for p in group]  # noqa: B905
    return [
        {
            "model": "paceline",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "stream": stream,
            "return_token_ids": True,
            "ignore_eos": True,
            "store": False,
            **({"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0}),
        }
        for index, prompt in enumerate(prompts[:count])
    ]


async def ask(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> Reply:
    """Send a chat request and fill in what comes; a failure is noted, never raised."""
    if reply.last_at is None:
        reply.last_at = time.monotonic()
    try:
        if body["stream"]:
            await _read_stream(http, body, reply)
        else:
            await _read_whole(http, body, reply)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        # a connection that ends after the server has said what is wrong adds nothing
        reply.broken = isinstance(error, httpx.TransportError) and reply.error is None
        reply.error = f"{type(error).__name__}: {error}"
        reply.waited(time.monotonic())
    return reply


def refusal(status: int, text: str) -> Exception:
    """What an HTTP status says: an answer of the server's, or that a connection ended.

    The front door puts every error into OpenAI's shape. A bare 5xx is the proxy's word for an
    ingress replica that died before its answer had begun.

    Args:
        status: not 200.
        text: the body.
    """
    try:
        ours = "error" in json.loads(text)
    except (ValueError, TypeError):
        ours = False
    said = f"HTTP {status}: {text[:200]}"
    if status >= httpx.codes.INTERNAL_SERVER_ERROR and not ours:
        return httpx.RemoteProtocolError(said)
    return ValueError(said)


async def _read_stream(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> None:
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise refusal(response.status_code, (await response.aread()).decode("utf-8", "replace"))
        async for line in response.aiter_lines():
            if not line.startswith("data: "):  # between events, or a comment
                continue
            now = time.monotonic()
            reply.waited(now)
            reply.last_at = now
            if line == "data: [DONE]":
                break
            _take(json.loads(line.removeprefix("data: ")), reply)
            if reply.begun and reply.first_token_at is None:
                reply.first_token_at, reply.first_tokens = now, len(reply.token_ids)
        else:
            raise ValueError("the stream ended without [DONE]")
    if reply.finish is None:
        raise ValueError(reply.error or "the stream ended without a finish reason")


def _take(event: dict[str, Any], reply: Reply) -> None:
    if "error" in event:
        reply.error = event["error"]["message"]
        return
    if event.get("metrics") is not None:
        reply.speculative = event["metrics"]["speculative_decoding"]
    for choice in event["choices"]:
        reply.token_ids.extend(choice.get("token_ids") or ())
        reply.text += choice["delta"].get("content") or ""
        reply.finish = choice["finish_reason"] or reply.finish


async def _read_whole(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> None:
    response = await http.post(CHAT, json=body)
    if response.status_code != httpx.codes.OK:
        raise refusal(response.status_code, response.text)
    reply.waited(time.monotonic())
    (choice,) = response.json()["choices"]
    reply.token_ids.extend(choice["token_ids"])
    reply.text, reply.finish = choice["message"]["content"], choice["finish_reason"]


class Load:
    """Many requests at once; look at :attr:`replies` while they run."""

    def __init__(self, url: str, requests: Sequence[dict[str, Any]], at_once: int = 1000) -> None:
        """Prepare requests to the server at ``url``, so many of them under way at a time."""
        self.replies = [Reply() for _ in requests]
        self._url = url
        self._requests = requests
        self._at_once = at_once
        self._done = False

    @property
    def begun(self) -> int:
        """Requests of which something has come."""
        return sum(reply.begun for reply in self.replies)

    @property
    def open(self) -> int:
        """Requests that have not come to their end."""
        return sum(reply.finish is None and reply.error is None for reply in self.replies)

    async def run(self) -> list[Reply]:
        """Send them all; returns when the last one has ended."""
        gate = asyncio.Semaphore(self._at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as http:

            async def one(body: dict[str, Any], reply: Reply) -> None:
                async with gate:
                    await ask(http, body, reply)

            await asyncio.gather(*map(one, self._requests, self.replies))
        return self.replies


class RetryingLoad:
    """Many requests, some at a time; one whose connection breaks is sent again, as it was.

    An answer that the server gives, an HTTP status in OpenAI's shape or an error in a stream, is
    the answer; a bare 5xx is a broken connection, see :func:`refusal`.
    ``seen`` are all attempts, ``broken`` counts those that were followed by another.
    """

    def __init__(
        self,
        url: str,
        requests: Sequence[dict[str, Any]],
        at_once: int,
        patience_s: float = 300.0,
        back_off_s: float = 0.2,
    ) -> None:
        """Prepare requests to the server at ``url``.

        Args:
            url: scheme, host and port.
            requests: bodies of chat requests.
            at_once: how many are under way at a time.
            patience_s: how long one is sent again, and how long a read may take.
            back_off_s: rest before it is.
        """
        self.seen: list[Reply] = []
        self.broken = 0
        self._url = url
        self._requests = requests
        self._at_once = at_once
        self._patience_s = patience_s
        self._back_off_s = back_off_s

    @property
    def begun(self) -> int:
        """Attempts of which something has come."""
        return sum(reply.begun for reply in self.seen)

    @property
    def longest_pause_s(self) -> float:
        """The longest wait of a request for its next event, over all its attempts."""
        return max((pause for reply in self.seen for pause in reply.pauses_s), default=0.0)

    async def run(self) -> list[Reply]:
        """The last reply to each request, in order."""
        gate = asyncio.Semaphore(self._at_once)
        limits = httpx.Limits(max_connections=None)
        timeout = self._patience_s
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as http:

            async def one(body: dict[str, Any]) -> Reply:
                async with gate:
                    return await self._one(http, body)

            return list(await asyncio.gather(*map(one, self._requests)))

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
        deadline = time.monotonic() + self._patience_s
        last_at = None
        while True:
            reply = Reply(last_at=last_at)
            self.seen.append(reply)
            await ask(http, body, reply)
            if not reply.broken or time.monotonic() > deadline:
                return reply
            self.broken += 1
            last_at = reply.last_at
            await asyncio.sleep(self._back_off_s)


async def until(check: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
    """Wait for a condition; returns how long it took, seconds.

    Raises:
        TimeoutError: names what did not come.
    """
    began = time.monotonic()
    while not await asyncio.to_thread(check):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began
