"""What a trainer knows of its topics between two rounds, and so which it wants to teach."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from paceline.actors.router.policy import GENERAL
from paceline.actors.training.drift import Drift, DriftSettings
from paceline.actors.training.permits import TopicProgress
from paceline.actors.training.progress import Seen
from paceline.actors.training.topic_schedule import TopicView, TrafficMeter


class Outlook:
    """The last live figures; a registry that does not answer leaves them as they are."""

    def __init__(self, topics: Iterable[str], settings: DriftSettings) -> None:
        """Begin without figures.

        Args:
            topics: experts whose drift is watched.
            settings: see DriftSettings.
        """
        self._settings = settings
        self._drifts = {topic: Drift(settings) for topic in topics}
        self._live: Mapping[str, Mapping[str, Any]] = {}

    def enlist(self, topic: str) -> None:
        """Watch a further expert."""
        self._drifts[topic] = Drift(self._settings)

    def update(self, live: Mapping[str, Mapping[str, Any]] | None) -> list[str]:
        """Take what ``WeightRegistry.live`` says; returns the topics whose drift begins."""
        if live is None:
            return []
        self._live = live
        began = []
        for topic, drift in self._drifts.items():
            own = live.get(topic)
            if own and drift.update(own["requests"], own["rounds"], own["accepted"]):
                began.append(topic)
        return began

    def drifting(self, topic: str) -> bool:
        """Whether a topic's draft has lost it."""
        return self._drifts[topic].drifting

    def drift_figures(self, topic: str) -> dict[str, Any]:
        """See Drift.figures."""
        return self._drifts[topic].figures()

    def figures(self) -> dict[str, dict[str, Any]]:
        """Per topic, see Drift.figures, and whether it is ``drifting``."""
        drifts = list(self._drifts.items())
        return {topic: drift.figures() | {"drifting": drift.drifting} for topic, drift in drifts}

    def candidate(self, topic: str) -> int | None:
        """The version on trial, None where there is none."""
        version: int | None = self._live.get(topic, {}).get("candidate")
        return version

    def withdrawn(self, topic: str, version: int) -> bool:
        """Whether a version was on trial and has been rolled back."""
        stable = self._live.get(topic, {}).get("stable")
        return stable is not None and version > stable and version != self.candidate(topic)

    def undecided(self, topic: str) -> bool:
        """Whether a trial is under way that a new candidate must not replace.

        One with evidence, which would be thrown away; and one of an earlier version against a
        suspected one, which nobody would begin again.
        """
        own = self._live.get(topic, {})
        if own.get("candidate") is None:
            return False
        return own.get("canary_requests", 0) > 0 or own.get("restored_from") is not None

    def closed(self, topic: str) -> str | None:
        """Why the registry would take no candidate now, None where it would; see Admission."""
        why: str | None = self._live.get(topic, {}).get("closed")
        return why


if TYPE_CHECKING:
    from paceline.actors.training.candidate import Candidate
    from paceline.actors.training.settings import TrainerSettings

logger = logging.getLogger(__name__)

Stats = Mapping[str, Mapping[str, Any]]  # topic to its shard's


class Survey:
    """Counters at each topic's last round, traffic, live figures and what other trainers said."""

    def __init__(self, settings: TrainerSettings, clock: Callable[[], float]) -> None:
        """Know of no round yet.

        Args:
            settings: ``draft_paths``, ``drift`` and ``schedule`` are used.
            clock: monotonic seconds.
        """
        self.outlook = Outlook(settings.draft_paths, settings.drift)
        self._clock = clock
        self._seen = {topic: Seen(ended_at=clock()) for topic in settings.draft_paths}
        self._traffic = TrafficMeter()
        self._told: Mapping[str, TopicProgress] = {}

    def knows(self, topic: str) -> bool:
        """Whether a topic is among them."""
        return topic in self._seen

    def enlist(self, topic: str) -> None:
        """Take up a further topic."""
        self.outlook.enlist(topic)
        self._seen[topic] = Seen(ended_at=self._clock())

    def seen(self, topic: str) -> Seen:
        """What this trainer has seen of a topic."""
        return self._seen[topic]

    def hear(self, notes: Mapping[str, TopicProgress]) -> None:
        """Take what other trainers said of the topics that they had last."""
        self._told = notes

    def told(self, topic: str) -> TopicProgress | None:
        """What another trainer said of a topic, None where this one had it last."""
        return self._told.get(topic)

    def note(self, topic: str, candidate: Candidate | None) -> TopicProgress:
        """What to say of a topic after a round."""
        seen = self._seen[topic]
        if candidate is None:
            return TopicProgress(seen.inserted)
        acceptance = None if candidate.acceptance is None else float(candidate.acceptance)
        # A rollback that was not followed yet is one more, and all that counts from then on.
        withdrawn = self.outlook.withdrawn(candidate.topic, candidate.version)
        rolled_back = seen.rolled_back + withdrawn
        return TopicProgress(
            inserted=seen.inserted,
            rejections=rolled_back if withdrawn else candidate.rejections,
            fruitless=rolled_back if withdrawn else candidate.fruitless,
            acceptance=acceptance,
            rate_share=candidate.stride.share,
            rolled_back=rolled_back,
        )

    def views(self, stats: Stats, candidates: Mapping[str, Candidate]) -> list[TopicView]:
        """All topics as the schedule sees them.

        Args:
            stats: of the shards that answered.
            candidates: drafts in training, by topic.
        """
        totals = {topic: requests(facts) for topic, facts in stats.items()}
        now = self._clock()
        self._traffic.update(totals, now)
        return [self._view(topic, stats, candidates.get(topic), now) for topic in self._seen]

    def _view(self, topic: str, stats: Stats, candidate: Candidate | None, now: float) -> TopicView:
        seen, told = self._seen[topic], self._told.get(topic)
        note = told or self.note(topic, candidate)
        records = inserted(stats, topic)
        # Another trainer's candidate has its trial first: from here it would be lost.
        others = told is not None and self.outlook.candidate(topic) is not None
        return TopicView(
            name=topic,
            records_train=to_learn_from(stats, topic),
            records_held_out=total(stats, topic, "records_held_out"),
            new_records=records - note.inserted if records >= note.inserted else records,
            traffic=self._traffic.level(topic),
            acceptance=note.acceptance,
            rejections=note.rejections,
            fruitless=note.fruitless,
            waited_s=now - seen.ended_at,
            resting=others or now < seen.rest.until,
            undecided=self.outlook.undecided(topic),
            drifting=self.outlook.drifting(topic),
        )


def inserted(stats: Stats, topic: str) -> int:
    """Records that a topic's shard has ever taken."""
    return total(stats, topic, "inserted_total")


def requests(facts: Mapping[str, Any]) -> int:
    """A topic's requests since the shard started, recorded or not, without synthetic ones."""
    recorded = int(facts["inserted_total"]) - int(facts["inserted_synthetic_total"])
    return recorded + int(facts.get("left_out_total", 0))


def to_learn_from(stats: Stats, topic: str) -> int:
    """Training records of a topic, synthetic ones included."""
    return total(stats, topic, "records_train") + total(stats, topic, "records_synthetic")


def total(stats: Stats, topic: str, key: str) -> int:
    """A topic's figure; of all topics together for ``general``, which learns from all."""
    if topic == GENERAL:
        return sum(int(facts[key]) for facts in stats.values())
    return int(stats[topic][key]) if topic in stats else 0
