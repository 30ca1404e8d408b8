"""Results of the demo's requests, and their statistics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Arm = Literal["online", "frozen", "plain"]
Stage = Literal["warmup", "stream", "timed", "last"]
ARMS: tuple[Arm, ...] = ("online", "frozen", "plain")


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One answered request.

    Attributes:
        order: index among the requests of its part; a twin has its original's.
        topic: of the prompt.
        routed: topic that the router chose.
        arm: ``online`` draft, ``frozen`` first version, or ``plain`` decoding.
        part: of the demo: calibration, stream, timed rounds or last measurement.
        at: end of the answer, seconds since the demo's start.
        latency: seconds from the request to the end of the answer.
        drafted: draft tokens.
        accepted: accepted draft tokens.
        steps: rounds with drafts.
        tokens: length of the answer.
        weight_version: of the draft.
        prompt: its text.
        answer: its text.
    """

    order: int
    topic: str
    routed: str
    arm: Arm
    part: Stage
    at: float
    latency: float
    drafted: int
    accepted: int
    steps: int
    tokens: int
    weight_version: int | None
    prompt: str
    answer: str

    def as_dict(self) -> dict[str, object]:
        """The result as JSON, without texts."""
        return {k: v for k, v in asdict(self).items() if k not in ("prompt", "answer")}


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request that failed."""

    topic: str
    arm: Arm
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over results; a rate is None without data."""

    requests: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per round with drafts, including the bonus."""
        return 1.0 + self.accepted / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of an answer at the client, including waiting and network."""
        return self.tokens / self.seconds if self.seconds else None


def totals(results: Iterable[RequestResult]) -> Totals:
    """Sum results."""
    chosen = list(results)
    return Totals(
        requests=len(chosen),
        drafted=sum(s.drafted for s in chosen),
        accepted=sum(s.accepted for s in chosen),
        steps=sum(s.steps for s in chosen),
        tokens=sum(s.tokens for s in chosen),
        seconds=sum(s.latency for s in chosen),
    )


@dataclass(slots=True)
class RequestLog:
    """Results and failures, in the order of the answers."""

    results: list[RequestResult] = field(default_factory=list)
    failures: list[FailedRequest] = field(default_factory=list)

    def select(
        self, topic: str | None = None, arm: Arm | None = None, part: Stage | None = None
    ) -> Iterator[RequestResult]:
        """Results of a topic, an arm and a part; None selects all."""
        for result in self.results:
            if (
                topic in (None, result.topic)
                and arm in (None, result.arm)
                and part in (None, result.part)
            ):
                yield result

    def recent(self, topic: str, arm: Arm, count: int) -> list[RequestResult]:
        """The last ``count`` results of a topic and an arm."""
        found = [s for s in reversed(self.results) if s.topic == topic and s.arm == arm]
        return found[:count][::-1]

    def first(self, topic: str, count: int) -> list[RequestResult]:
        """The topic's first ``count`` online requests of the stream, by arrival."""
        results = self.select(topic, "online", "stream")
        return sorted(results, key=lambda result: result.order)[:count]

    def num_measured_last(self, topic: str) -> int:
        """Prompts of a topic that both drafts answered in the last measurement."""
        arms: tuple[Arm, ...] = ("online", "frozen")
        return min(sum(1 for _ in self.select(topic, arm, "last")) for arm in arms)

    def latest(self, before: float) -> RequestResult | None:
        """The last online answer until a time, seconds since the demo's start."""
        results = (s for s in reversed(self.results) if s.arm == "online" and s.at <= before)
        return next(results, None)

    def answer_changes(self) -> tuple[int, int]:
        """Unseen prompts that all arms answered, and those of them with unequal answers."""
        answers: dict[tuple[str, int], list[RequestResult]] = {}
        for result in (*self.select(part="timed"), *self.select(part="last")):
            answers.setdefault((result.topic, result.order), []).append(result)
        compared = [own for own in answers.values() if {r.arm for r in own} == set(ARMS)]
        return len(compared), sum(len({r.answer for r in own}) > 1 for own in compared)

    def routing_accuracy(self) -> float | None:
        """Share of the online requests that were routed to their topic."""
        hits = Counter(s.routed == s.topic for s in self.select(arm="online"))
        return hits[True] / hits.total() if hits else None


def range_text(counts: Sequence[int]) -> str:
    """``40``, or ``24 to 40`` if they differ; ``0`` for none."""
    least, most = min(counts, default=0), max(counts, default=0)
    return str(most) if least == most else f"{least} to {most}"


def rolling_acceptance(results: Sequence[RequestResult], window: int) -> list[tuple[int, float]]:
    """Acceptance rate over the last ``window`` results, at each result's order.

    Starts at a third of the window: fewer results are noise.
    """
    points: list[tuple[int, float]] = []
    last: deque[RequestResult] = deque(maxlen=window)
    for result in sorted(results, key=lambda s: s.order):
        last.append(result)
        rate = totals(last).acceptance_rate
        if rate is not None and 3 * len(last) >= window:
            points.append((result.order, rate))
    return points


def version_changes(results: Sequence[RequestResult]) -> list[tuple[int, int]]:
    """First answer of each newer weight version: ``(order, version)``, increasing."""
    found: list[tuple[int, int]] = []
    newest = 0
    for result in sorted(results, key=lambda s: s.order):
        version = result.weight_version
        if version is not None and version > newest:
            newest = version
            found.append((result.order, version))
    return found


@dataclass(slots=True)
class Throughput:
    """Tokens and seconds per arm over timed rounds."""

    tokens: Counter[Arm] = field(default_factory=Counter)
    seconds: dict[Arm, float] = field(default_factory=dict)

    def add(self, arm: Arm, tokens: int, seconds: float) -> None:
        """Add a timed round of an arm."""
        self.tokens[arm] += tokens
        self.seconds[arm] = self.seconds.get(arm, 0.0) + seconds

    def rate(self, arm: Arm) -> float:
        """Tokens per second; 0 without timed rounds."""
        seconds = self.seconds.get(arm, 0.0)
        return self.tokens[arm] / seconds if seconds else 0.0
