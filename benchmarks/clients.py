"""HTTP clients that record tokens, text, pauses and outcomes; open- and closed-loop load."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from paceline.deploy.demo.prompts import TOPICS, generate

CHAT = "/v1/chat/completions"
_SEED = 4711
UNFINISHED = "not finished when the block ended"


@dataclass(slots=True)
class Reply:
    """Reply to one request.

    Attributes:
        finish: OpenAI's finish reason.
        error: None if the reply is whole.
        broken: whether the connection ended it, not an answer of the server.
        pauses_s: waits for each event of a stream, the first and one ended by an error included.
        last_at: time of the last event, before the first that of sending (``time.monotonic``).
        token_times: of the events with tokens.
        first_tokens: tokens of the first of these: those of a whole round of speculation.
        speculative: the server's metrics of speculative decoding.
        usage: of a stream that includes it.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    error: str | None = None
    broken: bool = False
    pauses_s: list[float] = field(default_factory=list)
    last_at: float | None = None
    token_times: list[float] = field(default_factory=list)
    first_tokens: int = 0
    speculative: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def answer(self) -> tuple[tuple[int, ...], str, str | None]:
        """Tokens, text and finish reason, which must be equal in two runs."""
        return tuple(self.token_ids), self.text, self.finish

    @property
    def begun(self) -> bool:
        """Whether a token has come."""
        return bool(self.token_ids)

    @property
    def first_token_at(self) -> float | None:
        """Time of the first event with tokens."""
        return self.token_times[0] if self.token_times else None

    def waited(self, now: float) -> None:
        """Add the wait that ends at ``now`` (``time.monotonic``)."""
        self.pauses_s.append(now - (now if self.last_at is None else self.last_at))


