"""Which topic to train next: where traffic and headroom are, and something new to learn from."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.actors.router.policy import GENERAL


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """When a topic is worth a round.

    Attributes:
        min_train: records to learn from.
        min_held_out: records to be judged by.
        min_new: new records since the topic's last round, unless that round was published.
        max_rejections: fruitless rounds in a row after which a topic rests.
        least_hope: a rejected round is fruitless where not even the upper bound of the candidate's
            gain is above this.
        rest_growth: share of a resting topic's records that must be new for it to go on.
        general_share: weight of ``general``, which learns from all topics, against one topic.
        waiting_s: seconds of waiting that double a topic's weight.
        rest_s: rest of a topic that could not be taught, seconds; twice as long each time.
        longest_rest_s: at most.
        maintenance_s: after so long a plateau asks for no more new records than other topics.
        drift_weight: how many times as much a drifting topic weighs.
        drift_length: a round's length while a topic drifts, as a share: news are wanted soon.
        shortest_length: a round's length at least, as a share.
    """

    min_train: int = 8
    min_held_out: int = 4
    min_new: int = 4
    max_rejections: int = 3
    least_hope: float = 0.006
    rest_growth: float = 0.1
    general_share: float = 0.1
    waiting_s: float = 60.0
    rest_s: float = 1.0
    longest_rest_s: float = 60.0
    maintenance_s: float = 600.0
    drift_weight: float = 2.0
    drift_length: float = 0.5
    shortest_length: float = 0.25


def hope_of(min_gain: float) -> float:
    """``least_hope`` for a gate's least gain: a little more, or no round could ever pass."""
    return min_gain + 0.001


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
        fruitless: rounds in a row, the last ones, that left little to hope for.
        waited_s: since its last round ended, seconds.
        resting: whether it is left alone after a round that could not teach it.
        undecided: whether live requests have begun, and not ended, to judge its candidate.
        drifting: whether its live acceptance falls.
    """

    name: str
    records_train: int
    records_held_out: int
    new_records: int
    traffic: float
    acceptance: float | None = None
    rejections: int = 0
    fruitless: int = 0
    waited_s: float = 0.0
    resting: bool = False
    undecided: bool = False
    drifting: bool = False


def is_ready(view: TopicView, settings: ScheduleSettings) -> bool:
    """Whether a round may help this topic now.

    A topic whose rounds bring nothing, nor promise to, is on a plateau, and rests there until its
    traffic drifts, much of it is new, or the maintenance is due.
    """
    if view.resting:
        return False
    if view.records_train < settings.min_train or view.records_held_out < settings.min_held_out:
        return False
    plateau = view.fruitless >= settings.max_rejections
    if plateau and not view.drifting and view.waited_s < settings.maintenance_s:
        return view.new_records >= max(settings.min_new, settings.rest_growth * view.records_train)
    fresh = view.new_records >= settings.min_new
    # The candidate is trained on while live requests judge it, but not over and over on the same.
    return fresh or (view.rejections == 0 and not view.undecided)


def round_length(
    base_s: float, leave: float, longest_s: float, *, drifting: bool, settings: ScheduleSettings
) -> float:
    """Training seconds of the next round: how often there is something new to decide.

    A busy server gives little leave, and a round of constant length would take ever longer on the
    clock; a topic that drifts wants its next version soon.

    Args:
        base_s: with leave at all times and no drift.
        leave: share of the time in which training was allowed lately, in [0, 1].
        longest_s: wall time of a round.
        drifting: whether the topic drifts.
        settings: see ScheduleSettings.
    """
    wanted = base_s * (settings.drift_length if drifting else 1.0)
    return max(settings.shortest_length * base_s, min(wanted, leave * longest_s))


@dataclass(frozen=True, slots=True)
class Want:
    """A topic that a round may help.

    Attributes:
        topic: its name.
        gain: what is to be expected of a round.
        weight: the gain, more the longer the topic has waited for this trainer.
    """

    topic: str
    gain: float
    weight: float


def gain(view: TopicView, total_traffic: float, settings: ScheduleSettings) -> float:
    """Traffic share x headroom, more while the topic drifts."""
    share = view.traffic / total_traffic if total_traffic > 0 else 0.0
    if view.name == GENERAL:
        share = settings.general_share
    headroom = 1.0 - (view.acceptance if view.acceptance is not None else 0.0)
    weight = settings.drift_weight if view.drifting else 1.0
    return (share + 1e-3) * max(headroom, 0.0) * weight


def wants(views: Iterable[TopicView], settings: ScheduleSettings | None = None) -> list[Want]:
    """The topics that a round may help.

    Args:
        views: all topics.
        settings: see ScheduleSettings.
    """
    settings = settings or ScheduleSettings()
    every = list(views)
    total = sum(view.traffic for view in every if view.name != GENERAL)
    found = []
    for view in every:
        if is_ready(view, settings):
            expected = gain(view, total, settings)
            waited = 1.0 + view.waited_s / settings.waiting_s
            found.append(Want(view.name, expected, expected * waited))
    return found


def best(wanted: Iterable[Want]) -> str | None:
    """The topic of the next round of a trainer that is alone, None where none is wanted."""
    first = max(wanted, key=lambda want: want.weight, default=None)
    return None if first is None else first.topic


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
