"""Statistics of topics that a trainer keeps between rounds, for the choice of the next topic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.actors.backoff import Backoff
from paceline.actors.general import GENERAL
from paceline.actors.replay.buffer import ShardStats
from paceline.actors.training.permits import InsertedByShard, TopicProgress
from paceline.actors.training.round_counts import RoundCounts
from paceline.actors.training.topic_schedule import ScheduleSettings, TopicView, TrafficMeter
from paceline.actors.weights.versions import TopicStatus

if TYPE_CHECKING:
    from paceline.actors.training.candidate import Candidate
    from paceline.actors.training.settings import TrainerSettings

StatsByTopic = Mapping[str, ShardStats]


class LiveStats:
    """The last live statistics of the served drafts, by topic."""

    def __init__(self) -> None:
        self._live: Mapping[str, TopicStatus] = {}

    def update(self, live: Mapping[str, TopicStatus] | None) -> list[str]:
        """Take ``WeightRegistry.topic_status`` (None: no answer); topics that begin to drift."""
        if live is None:
            return []
        began = [t for t, own in live.items() if own.drift.drifting and not self.drifting(t)]
        self._live = live
        return began

    def published(self, topic: str, version: int) -> None:
        """A version is on trial since: what was fetched before does not know it."""
        own = replace(self._status(topic), candidate=version, canary_requests=0, restored_from=None)
        self._live = {**self._live, topic: own}

    def drifting(self, topic: str) -> bool:
        """Whether a topic drifts."""
        return self._status(topic).drift.drifting

    def stable(self, topic: str) -> int:
        """The stable version, 0 if it is unknown."""
        return self._status(topic).stable

    def candidate(self, topic: str) -> int | None:
        """The version on trial, None without one."""
        return self._status(topic).candidate

    def is_current(self, topic: str, version: int) -> bool:
        """Whether a version is stable or on trial, as far as is known."""
        status = self._live.get(topic)
        return status is None or version in (status.stable, status.candidate)

    def rolled_back(self, topic: str, version: int) -> bool:
        """Whether a version was on trial and has been rolled back."""
        return not self.is_current(topic, version) and version > self.stable(topic)

    def undecided(self, topic: str) -> bool:
        """Whether a trial is under way that a new candidate must not replace.

        One with evidence, which would be lost; or one of an earlier version against a suspected
        one, which would not be started again.
        """
        own = self._status(topic)
        if own.candidate is None:
            return False
        return own.canary_requests > 0 or own.restored_from is not None

    def closed(self, topic: str) -> str | None:
        """Why the registry takes no candidate now, None if it does."""
        return self._status(topic).closed

    def _status(self, topic: str) -> TopicStatus:
        return self._live.get(topic, TopicStatus())


@dataclass(slots=True)
class TopicState:
    """A topic's state after this trainer's last round of it.

    Attributes:
        inserted: see TopicProgress.
        ended_at: end of the round, monotonic seconds.
        counts: of the topic's rounds.
        backoff: after rounds that could not train the topic, seconds.
        resting_until: end of the back-off, monotonic seconds.
    """

    ended_at: float
    backoff: Backoff
    inserted: InsertedByShard = field(default_factory=dict)
    counts: RoundCounts = field(default_factory=RoundCounts)
    resting_until: float = -math.inf

    def back_off(self, now: float) -> None:
        """Leave the topic alone for a while from ``now``, monotonic seconds."""
        self.resting_until = now + self.backoff.fail()


class TopicStats:
    """State of each topic, its traffic, live statistics and the progress of other trainers."""

    def __init__(self, settings: TrainerSettings, clock: Callable[[], float]) -> None:
        """Start with the topics of the settings.

        Args:
            settings: ``draft_paths`` and ``schedule`` are used.
            clock: monotonic seconds.
        """
        self.live = LiveStats()
        self._clock = clock
        self._schedule: ScheduleSettings = settings.schedule
        self._states = {topic: self._new_state() for topic in settings.draft_paths}
        self._traffic = TrafficMeter()
        self._shards: dict[str, ShardStats] = {}
        self._others: Mapping[str, TopicProgress] = {}

    def _new_state(self) -> TopicState:
        backoff = Backoff(self._schedule.rest_s, self._schedule.longest_rest_s)
        return TopicState(self._clock(), backoff)

    def __contains__(self, topic: str) -> bool:
        return topic in self._states

    def add_topic(self, topic: str) -> None:
        """Add a topic."""
        self._states[topic] = self._new_state()

    def state(self, topic: str) -> TopicState:
        """A topic's state."""
        return self._states[topic]

    def update_progress(self, others: Mapping[str, TopicProgress]) -> None:
        """Take the progress of other trainers on the topics that they had last."""
        self._others = others

    def others_progress(self, topic: str) -> TopicProgress | None:
        """Another trainer's progress on a topic, None if this one had it last."""
        return self._others.get(topic)

    def progress(self, topic: str, candidate: Candidate | None) -> TopicProgress:
        """This trainer's progress on a topic."""
        state = self._states[topic]
        if candidate is None:
            return TopicProgress(state.inserted, state.counts)
        acceptance = None if candidate.acceptance is None else float(candidate.acceptance)
        counts = state.counts
        if self.live.rolled_back(topic, candidate.version):  # the next round follows
            counts = counts.withdrawn()
        return TopicProgress(state.inserted, counts, acceptance, candidate.rate_share)

    def counts(self, topic: str) -> RoundCounts:
        """Counts of a topic's rounds, as the trainer that had the last one left them."""
        others = self._others.get(topic)
        return self._states[topic].counts if others is None else others.counts

    def inserted(self, topic: str, stats: StatsByTopic) -> InsertedByShard:
        """Records inserted into a topic's shard since it started, into all of them for ``general``.

        One that does not answer counts with what it last said, as if it had not started again.
        """
        self._shards.update(stats)
        return {
            (name, shard.started_at): shard.inserted_total
            for name, shard in self._shards.items()
            if topic in (name, GENERAL)
        }

    def views(self, stats: StatsByTopic, candidates: Mapping[str, Candidate]) -> list[TopicView]:
        """All topics as the schedule sees them.

        Args:
            stats: of the shards that answered.
            candidates: drafts in training, by topic.
        """
        totals = {topic: requests(shard) for topic, shard in stats.items()}
        now = self._clock()
        self._traffic.update(totals, now)
        return [self._view(topic, stats, candidates.get(topic), now) for topic in self._states]

    def _view(
        self, topic: str, stats: StatsByTopic, candidate: Candidate | None, now: float
    ) -> TopicView:
        state, others = self._states[topic], self._others.get(topic)
        progress = others or self.progress(topic, candidate)
        inserted = self.inserted(topic, stats)
        # Another trainer's candidate has its trial first: from here it would be lost.
        on_trial = others is not None and self.live.candidate(topic) is not None
        return TopicView(
            name=topic,
            records_train=to_learn_from(stats, topic),
            records_held_out=total(stats, topic, lambda shard: shard.records("held_out")),
            new_records=sum(n - progress.inserted.get(shard, 0) for shard, n in inserted.items()),
            traffic=self._traffic.level(topic),
            acceptance=progress.acceptance,
            rejections=progress.counts.rejections,
            fruitless=progress.counts.fruitless,
            waited_s=now - state.ended_at,
            resting=on_trial or now < state.resting_until,
            undecided=self.live.undecided(topic),
            drifting=self.live.drifting(topic),
        )


def requests(shard: ShardStats) -> int:
    """A topic's requests since its shard started, recorded or not, without synthetic ones."""
    return shard.inserted_total - shard.inserted_synthetic_total + shard.left_out_total


def to_learn_from(stats: StatsByTopic, topic: str) -> int:
    """Training records of a topic, synthetic ones included."""
    return total(stats, topic, lambda shard: shard.records("train", "synthetic"))


def total(stats: StatsByTopic, topic: str, figure: Callable[[ShardStats], int]) -> int:
    """A topic's figure; the sum over all topics for ``general``, which learns from all."""
    if topic == GENERAL:
        return sum(figure(shard) for shard in stats.values())
    return figure(stats[topic]) if topic in stats else 0
