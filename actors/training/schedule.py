"""Which topic to train next: where traffic and headroom are, and something new to learn from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.actors.routing.policy import GENERAL


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """When a topic is worth a round.

    Attributes:
        min_train: records to learn from.
        min_held_out: records to be judged by.
        min_new: new records since the topic's last round, unless that round was published.
        max_rejections: rejected rounds in a row after which a topic rests.
        rest_growth: share of a resting topic's records that must be new for it to go on.
        general_share: weight of ``general``, which learns from all topics, against one topic.
        waiting_s: seconds of waiting that double a topic's weight.
        rest_s: rest of a topic that could not be taught, seconds; twice as long each time.
        longest_rest_s: at most.
    """

    min_train: int = 8
    min_held_out: int = 4
    min_new: int = 4
    max_rejections: int = 3
    rest_growth: float = 0.25
    general_share: float = 0.1
    waiting_s: float = 60.0
    rest_s: float = 1.0
    longest_rest_s: float = 60.0


@dataclass(frozen=True, slots=True)
class TopicView:
    """What the schedule knows of a topic.

    Attributes:
        name: of the topic.
        records_train: that its rounds can draw from.
        records_held_out: that judge it.
        new_records: since its last round began.
        traffic: recent requests, in any unit common to all topics.
        acceptance: expected acceptance of the served draft, None before the first gate.
        rejections: rejected rounds in a row.
        waited_s: since its last round ended, seconds.
        resting: whether it is left alone after a round that could not teach it.
    """

    name: str
    records_train: int
    records_held_out: int
    new_records: int
    traffic: float
    acceptance: float | None = None
    rejections: int = 0
    waited_s: float = 0.0
    resting: bool = False


def is_ready(view: TopicView, settings: ScheduleSettings) -> bool:
    """Whether a round may help this topic now."""
    if view.resting:
        return False
    if view.records_train < settings.min_train or view.records_held_out < settings.min_held_out:
        return False
    if view.rejections >= settings.max_rejections:
        return view.new_records >= max(settings.min_new, settings.rest_growth * view.records_train)
    return view.rejections == 0 or view.new_records >= settings.min_new


def priority(view: TopicView, total_traffic: float, settings: ScheduleSettings) -> float:
    """Traffic share x headroom, more the longer the topic has waited."""
    share = view.traffic / total_traffic if total_traffic > 0 else 0.0
    if view.name == GENERAL:
        share = settings.general_share
    headroom = 1.0 - (view.acceptance if view.acceptance is not None else 0.0)
    return (share + 1e-3) * max(headroom, 0.0) * (1.0 + view.waited_s / settings.waiting_s)


def choose(views: Iterable[TopicView], settings: ScheduleSettings | None = None) -> str | None:
    """The topic of the next round, None where no round would help.

    Args:
        views: all topics.
        settings: see ScheduleSettings.
    """
    settings = settings or ScheduleSettings()
    every = list(views)
    ready = [view for view in every if is_ready(view, settings)]
    if not ready:
        return None
    total = sum(view.traffic for view in every if view.name != GENERAL)
    return max(ready, key=lambda view: priority(view, total, settings)).name


@dataclass(slots=True)
class Rest:
    """How long a topic that cannot be taught is left alone, so that others have their turn.

    Attributes:
        failures: rounds in a row that could not teach it.
        until: end of the rest, monotonic seconds.
    """

    failures: int = 0
    until: float = -math.inf

    def begin(self, now: float, settings: ScheduleSettings) -> None:
        """Rest from ``now``, monotonic seconds, twice as long as the last time."""
        # the exponent is bounded because a float is
        lasts = settings.rest_s * 2.0 ** min(self.failures, 30)
        self.failures += 1
        self.until = now + min(lasts, settings.longest_rest_s)

    def end(self) -> None:
        """The topic has been taught."""
        self.failures, self.until = 0, -math.inf


@dataclass(slots=True)
class TrafficMeter:
    """Requests per topic with exponential forgetting, from counters that may start over.

    Attributes:
        half_life_s: after which a request counts half.
    """

    half_life_s: float = 45.0
    _totals: dict[str, int] = field(default_factory=dict)
    _levels: dict[str, float] = field(default_factory=dict)
    _at: float | None = None

    def update(self, totals: dict[str, int], now: float) -> None:
        """Take the counters of the topics that answered; ``now`` in monotonic seconds."""
        decay = 1.0 if self._at is None else 0.5 ** ((now - self._at) / self.half_life_s)
        self._at = now
        for topic in self._levels:
            self._levels[topic] *= decay
        for topic, total in totals.items():
            before = self._totals.get(topic, 0)
            # a restarted shard counts from the start again
            fresh = total - before if total >= before else total
            self._totals[topic] = total
            self._levels[topic] = self._levels.get(topic, 0.0) + fresh

    def level(self, topic: str) -> float:
        """Recent requests of a topic."""
        return self._levels.get(topic, 0.0)