def chat(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a chat request that returns its tokens."""
    messages = [{"role": "user", "content": prompt}]
    common = {"model": "paceline", "messages": messages, "max_tokens": max_tokens}
    return common | {"return_token_ids": True} | more


def bodies(count: int, max_tokens: int, *, stream: bool = True) -> list[dict[str, Any]]:
    """Chat requests over all topics, every other one sampled with a seed, the others greedy."""
    per_topic = -(-count // len(TOPICS))
    prompts = [p for group in zip(*(generate(t, per_topic, _SEED) for t in TOPICS)) for p in group]  # noqa: B905
    common = {"stream": stream, "ignore_eos": True, "store": False}
    sampling = [{"temperature": 0}, {"temperature": 0.9}]
    return [
        chat(prompt, max_tokens, **common, **sampling[i % 2], **({"seed": i} if i % 2 else {}))
        for i, prompt in enumerate(prompts[:count])
    ]


async def ask(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> Reply:
    """Send a chat request and fill in the reply; a failure is recorded, never raised."""
    if reply.last_at is None:
        reply.last_at = time.monotonic()
    try:
        if body["stream"]:
            await _read_stream(http, body, reply)
        else:
            await _read_whole(http, body, reply)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        # an error that the server sent goes before the end of its connection
        reply.broken = isinstance(error, httpx.TransportError) and reply.error is None
        reply.error = f"{type(error).__name__}: {error}"
        reply.waited(time.monotonic())
    return reply


async def _read_stream(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> None:
    async with http.stream("POST", CHAT, json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: "):  # between events, or a comment
                continue
            now = time.monotonic()
            reply.waited(now)
            reply.last_at = now
            if line == "data: [DONE]":
                break
            before = len(reply.token_ids)
            _take(json.loads(line.removeprefix("data: ")), reply)
            if len(reply.token_ids) > before:
                reply.token_times.append(now)
                reply.first_tokens = reply.first_tokens or len(reply.token_ids)
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
    reply.usage = event.get("usage") or reply.usage
    for choice in event["choices"]:
        reply.token_ids.extend(choice.get("token_ids") or ())
        reply.text += choice["delta"].get("content") or ""
        reply.finish = choice["finish_reason"] or reply.finish


async def _read_whole(http: httpx.AsyncClient, body: dict[str, Any], reply: Reply) -> None:
    response = await http.post(CHAT, json=body)
    if response.status_code != httpx.codes.OK:
        raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
    reply.waited(time.monotonic())
    (choice,) = response.json()["choices"]
    reply.token_ids.extend(choice["token_ids"])
    reply.text, reply.finish = choice["message"]["content"], choice["finish_reason"]


class Load:
    """Many requests, ``at_once`` at a time; one whose connection breaks may be sent again.

    An error that the server answers is final.

    Args:
        url: scheme, host and port.
        requests: bodies of chat requests.
        at_once: requests in flight.
        retry_s: time for retries of a request.
        back_off_s: delay before a retry.

    Attributes:
        seen: replies of all attempts, which fill while they run.
        broken: attempts that were followed by another.
    """

    def __init__(
        self,
        url: str,
        requests: Sequence[dict[str, Any]],
        at_once: int = 1000,
        *,
        retry_s: float = 0.0,
        back_off_s: float = 0.2,
    ) -> None:
        self.seen: list[Reply] = []
        self.broken = self._answered = 0
        self._url, self._requests, self._at_once = url, requests, at_once
        self._retry_s, self._back_off_s = retry_s, back_off_s

    @property
    def begun(self) -> int:
        """Attempts with a token."""
        return sum(reply.begun for reply in self.seen)

    @property
    def open(self) -> int:
        """Requests without a last reply yet."""
        return len(self._requests) - self._answered

    @property
    def longest_pause_s(self) -> float:
        """The longest wait of a request for its next event, over all its attempts."""
        return max((pause for reply in self.seen for pause in reply.pauses_s), default=0.0)

    async def run(self) -> list[Reply]:
        """Send them all; return the last reply to each, in order."""
        gate = asyncio.Semaphore(self._at_once)
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as http:

            async def one(body: dict[str, Any]) -> Reply:
                async with gate:
                    reply = await self._one(http, body)
                self._answered += 1
                return reply

            return list(await asyncio.gather(*map(one, self._requests)))

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
        deadline, last_at = time.monotonic() + self._retry_s, None
        while True:
            reply = Reply(last_at=last_at)
            self.seen.append(reply)
            await ask(http, body, reply)
            if not reply.broken or time.monotonic() >= deadline:
                return reply
            self.broken += 1
            last_at = reply.last_at
            await asyncio.sleep(self._back_off_s)


async def until(check: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
    """Wait for a condition; return the seconds it took.

    Raises:
        TimeoutError: names ``what``.
    """
    began = time.monotonic()
    while not await asyncio.to_thread(check):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        await asyncio.sleep(0.02)
    return time.monotonic() - began


@dataclass(frozen=True, slots=True)
class Planned:
    """Request that is due ``due_s`` after the block's begin."""

    due_s: float
    topic: str
    prompt_tokens: int
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request; seconds count from when it was due.

    Attributes:
        lag_s: delay of the client's sending.
        ttft_s: time to the first token; None if there was none.
        tpot_s: time per token after those of the first event; None if there were none.
        pause_s: longest wait between two events.
        answer: hash of the tokens.
        rounds: in which a draft proposed, ``first_accepted`` of which accepted its first token.
        suffix_drafted: tokens proposed by suffixes, in rounds of their own.
        error: None if the answer is whole.
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
    suffix_drafted: int
    suffix_accepted: int
    draft: str | None
    routed: str | None
    weight_version: int | None
    error: str | None


def outcome_of(planned: Planned, sent_s: float, began: float, reply: Reply) -> Outcome:
    """Outcome of a reply sent ``sent_s`` after the block's begin (``time.monotonic``)."""
    due = began + planned.due_s
    first, last = reply.first_token_at, reply.last_at
    count = len(reply.token_ids)
    further = count - reply.first_tokens
    stats = reply.speculative
    rounds = int(stats.get("num_spec_steps", 0))
    histogram = stats.get("acceptance_histogram") or [rounds]
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
        drafted=int(stats.get("num_draft_tokens", 0)),
        accepted=int(stats.get("num_accepted_draft_tokens", 0)),
        first_accepted=rounds - int(histogram[0]) if rounds else 0,
        suffix_drafted=int(stats.get("num_suffix_tokens", 0)),
        suffix_accepted=int(stats.get("num_accepted_suffix_tokens", 0)),
        draft=stats.get("draft"),
        routed=stats.get("topic"),
        weight_version=stats.get("weight_version"),
        error=reply.error,
    )


async def replay(
    url: str, planned: Sequence[Planned], drain_s: float
) -> tuple[float, list[Outcome]]:
    """Send every request when it is due (open loop); requests open ``drain_s`` after the last fail.

    Returns:
        The begin (``time.monotonic``), and an outcome per request, in order.
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
    return began, [
        outcome_of(plan, sent_s, began, reply)
        for plan, sent_s, reply in zip(planned, sent, replies, strict=True)
    ]
