"""The demo's course: calibrate, stream with a shift, measure with the trainer paused."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from paceline.deploy.demo.live import View
from paceline.deploy.demo.prompts import PromptSplit
from paceline.deploy.demo.stats import ARMS, Arm, Stopwatch
from paceline.deploy.demo.traffic import PHASES, Client, Clock, Phase, Question, Stream, closed_loop

Switch = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The demo's fixed numbers.

    Attributes:
        seed: of prompts and arrivals.
        seconds: for everything, the start included.
        timed: of each topic's last prompts, how many are answered by all three arms, one request
            at a time and against the clock; the others by the two drafts only.
        timed_share: most that the timed ones may take of ``seconds``: fewer on a slow machine.
        concurrency: questions at a time where there is no clock.
        load: arrivals in the stream by the measured capacity.
        max_rate: most requests a second, twins included, however fast the machine.
        twin_every: every so many-th request of a topic gets a frozen twin.
        reserve_s: for stopping and drawing.
        shortest_stream_s: what the stream gets on a slow machine, even past ``seconds``.
        overtime_s: how far past ``seconds`` the last measurement may begin a further round.
    """

    seed: int = 0
    seconds: float = 345.0
    timed: int = 12
    timed_share: float = 0.2
    concurrency: int = 8
    load: float = 0.4
    max_rate: float = 12.0
    twin_every: int = 3
    reserve_s: float = 10.0
    shortest_stream_s: float = 20.0
    overtime_s: float = 15.0


@dataclass(slots=True)
class Course:
    """What the demo has been through: where phases began, and the timed rounds of the end."""

    speed: Stopwatch = field(default_factory=Stopwatch)
    phases: list[tuple[str, int]] = field(default_factory=list)
    end: int = 0


async def play(
    plan: Plan,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    view: View,
    pause: Switch,
    resume: Switch,
) -> Course:
    """Run the whole demo against a server.

    Args:
        plan: see Plan.
        client: sends and logs.
        prompts: topic to its prompts.
        clock: seconds since the demo's start.
        view: what the live table shows; updated here.
        pause: stops training, and returns when it has stopped.
        resume: lets it go on.
    """
    course = Course()
    await pause()
    timed, needed = await _calibrate(plan, client, prompts, clock, view)
    await resume()
    end = max(plan.seconds - plan.reserve_s - needed, clock() + plan.shortest_stream_s)
    await _stream(plan, client, prompts, clock, view, end, course)
    view.phase, view.rate = "last measurement: trainer paused", None
    await pause()
    await _measure_last(plan, client, prompts, clock, timed, course.speed)
    view.phase = "done"
    return course


async def _calibrate(
    plan: Plan, client: Client, prompts: dict[str, PromptSplit], clock: Clock, view: View
) -> tuple[int, float]:
    """Find the capacity, on prompts that are used for nothing else.

    Returns:
        How many prompts of a topic the last measurement can time, and the seconds that it will
        take in all, by what was seen here.
    """
    view.phase = "calibration"
    warm = [_warm(topic, next(split.stream)) for topic, split in prompts.items()]
    await closed_loop(client, warm, 1, clock)  # first calls load what is loaded lazily
    alone = [_warm(topic, next(split.stream)) for topic, split in prompts.items()]
    _, seconds_alone = await closed_loop(client, alone, 1, clock)
    many = [
        _warm(topic, next(split.stream))
        for _ in range(3 * plan.concurrency // len(prompts) or 1)
        for topic, split in prompts.items()
    ]
    _, seconds = await closed_loop(client, many, plan.concurrency, clock)
    view.capacity = len(many) / seconds
    view.rate = min(plan.load * view.capacity, plan.max_rate)
    per_prompt = len(ARMS) * seconds_alone  # of each topic
    timed = max(2, min(plan.timed, int(plan.timed_share * plan.seconds / per_prompt)))
    rest = sum(max(0, len(split.last) - timed) for split in prompts.values())
    # A batch of one topic takes about half of what the mixed ones here did.
    return timed, timed * per_prompt + (len(ARMS) - 1) * rest / (2 * view.capacity)


def _warm(topic: str, text: str) -> Question:
    return Question(text, topic, "online", "warmup", 0, store=False)


async def _stream(
    plan: Plan,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    view: View,
    end: float,
    course: Course,
) -> None:
    rng = random.Random(f"{plan.seed}:arrivals")
    texts = {topic: split.stream for topic, split in prompts.items()}
    stream = Stream(client.ask, texts, rng, clock, plan.twin_every)
    began = clock()
    done = 0.0
    for phase in _of_topics(PHASES, tuple(prompts)):
        view.phase = phase.name
        course.phases.append((phase.name, stream.order))
        done += phase.share
        await stream.run(phase.topics, view.rate or 1.0, began + done * (end - began))
    course.end = stream.order


def _of_topics(phases: Sequence[Phase], topics: Sequence[str]) -> list[Phase]:
    known = [Phase(p.name, tuple(t for t in p.topics if t in topics), p.share) for p in phases]
    return [phase for phase in known if phase.topics]


async def _measure_last(
    plan: Plan,
    client: Client,
    prompts: dict[str, PromptSplit],
    clock: Clock,
    timed: int,
    speed: Stopwatch,
) -> None:
    """Prompts never sent before: timed rounds by every arm in turn, then the rest by the drafts.

    The order of the arms rotates, so that a machine that slows down slows all of them.
    """
    latest = plan.seconds + plan.overtime_s
    rounds = [
        [Question(t, topic, "online", "last", i, store=False) for i, t in enumerate(split.last)]
        for topic, split in prompts.items()
    ]
    half = max(1, timed // 2)
    halves = [questions[at : at + half] for at in (0, half) for questions in rounds]
    for number, questions in enumerate(halves):
        turn = number % len(ARMS)
        for arm in ARMS[turn:] + ARMS[:turn]:
            speed.add(arm, *await closed_loop(client, _for_arm(questions, arm), 1, clock))
    for at in range(2 * half, max(map(len, rounds)), plan.concurrency):
        for questions in rounds:
            if clock() > latest:
                return
            for arm in ("online", "frozen"):
                some = _for_arm(questions[at : at + plan.concurrency], arm)
                await closed_loop(client, some, plan.concurrency, clock)


def _for_arm(questions: Sequence[Question], arm: Arm) -> list[Question]:
    return [Question(q.text, q.topic, arm, q.part, q.order, q.store) for q in questions]
