"""The demo's course: measure, stream with a shift, measure again with the trainer paused."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from paceline.deploy.demo.live import View
from paceline.deploy.demo.prompts import PromptSplit
from paceline.deploy.demo.stats import ARMS, Arm, Part, Stopwatch
from paceline.deploy.demo.traffic import PHASES, Client, Clock, Phase, Question, Stream, closed_loop

Switch = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Plan:
    """The demo's fixed numbers.

    Attributes:
        seed: of prompts and arrivals.
        seconds: for everything, the start included.
        concurrency: questions at a time when measuring.
        load: arrivals in the stream by the measured capacity.
        max_rate: most requests a second, twins included, however fast the machine.
        twin_every: every so many-th request of a topic gets a frozen twin.
        chunk: questions in one timed round, all of one topic.
        reserve_s: for stopping and drawing.
        shortest_stream_s: what the stream gets on a slow machine, even past ``seconds``.
    """

    seed: int = 0
    seconds: float = 330.0
    concurrency: int = 4
    load: float = 0.4
    max_rate: float = 12.0
    twin_every: int = 3
    chunk: int = 20
    reserve_s: float = 10.0
    shortest_stream_s: float = 20.0


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
    course, topics = Course(), tuple(prompts)
    await pause()
    seconds = await _measure_first(plan, client, prompts, clock, view)
    await resume()
    # The last measurement asks the same number of questions once per arm.
    stream_end = plan.seconds - plan.reserve_s - 1.05 * len(ARMS) * seconds
    stream_end = max(stream_end, clock() + plan.shortest_stream_s)
    count = sum(len(prompts[topic].first) for topic in topics)
    view.capacity = count / seconds
    view.rate = min(plan.load * view.capacity, plan.max_rate)
    await _stream(plan, client, prompts, clock, view, stream_end, course)
    view.phase, view.rate = "last measurement: trainer paused", None
    await pause()
    await _measure_last(plan, client, prompts, clock, course.speed)
    view.phase = "done"
    return course


async def _measure_first(
    plan: Plan, client: Client, prompts: dict[str, PromptSplit], clock: Clock, view: View
) -> float:
    """Acceptance before any learning, and how long that many questions take: the capacity."""
    view.phase = "first measurement"
    texts = {topic: split.first for topic, split in prompts.items()}
    questions = [
        q for chunk in _chunks(texts, plan.chunk, "first") for q in _for_arm(chunk, "online")
    ]
    _, seconds = await closed_loop(client, questions, plan.concurrency, clock)
    return seconds


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
    speed: Stopwatch,
) -> None:
    """Every prompt by every arm in turn, in timed rounds; the arms' order rotates."""
    texts = {topic: split.last for topic, split in prompts.items()}
    for number, chunk in enumerate(_chunks(texts, plan.chunk, "last")):
        turn = number % len(ARMS)
        for arm in ARMS[turn:] + ARMS[:turn]:
            questions = _for_arm(chunk, arm)
            speed.add(arm, *await closed_loop(client, questions, plan.concurrency, clock))


def _chunks(texts: dict[str, tuple[str, ...]], size: int, part: Part) -> list[list[Question]]:
    """Rounds of ``size`` questions of one topic, topics in turn, nothing kept for replay."""
    longest = max(map(len, texts.values()))
    return [
        [
            Question(text, topic, "online", part, start + i, store=False)
            for i, text in enumerate(topic_texts[start : start + size])
        ]
        for start in range(0, longest, size)
        for topic, topic_texts in texts.items()
        if topic_texts[start : start + size]
    ]


def _for_arm(questions: Sequence[Question], arm: Arm) -> list[Question]:
    return [Question(q.text, q.topic, arm, q.part, q.order, q.store) for q in questions]
