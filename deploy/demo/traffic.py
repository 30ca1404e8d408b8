"""Traffic of the demo: HTTP client, open-loop stream, closed-loop measurements, schedule."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from paceline.deploy.demo.prompts import PromptSplit
from paceline.deploy.demo.report import LiveState
from paceline.deploy.demo.stats import (
    ARMS,
    Arm,
    FailedRequest,
    RequestLog,
    RequestResult,
    Stage,
    Throughput,
)

Clock = Callable[[], float]
DRAFTS: dict[Arm, str] = {"online": "auto", "frozen": "general@0", "plain": "off"}
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A request to send; ``order`` as in :class:`RequestResult`."""

    text: str
    topic: str
    arm: Arm
    part: Stage
    order: int
    store: bool


class Client:
    """Send requests to a server and log each result.

    Args:
        http: its base URL is the server's.
        log: of results and failures.
        clock: seconds since the demo's start.
        model: name of the model.
        max_tokens: of an answer.
        num_speculative_tokens: of both drafts, so that their acceptance compares; in timed rounds
            the server chooses, as for its users.
    """

    def __init__(
        self,
        http: httpx.AsyncClient,
        log: RequestLog,
        clock: Clock,
        model: str,
        max_tokens: int = 64,
        num_speculative_tokens: int = 3,
    ) -> None:
        self._http = http
        self._log = log
        self._clock = clock
        self._model = model
        self._max_tokens = max_tokens
        self._num_speculative_tokens = num_speculative_tokens

    async def send(self, request: PromptRequest) -> RequestResult | None:
        """Send a request; a failure is logged and returns None."""
        sent = self._clock()
        try:
            response = await self._http.post(
                "/v1/chat/completions", json=self._body(request), timeout=_TIMEOUT_S
            )
            if response.status_code != httpx.codes.OK:
                raise ValueError(f"HTTP {response.status_code}: {response.text[:200]}")
            result = self._result(request, sent, response.json())
        except (httpx.HTTPError, ValueError, KeyError, TypeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}"
            failure = FailedRequest(request.topic, request.arm, self._clock(), reason)
            self._log.failures.append(failure)
            return None
        self._log.results.append(result)
        return result

    def _body(self, request: PromptRequest) -> dict[str, Any]:
        speculative: dict[str, Any] = {"draft": DRAFTS[request.arm]}
        if request.arm != "plain" and request.part != "timed":
            speculative["num_speculative_tokens"] = self._num_speculative_tokens
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": request.text}],
            "temperature": 0,
            "max_tokens": self._max_tokens,
            "store": request.store,
            "speculative": speculative,
        }

    def _result(self, request: PromptRequest, sent: float, answer: dict[str, Any]) -> RequestResult:
        finish = answer["choices"][0]["finish_reason"]
        if finish not in ("stop", "length"):
            raise ValueError(f"answer ended with {finish!r}")
        stats = answer["metrics"]["speculative_decoding"]
        now = self._clock()
        return RequestResult(
            order=request.order,
            topic=request.topic,
            routed=stats["topic"],
            arm=request.arm,
            part=request.part,
            at=now,
            latency=now - sent,
            drafted=stats["num_draft_tokens"],
            accepted=stats["num_accepted_draft_tokens"],
            steps=stats["num_spec_steps"],
            tokens=answer["usage"]["completion_tokens"],
            weight_version=stats["weight_version"],
            prompt=request.text,
            answer=answer["choices"][0]["message"]["content"],
        )


