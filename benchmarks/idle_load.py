"""Open-loop traffic with gaps: Poisson arrivals, the same for both sides of a pair of blocks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx
from clients import Reply, ask
from online.open_loop import Outcome, Planned, outcome_of

from paceline.deploy.demo.prompts import MAKERS, TOPICS

_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Block:
    """What ran under one setting: requests, and what became of each, in the order of arrival.

    Times of ``span`` are of ``time.monotonic``: from the first request to the last event.
    """

    pair: int
    side: str
    began: float
    outcomes: tuple[Outcome, ...]

    @property
    def busy(self) -> list[tuple[float, float]]:
        """When each request was under way, from its sending to its last event."""
        return [
            (self.began + o.due_s + o.lag_s, self.began + o.due_s + o.e2e_s) for o in self.outcomes
        ]

    @property
    def span(self) -> tuple[float, float]:
        """From the first sending to the last event."""
        return min(sent for sent, _ in self.busy), max(end for _, end in self.busy)


def plan(count: int, rate: float, max_tokens: int, seed: int, draft: str = "auto") -> list[Planned]:
    """Chat requests over all topics, every other one sampled with a seed, the others greedy.

    Args:
        count: how many.
        rate: of arrivals per second, exponential gaps between them.
        max_tokens: of an answer at most.
        seed: of arrivals and prompts.
        draft: ``speculative.draft`` of every request.
    """
    rng, planned, due_s = random.Random(seed), [], 0.0
    for index in range(count):
        topic = TOPICS[rng.randrange(len(TOPICS))]
        sampling = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        body = {
            "model": "paceline",
            "messages": [{"role": "user", "content": MAKERS[topic](rng)}],
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            "speculative": {"draft": draft},
            **sampling,
        }
        planned.append(Planned(due_s, topic, 0, body))
        due_s += rng.expovariate(rate)
    return planned


async def run(url: str, planned: Sequence[Planned], pair: int, side: str) -> Block:
    """Send every request when it is due, whatever has come back; returns when all have ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE_S, limits=limits) as http:
        began = time.monotonic()

        async def one(request: Planned) -> Outcome:
            await asyncio.sleep(max(0.0, began + request.due_s - time.monotonic()))
            sent_s = time.monotonic() - began
            reply = await ask(http, request.body, Reply())
            return outcome_of(request, sent_s, began, reply)

        outcomes = await asyncio.gather(*map(one, planned))
    return Block(pair, side, began, tuple(outcomes))
