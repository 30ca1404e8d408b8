"""Choice of the topic to train next, by traffic, headroom and new records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline.actors.general import GENERAL


@dataclass(frozen=True, slots=True)
class ScheduleSettings:
    """Conditions and weights of a round.

    Attributes:
        min_train: training records.
        min_held_out: held-out records.
        min_new: new records since the topic's last round, unless that round was published.
        max_rejections: fruitless rounds in a row that make a plateau.
        least_hope: a rejected round is fruitless if the upper bound of the candidate's gain is not
            above this.
        rest_growth: share of a plateaued topic's records that must be new for another round.
        general_share: traffic share that ``general`` counts with at least: it serves what no topic
            is known for, which may come at any time.
        waiting_s: seconds of waiting that double a topic's weight.
        rest_s: first back-off of a topic that could not be trained, seconds; doubles.
        longest_rest_s: longest back-off, seconds.
        maintenance_s: seconds after which a plateau needs no more new records than other topics.
        drift_weight: factor of a drifting topic's weight.
        drift_length: a round's length while a topic drifts, as a share.
        shortest_length: a round's least length, as a share.
    """

    min_train: int = 8
    min_held_out: int = 4
    min_new: int = 4
    max_rejections: int = 3
    least_hope: float = 0.006
    rest_growth: float = 0.1
    general_share: float = 0.02
    waiting_s: float = 60.0
    rest_s: float = 1.0
    longest_rest_s: float = 60.0
    maintenance_s: float = 600.0
    drift_weight: float = 2.0
    drift_length: float = 0.5
    shortest_length: float = 0.25


def min_hope_for(min_gain: float) -> float:
    """``least_hope`` for a gate's least gain: a little more, else no round could pass."""
    return min_gain + 0.001


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as the schedule sees it.

    Attributes:
        name: of the topic.
        records_train: for training.
        records_held_out: for the gate.
        new_records: since its last round that moved weights began.
        traffic: recent requests, in any unit common to all topics.
        acceptance: expected acceptance of the served draft, None before the first gate.
        rejections: rejected rounds in a row.
        fruitless: last rejected rounds in a row whose gain had a low upper bound.
        waited_s: since its last round ended, seconds.
        resting: whether it backs off after a round that could not train it.
        undecided: whether its candidate is on trial with live requests.
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

    A topic on a plateau waits until its traffic drifts, much of it is new, or maintenance is due.
    """
    if view.resting:
        return False
    if view.records_train < settings.min_train or view.records_held_out < settings.min_held_out:
        return False
    plateau = view.fruitless >= settings.max_rejections
    if plateau and not view.drifting and view.waited_s < settings.maintenance_s:
        return view.new_records >= max(settings.min_new, settings.rest_growth * view.records_train)
    fresh = view.new_records >= settings.min_new
    # A candidate on trial is trained further, but not over and over on the same records.
    return fresh or (view.rejections == 0 and not view.undecided)


def round_length(
    base_s: float,
    permit_share: float,
    longest_s: float,
    *,
    drifting: bool,
    settings: ScheduleSettings,
) -> float:
    """Training seconds of the next round: shorter under load and while the topic drifts.

    Under load permits are rare, and a round of constant length would take ever longer wall time; a
    topic that drifts needs its next version soon.

    Args:
        base_s: with a permit at all times and no drift.
        permit_share: share of the time with a permit lately, in [0, 1].
        longest_s: wall time of a round.
        drifting: whether the topic drifts.
        settings: see ScheduleSettings.
    """
    wanted = base_s * (settings.drift_length if drifting else 1.0)
    return max(settings.shortest_length * base_s, min(wanted, permit_share * longest_s))


@dataclass(frozen=True, slots=True)
class TopicPriority:
    """A topic that a round may help.

    Attributes:
        topic: its name.
        gain: expected of a round.
        weight: the gain, raised by the wait for this trainer.
    """

    topic: str
    gain: float
    weight: float


def gain(view: TopicView, total_traffic: float, settings: ScheduleSettings) -> float:
    """Traffic share x headroom, more while the topic drifts; without traffic topics are equal."""
    share = view.traffic / total_traffic if total_traffic > 0 else settings.general_share
    if view.name == GENERAL:
        share = max(share, settings.general_share)
    headroom = 1.0 - (view.acceptance if view.acceptance is not None else 0.0)
    weight = settings.drift_weight if view.drifting else 1.0
    return (share + 1e-3) * max(headroom, 0.0) * weight


def topic_priorities(
    views: Iterable[TopicView], settings: ScheduleSettings | None = None
) -> list[TopicPriority]:
    """The topics that a round may help.

    Args:
        views: all topics.
        settings: see ScheduleSettings.
    """
    settings = settings or ScheduleSettings()
    every = list(views)
    total = sum(view.traffic for view in every)
    found = []
    for view in every:
        if is_ready(view, settings):
            expected = gain(view, total, settings)
            waited = 1.0 + view.waited_s / settings.waiting_s
            found.append(TopicPriority(view.name, expected, expected * waited))
    return found


def select_topic(wanted: Iterable[TopicPriority]) -> str | None:
    """The topic of the next round of a single trainer; None without any."""
    first = max(wanted, key=lambda want: want.weight, default=None)
    return None if first is None else first.topic


@dataclass(slots=True)
class TrafficMeter:
    """Requests per topic with exponential decay, from counters that may restart.

    What a counter shows at its first reading is not recent traffic.

    Attributes:
        half_life_s: of a request's weight, seconds.
    """

    half_life_s: float = 45.0
    _totals: dict[str, int] = field(default_factory=dict)
    _levels: dict[str, float] = field(default_factory=dict)
    _at: float | None = None

    def update(self, totals: dict[str, int], now: float) -> None:
        """Take the counters of the shards that answered; ``now`` in monotonic seconds."""
        decay = 1.0 if self._at is None else 0.5 ** ((now - self._at) / self.half_life_s)
        self._at = now
        for topic in self._levels:
            self._levels[topic] *= decay
        for topic, total in totals.items():
            before = self._totals.get(topic, total)
            # a restarted shard counts from 0
            fresh = total - before if total >= before else total
            self._totals[topic] = total
            self._levels[topic] = self._levels.get(topic, 0.0) + fresh

    def level(self, topic: str) -> float:
        """Recent requests of a topic."""
        return self._levels.get(topic, 0.0)
