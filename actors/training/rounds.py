"""Rounds of learning: choose a topic, train while leave is given, judge, publish or reject."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.gate import judge
from paceline.actors.training.schedule import GENERAL, TopicView, TrafficMeter, choose
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.world import World

logger = logging.getLogger(__name__)

_GROUP = 4  # micro-batches that are sorted by length together


class Stopped(Exception):  # noqa: N818 - not an error: the trainer was told to end
    """Raised in the midst of a round when the trainer ends."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the trainer is at; replaced whole, so that any thread may read it."""

    state: str = "starting"
    topic: str | None = None
    steps: int = 0
    micro_steps: int = 0
    training_s: float = 0.0
    loss: float | None = None
    rounds: int = 0
    published: int = 0
    rejected: int = 0
    failures: int = 0


@dataclass(slots=True)
class _Seen:
    """A topic's counters at its last round."""

    inserted: int = 0
    ended_at: float = 0.0


class Rounds:
    """The trainer's work without thread and actor around it: call :meth:`tick` for ever."""

    def __init__(
        self,
        settings: TrainerSettings,
        world: World,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            settings: see TrainerSettings.
            world: shards, registry and board.
            clock: monotonic seconds.
            sleep: waits some seconds.
            stopped: whether to end; looked at wherever the trainer waits.
        """
        self._settings = settings
        self._world = world
        self._clock = clock
        self._sleep = sleep
        self._stopped = stopped
        self._rng = np.random.default_rng(settings.seed)
        self._candidates: dict[str, Candidate] = {}
        self._traffic = TrafficMeter()
        self._seen = {topic: _Seen(ended_at=clock()) for topic in settings.draft_paths}
        self.progress = Progress()

    def candidate(self, topic: str) -> Candidate:
        """A topic's candidate, made when first asked for."""
        if topic not in self._candidates:
            self._candidates[topic] = Candidate(topic, self._settings)
        return self._candidates[topic]

    def tick(self) -> bool:
        """One round of the topic that needs it most; False where none is ready."""
        stats = self._world.stats()
        topic = choose(self._views(stats), self._settings.schedule)
        if topic is None:
            self._note(state="no new records", topic=None)
            return False
        candidate = self.candidate(topic)
        if not self._follow(candidate):
            return False
        self._note(state="training", topic=topic, steps=candidate.steps)
        self._seen[topic].inserted = _inserted(stats, topic)
        train = candidate.usable(self._draw(topic, self._settings.train_records, "train", stats))
        held_out = self._draw(topic, self._settings.held_out_records, "held_out", stats)
        held_out = candidate.usable(held_out)
        if train and self._train(candidate, train):
            self._note(state="evaluating")
            self._decide(candidate, held_out, len(train))
        self._seen[topic].ended_at = self._clock()
        return True

    def _views(self, stats: dict[str, dict[str, Any]]) -> list[TopicView]:
        totals = {topic: int(facts["inserted_total"]) for topic, facts in stats.items()}
        now = self._clock()
        self._traffic.update(totals, now)
        views = []
        for topic, seen in self._seen.items():
            candidate = self._candidates.get(topic)
            inserted = _inserted(stats, topic)
            views.append(
                TopicView(
                    name=topic,
                    records_train=_sum(stats, topic, "records_train"),
                    records_held_out=_sum(stats, topic, "records_held_out"),
                    new_records=inserted - seen.inserted if inserted >= seen.inserted else inserted,
                    traffic=self._traffic.level(topic),
                    acceptance=candidate.acceptance if candidate else None,
                    rejections=candidate.rejections if candidate else 0,
                    waited_s=now - seen.ended_at,
                )
            )
        return views

    def _follow(self, candidate: Candidate) -> bool:
        """Have the candidate start from what is really served; False where nobody knows."""
        versions = self._world.versions()
        if versions is None:
            self._note(state="waiting for the registry")
            return False
        wanted = versions.get(candidate.topic, 0)
        if wanted == candidate.version:
            return True
        news = self._world.weights(candidate.topic)
        if news is None:
            if wanted == 0:
                candidate.take(0, None)  # an emptied registry: the initial weights are served
            return wanted == 0
        candidate.take(*news)
        return True

    def _draw(
        self, topic: str, count: int, split: str, stats: dict[str, dict[str, Any]]
    ) -> list[ReplayRecord]:
        if topic != GENERAL:
            return self._world.sample(topic, count, split)
        have = {name: int(facts[f"records_{split}"]) for name, facts in stats.items()}
        total = max(sum(have.values()), 1)
        shares = {name: -(-count * kept // total) for name, kept in have.items()}
        return [r for name, share in shares.items() for r in self._world.sample(name, share, split)]

    def _train(self, candidate: Candidate, records: Sequence[ReplayRecord]) -> bool:
        """Micro-steps for a round's time; whether the weights moved."""
        started, spent = self._clock(), 0.0
        first = candidate.steps
        while spent < self._settings.round_seconds:
            for batch in self._batches(records):
                self._wait_for_leave()
                begun = self._clock()
                if begun - started > self._settings.max_round_s:
                    return candidate.steps > first
                step = candidate.learn(batch)
                took = self._clock() - begun
                spent += took
                self._note(
                    steps=candidate.steps,
                    micro_steps=self.progress.micro_steps + 1,
                    training_s=self.progress.training_s + took,
                    loss=step.loss,
                )
                if spent >= self._settings.round_seconds:
                    break
        return candidate.steps > first

    def _batches(self, records: Sequence[ReplayRecord]) -> list[list[ReplayRecord]]:
        """The records in a random order, in micro-batches of equal size (the last may lack).

        Those of a micro-batch are of similar length, taken from a larger random group: padding
        costs as much as tokens do.
        """
        order = self._rng.permutation(len(records))
        size = self._settings.micro_batch
        batches = []
        for at in range(0, len(order), _GROUP * size):
            group = sorted((records[i] for i in order[at : at + _GROUP * size]), key=_length)
            batches += [group[n : n + size] for n in range(0, len(group), size)]
        return [batches[i] for i in self._rng.permutation(len(batches))]

    def _wait_for_leave(self) -> None:
        while not self._world.may_train():
            if self._stopped():
                raise Stopped
            self._sleep(self._settings.poll_s)
        if self._stopped():
            raise Stopped

    def _decide(
        self, candidate: Candidate, held_out: Sequence[ReplayRecord], train_records: int
    ) -> None:
        if not held_out:
            return
        scores, served, state = candidate.compare(held_out, self._wait_for_leave)
        decision = judge(scores, served, self._rng, self._settings.gate)
        facts = decision.facts() | {"steps": candidate.steps, "train_records": train_records}
        candidate.acceptance = max(decision.served, decision.candidate)
        self._note(rounds=self.progress.rounds + 1)
        if decision.publish:
            version = self._world.publish(candidate.topic, candidate.flat(state), facts)
            candidate.published(version, state, held_out, scores)
            self._note(published=self.progress.published + 1)
            logger.info("%s: published version %d %s", candidate.topic, version, facts)
            return
        self._world.reject(candidate.topic, facts)
        candidate.acceptance = decision.served
        candidate.rejections += 1
        self._note(rejected=self.progress.rejected + 1)
        logger.info("%s: rejected %s", candidate.topic, facts)
        if candidate.rejections % self._settings.schedule.max_rejections == 0:
            candidate.reset()

    def _note(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)


def _length(record: ReplayRecord) -> int:
    return len(record.prompt_token_ids) + len(record.output_token_ids)


def _inserted(stats: dict[str, dict[str, Any]], topic: str) -> int:
    return _sum(stats, topic, "inserted_total")


def _sum(stats: dict[str, dict[str, Any]], topic: str, key: str) -> int:
    """A topic's figure; of all topics together for ``general``, which learns from all."""
    if topic == GENERAL:
        return sum(int(facts[key]) for facts in stats.values())
    return int(stats[topic][key]) if topic in stats else 0