async def closed_loop(
    client: Client, requests: Sequence[PromptRequest], concurrency: int, clock: Clock
) -> tuple[int, float]:
    """Send all requests, ``concurrency`` of them at a time.

    Returns:
        generated tokens, and seconds from the first request to the last answer.
    """
    waiting, tokens = iter(requests), 0

    async def worker() -> None:
        nonlocal tokens
        for request in waiting:
            result = await client.send(request)
            tokens += result.tokens if result is not None else 0

    started_at = clock()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return tokens, clock() - started_at


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of the stream.

    Attributes:
        name: for display.
        topics: of its requests.
        share: of the stream's time.
    """

    name: str
    topics: tuple[str, ...]
    share: float


PHASES: tuple[Phase, ...] = (
    Phase("math + code", ("math", "code"), 0.14),
    Phase("shift: sql + shell", ("sql", "shell"), 0.60),
    Phase("mix", ("math", "code", "sql", "shell"), 0.26),
)


class PoissonArrivals:
    """Open-loop arrivals: a Poisson process that does not wait for answers.

    Args:
        send: sends a request.
        prompts: by topic.
        rng: of arrivals and topics.
        clock: seconds.
        twin_every: every n-th request of a topic gets a frozen twin.
        sleep: waits for seconds.
    """

    def __init__(
        self,
        send: Callable[[PromptRequest], Awaitable[object]],
        prompts: dict[str, Iterator[str]],
        rng: random.Random,
        clock: Clock,
        twin_every: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._send = send
        self._prompts = prompts
        self._rng = rng
        self._clock = clock
        self._twin_every = twin_every
        self._sleep = sleep
        self._order = 0
        self._seen = dict.fromkeys(prompts, 0)

    @property
    def order(self) -> int:
        """Number of requests sent, without twins."""
        return self._order

    async def run(self, topics: Sequence[str], rate: float, until: float) -> None:
        """Send ``rate`` requests per second, twins included, until time ``until``.

        Returns after the last answer.
        """
        originals = rate / (1 + 1 / self._twin_every)
        due = self._clock()
        async with asyncio.TaskGroup() as tasks:
            while True:
                due += self._rng.expovariate(originals)
                if due >= until:
                    break
                await self._sleep(max(0.0, due - self._clock()))
                for request in self._next(self._rng.choice(topics)):
                    tasks.create_task(_discard(self._send(request)))

    def _next(self, topic: str) -> Iterable[PromptRequest]:
        text, order = next(self._prompts[topic]), self._order
        self._order += 1
        self._seen[topic] += 1
        yield PromptRequest(text, topic, "online", "stream", order, store=True)
        if self._seen[topic] % self._twin_every == 0:
            yield PromptRequest(text, topic, "frozen", "stream", order, store=False)


async def _discard(answer: Awaitable[object]) -> None:
    await answer


Switch = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of the demo.

    Attributes:
        seed: of prompts and arrivals.
        seconds: of the whole demo, including the start.
        timed: prompts per topic that all three arms answer in timed rounds, one request at a time,
            before the two drafts answer all last prompts.
        timed_share: upper limit of the timed rounds' share of ``seconds``.
        concurrency: of requests that are not timed.
        load: arrival rate of the stream / measured capacity.
        max_rate: upper limit of the arrival rate, requests/s, twins included.
        twin_every: every n-th request of a topic gets a frozen twin.
        reserve_s: for shutdown and plots.
        shortest_stream_s: lower limit of the stream, even past ``seconds``.
        overtime_s: latest start of a round of the last measurement, after ``seconds``.
    """

    seed: int = 0
    seconds: float = 540.0
    timed: int = 10
    timed_share: float = 0.2
    concurrency: int = 8
    load: float = 0.5
    max_rate: float = 12.0
    twin_every: int = 4
    reserve_s: float = 10.0
    shortest_stream_s: float = 20.0
    overtime_s: float = 15.0


@dataclass(slots=True)
class DemoResult:
    """Result of the schedule.

    Attributes:
        speed: of the timed rounds.
        phases: name and first order of each phase.
        end: order after the stream's last request.
    """

    speed: Throughput = field(default_factory=Throughput)
    phases: list[tuple[str, int]] = field(default_factory=list)
    end: int = 0


async def run_schedule(
    settings: DemoSettings,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    state: LiveState,
    pause: Switch,
    resume: Switch,
) -> DemoResult:
    """Run the demo against a server: calibrate, stream with a shift, measure without training.

    Args:
        settings: see DemoSettings.
        client: sends and logs.
        prompts: by topic.
        clock: seconds since the demo's start.
        state: of the live table; updated here.
        pause: stops training and waits until it has stopped.
        resume: resumes training.
    """
    result = DemoResult()
    await pause()
    timed, needed = await _calibrate(settings, client, prompts, clock, state)
    await resume()
    end = max(settings.seconds - settings.reserve_s - needed, clock() + settings.shortest_stream_s)
    await _stream(settings, client, prompts, clock, state, end, result)
    state.phase, state.rate = "last measurement: trainer paused", None
    await pause()
    await _measure_last(settings, client, prompts, clock, timed, result.speed)
    state.phase = "done"
    return result


