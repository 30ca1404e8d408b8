"""What the demo counts: one sample per answered request, and figures over any choice of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Arm = Literal["online", "frozen", "plain"]
Part = Literal["warmup", "stream", "last"]
ARMS: tuple[Arm, ...] = ("online", "frozen", "plain")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request.

    Attributes:
        order: position among the requests of its part; a twin has its original's.
        topic: what the prompt was made for.
        routed: what the router took it for.
        arm: which draft proposed: the online one, the frozen first version, or none.
        part: of the demo: the calibration, the stream or the last measurement.
        at: seconds from the demo's start to the answer's end.
        latency: seconds from sending to the answer's end.
        drafted: tokens that the draft proposed.
        accepted: of these, tokens that the target accepted.
        steps: rounds in which anything was proposed.
        tokens: length of the answer.
        weight_version: of the draft.
    """

    order: int
    topic: str
    routed: str
    arm: Arm
    part: Part
    at: float
    latency: float
    drafted: int
    accepted: int
    steps: int
    tokens: int
    weight_version: int | None

    def as_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Failure:
    """One request that was not answered as asked."""

    topic: str
    arm: Arm
    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Figures:
    """Sums over samples; a rate over nothing is None."""

    requests: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted tokens by drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a round yields, the bonus included."""
        return 1.0 + self.accepted / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Of one answer, as its reader sees it: waiting and the network included."""
        return self.tokens / self.seconds if self.seconds else None


def figures(samples: Iterable[Sample]) -> Figures:
    """The sums over some samples."""
    chosen = list(samples)
    return Figures(
        requests=len(chosen),
        drafted=sum(s.drafted for s in chosen),
        accepted=sum(s.accepted for s in chosen),
        steps=sum(s.steps for s in chosen),
        tokens=sum(s.tokens for s in chosen),
        seconds=sum(s.latency for s in chosen),
    )


@dataclass(slots=True)
class Log:
    """Everything that happened to the demo's requests, in the order of the answers."""

    samples: list[Sample] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def select(
        self, topic: str | None = None, arm: Arm | None = None, part: Part | None = None
    ) -> Iterator[Sample]:
        """Samples of a topic, an arm and a part; None takes all."""
        for sample in self.samples:
            if (
                topic in (None, sample.topic)
                and arm in (None, sample.arm)
                and part in (None, sample.part)
            ):
                yield sample

    def recent(self, topic: str, arm: Arm, count: int) -> list[Sample]:
        """The last ``count`` samples of a topic and an arm."""
        found = [s for s in reversed(self.samples) if s.topic == topic and s.arm == arm]
        return found[:count][::-1]

    def first(self, topic: str, count: int) -> list[Sample]:
        """The topic's first ``count`` online requests of the stream, by arrival."""
        samples = self.select(topic, "online", "stream")
        return sorted(samples, key=lambda sample: sample.order)[:count]

    def count_last(self, topic: str) -> int:
        """How many prompts of a topic the last measurement got to, with both drafts."""
        arms: tuple[Arm, ...] = ("online", "frozen")
        return min(sum(1 for _ in self.select(topic, arm, "last")) for arm in arms)

    def routed_right(self) -> float | None:
        """Share of the online requests whose topic the router found."""
        hits = Counter(s.routed == s.topic for s in self.select(arm="online"))
        return hits[True] / hits.total() if hits else None


def count_words(counts: Sequence[int]) -> str:
    """``40``, or ``24 to 40`` where they differ; ``0`` for none."""
    least, most = min(counts, default=0), max(counts, default=0)
    return str(most) if least == most else f"{least} to {most}"


def rolling_acceptance(samples: Sequence[Sample], window: int) -> list[tuple[int, float]]:
    """Acceptance rate over the last ``window`` samples, at each sample's order.

    Starts when a third of the window is there, so that the first points are not noise.
    """
    points: list[tuple[int, float]] = []
    last: deque[Sample] = deque(maxlen=window)
    for sample in sorted(samples, key=lambda s: s.order):
        last.append(sample)
        rate = figures(last).acceptance_rate
        if rate is not None and 3 * len(last) >= window:
            points.append((sample.order, rate))
    return points


def swaps(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Where a newer weight version first answered: ``(order, version)``, growing."""
    found: list[tuple[int, int]] = []
    newest = 0
    for sample in sorted(samples, key=lambda s: s.order):
        version = sample.weight_version
        if version is not None and version > newest:
            newest = version
            found.append((sample.order, version))
    return found


@dataclass(slots=True)
class Stopwatch:
    """Tokens and seconds per arm over rounds that were timed as a whole."""

    tokens: Counter[Arm] = field(default_factory=Counter)
    seconds: dict[Arm, float] = field(default_factory=dict)

    def add(self, arm: Arm, tokens: int, seconds: float) -> None:
        """One timed round of an arm."""
        self.tokens[arm] += tokens
        self.seconds[arm] = self.seconds.get(arm, 0.0) + seconds

    def rate(self, arm: Arm) -> float:
        """Tokens per second; 0 where nothing was timed."""
        seconds = self.seconds.get(arm, 0.0)
        return self.tokens[arm] / seconds if seconds else 0.0
