"""The demo's clients: real HTTP requests, open loop for the stream, closed loop for measuring."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from paceline.deploy.demo.stats import Arm, Failure, Log, Part, Sample

Clock = Callable[[], float]
DRAFTS: dict[Arm, str] = {"online": "auto", "frozen": "general@0", "plain": "off"}
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Question:
    """A request to be sent; ``order`` as in :class:`Sample`."""

    text: str
    topic: str
    arm: Arm
    part: Part
    order: int
    store: bool


class Client:
    """Sends questions to a server and logs what became of each."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        log: Log,
        clock: Clock,
        model: str,
        max_tokens: int = 32,
        num_speculative_tokens: int = 4,
    ) -> None:
        """Use ``http`` (its base URL is the server's); ``clock`` is 0 at the demo's start."""
        self._http = http
        self._log = log
        self._clock = clock
        self._model = model
        self._max_tokens = max_tokens
        self._num_speculative_tokens = num_speculative_tokens

    async def ask(self, question: Question) -> Sample | None:
        """Send one question; None where it failed, which is logged and never raised."""
        sent = self._clock()
        try:
            response = await self._http.post(
                "/v1/chat/completions", json=self._body(question), timeout=_TIMEOUT_S
            )
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
            sample = self._sample(question, sent, response.json())
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            failure = Failure(question.topic, question.arm, self._clock(), reason)
            self._log.failures.append(failure)
            return None
        self._log.samples.append(sample)
        return sample

    def _body(self, question: Question) -> dict[str, Any]:
        speculative: dict[str, Any] = {"draft": DRAFTS[question.arm]}
        if question.arm != "plain":
            speculative["num_speculative_tokens"] = self._num_speculative_tokens
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": question.text}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "store": question.store,
            "speculative": speculative,
        }

    def _sample(self, question: Question, sent: float, answer: dict[str, Any]) -> Sample:
        finish = answer["choices"][0]["finish_reason"]
        if finish not in ("stop", "length"):
            raise ValueError(f"answer ended with {finish!r}")
        stats = answer["metrics"]["speculative_decoding"]
        now = self._clock()
        return Sample(
            order=question.order,
            topic=question.topic,
            routed=stats["topic"],
            arm=question.arm,
            part=question.part,
            at=now,
            latency=now - sent,
            drafted=stats["num_draft_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            steps=stats["num_spec_steps"],
            tokens=answer["usage"]["completion_tokens"],
            weight_version=stats["weight_version"],
        )


async def closed_loop(
    client: Client, questions: Sequence[Question], concurrency: int, clock: Clock
) -> tuple[int, float]:
    """Ask all questions, ``concurrency`` of them at a time.

    Returns:
        Tokens answered, and seconds from the first question to the last answer.
    """
    waiting, tokens = iter(questions), 0

    async def worker() -> None:
        nonlocal tokens
        for question in waiting:
            sample = await client.ask(question)
            tokens += sample.tokens if sample is not None else 0

    began = clock()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return tokens, clock() - began


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of the stream: which topics come, and for how large a share of its time."""

    name: str
    topics: tuple[str, ...]
    share: float


PHASES: tuple[Phase, ...] = (
    Phase("math + code", ("math", "code"), 0.16),
    Phase("shift: sql + shell", ("sql", "shell"), 0.56),
    Phase("mix", ("math", "code", "sql", "shell"), 0.28),
)


class Stream:
    """Open-loop arrivals: a Poisson process that does not wait for answers."""

    def __init__(
        self,
        ask: Callable[[Question], Awaitable[object]],
        prompts: dict[str, Iterator[str]],
        rng: random.Random,
        clock: Clock,
        twin_every: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Take each topic's prompts in turn; every ``twin_every``-th gets a frozen twin."""
        self._ask = ask
        self._prompts = prompts
        self._rng = rng
        self._clock = clock
        self._twin_every = twin_every
        self._sleep = sleep
        self._order = 0
        self._seen = dict.fromkeys(prompts, 0)

    @property
    def order(self) -> int:
        """How many requests have been sent, twins not counted."""
        return self._order

    async def run(self, topics: Sequence[str], rate: float, until: float) -> None:
        """Send ``rate`` requests a second, twins included, until the clock says ``until``.

        Returns when the last answer is there.
        """
        originals = rate / (1 + 1 / self._twin_every)
        due = self._clock()
        async with asyncio.TaskGroup() as tasks:
            while True:
                due += self._rng.expovariate(originals)
                if due >= until:
                    break
                await self._sleep(max(0.0, due - self._clock()))
                for question in self._next(self._rng.choice(topics)):
                    tasks.create_task(_forget(self._ask(question)))

    def _next(self, topic: str) -> Iterable[Question]:
        text, order = next(self._prompts[topic]), self._order
        self._order += 1
        self._seen[topic] += 1
        yield Question(text, topic, "online", "stream", order, store=True)
        if self._seen[topic] % self._twin_every == 0:
            yield Question(text, topic, "frozen", "stream", order, store=False)


async def _forget(answer: Awaitable[object]) -> None:
    await answer