async def _calibrate(
    settings: DemoSettings,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    state: LiveState,
) -> tuple[int, float]:
    """Measure the capacity, on prompts of its own.

    Returns:
        prompts per topic that the last measurement can time, and its expected duration, seconds.
    """
    state.phase = "calibration"
    warm = [_warmup_request(topic, next(split.stream)) for topic, split in prompts.items()]
    await closed_loop(client, warm, 1, clock)  # the first calls load lazily
    alone = [_warmup_request(topic, next(split.stream)) for topic, split in prompts.items()]
    _, seconds_alone = await closed_loop(client, alone, 1, clock)
    many = [
        _warmup_request(topic, next(split.stream))
        for _ in range(3 * settings.concurrency // len(prompts) or 1)
        for topic, split in prompts.items()
    ]
    _, seconds = await closed_loop(client, many, settings.concurrency, clock)
    state.capacity = len(many) / seconds
    state.rate = min(settings.load * state.capacity, settings.max_rate)
    per_prompt = len(ARMS) * seconds_alone  # one per topic
    timed = max(2, min(settings.timed, int(settings.timed_share * settings.seconds / per_prompt)))
    rest = sum(len(split.last) for split in prompts.values())
    # A batch of one topic takes about half as long as these mixed ones.
    return timed, timed * per_prompt + (len(ARMS) - 1) * rest / (2 * state.capacity)


def _warmup_request(topic: str, text: str) -> PromptRequest:
    return PromptRequest(text, topic, "online", "warmup", 0, store=False)


async def _stream(
    settings: DemoSettings,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    state: LiveState,
    end: float,
    result: DemoResult,
) -> None:
    rng = random.Random(f"{settings.seed}:arrivals")
    texts = {topic: split.stream for topic, split in prompts.items()}
    stream = PoissonArrivals(client.send, texts, rng, clock, settings.twin_every)
    started_at = clock()
    done = 0.0
    for phase in _phases_of(PHASES, tuple(prompts)):
        state.phase = phase.name
        result.phases.append((phase.name, stream.order))
        done += phase.share
        await stream.run(phase.topics, state.rate or 1.0, started_at + done * (end - started_at))
    result.end = stream.order


def _phases_of(phases: Sequence[Phase], topics: Sequence[str]) -> list[Phase]:
    known = [Phase(p.name, tuple(t for t in p.topics if t in topics), p.share) for p in phases]
    return [phase for phase in known if phase.topics]


async def _measure_last(
    settings: DemoSettings,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    timed: int,
    speed: Throughput,
) -> None:
    """Measure on unseen prompts: timed rounds of all arms on some, then both drafts on all.

    The order of the arms rotates, so that a slowdown of the machine affects all of them.
    """
    latest = settings.seconds + settings.overtime_s
    rounds = [
        [
            PromptRequest(t, topic, "online", "last", i, store=False)
            for i, t in enumerate(split.last)
        ]
        for topic, split in prompts.items()
    ]
    half = max(1, timed // 2)
    halves = [requests[at : at + half] for at in (0, half) for requests in rounds]
    for number, requests in enumerate(halves):
        turn = number % len(ARMS)
        for arm in ARMS[turn:] + ARMS[:turn]:
            some = [replace(request, arm=arm, part="timed") for request in requests]
            speed.add(arm, *await closed_loop(client, some, 1, clock))
    for at in range(0, max(map(len, rounds)), settings.concurrency):
        for requests in rounds:
            if clock() > latest:
                return
            for arm in ("online", "frozen"):
                some = [replace(r, arm=arm) for r in requests[at : at + settings.concurrency]]
                await closed_loop(client, some, settings.concurrency, clock)
