"""Traffic of all kinds, until it is told to stop; what is wrong with an answer is noted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
from clients import CHAT, Reply, ask

from paceline.deploy.demo.prompts import TOPICS, endless

_CLIENTS = 3
_SHIFT_EVERY = 150  # requests of a client before it turns to other topics
_BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"model": "paceline"}),
    (CHAT, {"model": "paceline", "messages": [{"role": "user", "content": "x"}], "mood": 1}),
    (CHAT, {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"model": "paceline", "prompt": [10**8]}),
    ("/v1/nothing", {}),
)


class Mixed:
    """A few clients, each sending one request after another with short rests between.

    The rests let drafts train. ``sent`` counts by kind, ``failures`` by what went wrong.
    """

    def __init__(self, url: str, seed: int = 5) -> None:
        """Prepare for the server at ``url``."""
        self.sent: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._url = url
        self._seed = seed
        self._stopped = asyncio.Event()

    async def stop(self) -> None:
        """End after the requests that are under way."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                group.create_task(self._client(random.Random(self._seed + number), number))

    async def _client(self, rng: random.Random, number: int) -> None:
        prompts = {topic: endless(topic, self._seed + number) for topic in TOPICS}
        kinds: dict[str, Callable[..., Awaitable[None]]] = {
            "stream": self._chat,
            "whole": self._chat,
            "completions": self._completions,
            "goes away": self._goes_away,
            "bad": self._bad,
        }
        weights = (5, 3, 1, 1, 1)
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            for count in itertools.count():
                if self._stopped.is_set():
                    return
                topic = TOPICS[(count // _SHIFT_EVERY + rng.randrange(2)) % len(TOPICS)]
                (kind,) = rng.choices(list(kinds), weights)
                self.sent[kind] += 1
                try:
                    await kinds[kind](http, kind, next(prompts[topic]), rng)
                except Exception as error:  # whatever it is: half an hour must end in a report
                    self.failures[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1
                await asyncio.sleep(rng.expovariate(2.0))

    def _body(self, prompt: str, rng: random.Random) -> dict[str, Any]:
        how = rng.choice(("greedy", "seeded", "sampled"))
        sampling: dict[str, Any] = {"temperature": 0.0 if how == "greedy" else 0.9}
        if how == "seeded":
            sampling["seed"] = rng.randrange(2**31)
        return {
            "model": "paceline",
            "max_tokens": rng.choice((8, 32, 64)),
            "store": rng.random() < 0.9,
            "messages": [{"role": "user", "content": prompt}],
            "return_token_ids": True,
        } | sampling

    async def _chat(
        self, http: httpx.AsyncClient, kind: str, prompt: str, rng: random.Random
    ) -> None:
        body = self._body(prompt, rng) | {"stream": kind == "stream"}
        reply = await ask(http, body, Reply())
        if reply.error is not None:
            raise ValueError(reply.error)

    async def _completions(
        self, http: httpx.AsyncClient, _kind: str, prompt: str, rng: random.Random
    ) -> None:
        body = self._body(prompt, rng)
        del body["messages"]
        answer = await http.post("/v1/completions", json=body | {"prompt": [prompt, prompt[:20]]})
        answer.raise_for_status()
        if len(answer.json()["choices"]) != 2:
            raise ValueError("not as many choices as prompts")

    async def _goes_away(
        self, http: httpx.AsyncClient, _kind: str, prompt: str, rng: random.Random
    ) -> None:
        body = self._body(prompt, rng) | {"stream": True, "max_tokens": 400, "ignore_eos": True}
        async with http.stream("POST", CHAT, json=body) as response:
            response.raise_for_status()
            wanted = rng.randrange(1, 12)
            async for _ in response.aiter_lines():
                wanted -= 1
                if not wanted:
                    return
        raise ValueError("the stream ended before its client went away")

    async def _bad(
        self, http: httpx.AsyncClient, _kind: str, _prompt: str, rng: random.Random
    ) -> None:
        path, body = rng.choice(_BAD)
        answer = await http.post(path, json=body)
        if answer.status_code not in (400, 404):
            raise ValueError(f"HTTP {answer.status_code} to a bad request")
