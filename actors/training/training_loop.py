"""The training loop: choose a topic, train while permitted, evaluate, publish or reject."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.actors.general import GENERAL
from paceline.actors.replay.buffer import Split
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.candidate import Candidate, one_per_conversation
from paceline.actors.training.client import TrainerClient
from paceline.actors.training.gate import NOT_FINITE, GateDecision, decide
from paceline.actors.training.learning_rate import decreased
from paceline.actors.training.permits import Assignment
from paceline.actors.training.progress import (
    Diverged,
    LeaseRevoked,
    Stopped,
    TopicNotTrainable,
    TrainerStatus,
)
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.step_runner import StepRunner
from paceline.actors.training.topic_schedule import topic_priorities
from paceline.actors.training.topic_stats import (
    StatsByTopic,
    TopicStats,
    to_learn_from,
    total,
)
from paceline.actors.training.worker_group import WorkerGroup, WorkerGroupError
from paceline.actors.weights.cooldown import CandidateRefusedError
from paceline.actors.weights.flat_weights import flatten
from paceline.actors.weights.history import Decision

logger = logging.getLogger(__name__)

# Raised with every change of what is decided here, in the gate, the candidate or the learning-rate
# scale: benchmark results that were made under other rules are then not taken for today's.
RULES = 8
_AT_ONCE = 32  # records that are decoded under one permit: some milliseconds
_DIVERGED = "the training loss is not finite"


class TrainingLoop:
    """The trainer without its thread and actor: call :meth:`run_round` for ever.

    Candidates, and their models, are created with a topic's first round.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        client: TrainerClient,
        *,
        workers: WorkerGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Load nothing yet.

        Args:
            settings: see TrainerSettings.
            client: of shards, registry and scheduler.
            workers: of the other ranks; None trains alone.
            clock: monotonic seconds.
            sleep: waits some seconds.
            stopped: whether to end; read at every wait.
        """
        self._settings = settings
        self._client = client
        self._workers = workers
        self._clock = clock
        self._steps = StepRunner(
            settings, client, clock=clock, sleep=sleep, stopped=stopped, on_step=self._on_step
        )
        self._candidates: dict[str, Candidate] = {}
        self._topics = TopicStats(settings, clock)
        self._live = self._topics.live
        self._waited_s = 0.0  # for the present round's first permit
        self.progress = TrainerStatus()

    def candidate(self, topic: str) -> Candidate:
        """A topic's candidate, created on first use."""
        if topic not in self._candidates:
            self._candidates[topic] = Candidate(topic, self._settings, self._workers)
        return self._candidates[topic]

    def run_round(self) -> bool:
        """Run a round of the topic with the highest priority; False if nothing was trained.

        A topic that cannot be trained, or whose round raises, backs off: it must neither keep the
        others waiting nor be tried in a loop. While requests run it waits first: what it would
        ask shards and registry takes processor time.
        """
        self._client.until_idle()
        self._add_topics(self._client.added_topics())
        stats = self._client.stats()
        self._update_live_stats()
        self._topics.update_progress(self._client.topic_progress())
        views = self._topics.views(stats, self._candidates)
        wanted = topic_priorities(views, self._settings.schedule)
        assignment = self._client.acquire_topic(wanted)
        topic = assignment.topic
        if topic is None and wanted:
            self._update(state="waiting for a topic", topic=None)
            return False
        if topic is None:
            self._update(state="no new records", topic=None)
            return False
        before = self.progress.micro_steps
        try:
            return self._wait_for_permit(topic) and self._train_topic(topic, assignment)
        finally:
            progress = self._topics.progress(topic, self._candidates.get(topic))
            self._client.release_topic(progress if self.progress.micro_steps > before else None)

    def _train_topic(self, topic: str, assignment: Assignment) -> bool:
        """Run a round of a topic; on failure, let it back off."""
        stats, versions = self._client.stats(), self._client.versions()
        if versions is None:
            self._update(state="waiting for the registry", topic=None)
            return False
        state = self._topics.state(topic)
        seen = self._topics.inserted(topic, stats)
        fruitless = self._topics.counts(topic).fruitless
        if topic not in stats and topic != GENERAL:  # slow or dead: the next round shows which
            self._update(state="waiting for its shard")
            return False
        try:
            trained = self._round(topic, assignment, versions, stats)
        except TopicNotTrainable as why:
            state.back_off(self._clock())
            self._update(state=str(why))
            logger.info("%s backs off: %s", topic, why)
            return False
        except LeaseRevoked:
            self._end_revoked(topic)
            return False
        except Stopped:
            raise
        except Exception as error:
            state.back_off(self._clock())
            if isinstance(error, WorkerGroupError):
                self._drop_candidates()
            raise
        finally:
            self._steps.watch({})
            state.ended_at = self._clock()
        if trained:  # one that was broken off, or found no time, leaves its records new
            state.inserted = seen
        state.backoff.reset()
        self._note_plateau(topic, fruitless)
        return trained

    def _add_topics(self, added: Mapping[str, str]) -> None:
        """Add new topics; they start as copies of other experts."""
        paths = self._settings.draft_paths
        for topic, like in added.items():
            if topic in self._topics or like not in paths:
                continue
            paths = {**paths, topic: paths[like]}
            self._settings = replace(self._settings, draft_paths=paths)
            self._topics.add_topic(topic)
            logger.info("%s: a new topic", topic)

    def _drop_candidates(self) -> None:
        """Drop what lost ranks held a part of: the next round starts from what was published."""
        for topic in self._candidates:
            state = self._topics.state(topic)
            state.counts = state.counts.restarted()
        self._candidates.clear()
        if self._workers is not None:
            self._workers.stop()

    def _wait_for_permit(self, topic: str) -> bool:
        """Wait for a round's first permit: to load a draft takes seconds of a processor.

        False if the lease was revoked.
        """
        self._update(state="waiting for a permit", topic=topic)
        since = self._clock()
        try:
            self._steps.wait_for_permit()
        except LeaseRevoked:
            self._end_revoked(topic)
            return False
        self._waited_s = self._clock() - since
        self._client.release_permit()
        self._update_live_stats()  # a trial may have been decided meanwhile
        return True

    def _end_revoked(self, topic: str) -> None:
        self._update(state="waiting for a topic", topic=None)
        logger.info("%s: the round is over, its lease was revoked", topic)

    def _round(
        self,
        topic: str,
        assignment: Assignment,
        versions: dict[str, int],
        stats: StatsByTopic,
    ) -> bool:
        """Train and evaluate; False if no time for training was left."""
        candidate = self.candidate(topic)
        self._follow_registry(candidate, versions.get(topic, 0), stale=assignment.stale)
        if topic != GENERAL or stats.keys() >= self._settings.draft_paths.keys():
            state = self._topics.state(topic)
            rejected = state.counts.rejections > 0
            if candidate.begin_round(to_learn_from(stats, topic), rejected=rejected):
                state.counts = state.counts.outgrown()
        self._base_on_general(candidate, versions.get(GENERAL, 0))
        self._update(state="training", topic=topic, steps=candidate.steps)
        self._steps.watch({t: shard for t, shard in stats.items() if topic in (t, GENERAL)})
        train = candidate.usable(self._training_records(topic, stats))
        if not train:
            raise TopicNotTrainable("no usable records to learn from")
        candidate.test(train, self._steps.wait_for_permit)
        candidate.grow_vocabulary(self._steps.usable(train))
        held_out = self._sample(topic, self._settings.held_out_records, "held_out", stats)
        held_out = one_per_conversation(candidate.usable(self._steps.usable(held_out)))
        if len(held_out) < max(self._settings.gate.min_records, 2):
            raise TopicNotTrainable("too few usable held-out records of different conversations")
        if (coverage := candidate.coverage(held_out)) is not None:
            self._update(vocabulary_coverage={**self.progress.vocabulary_coverage, topic: coverage})
        try:
            drifting = self._live.drifting(topic)
            waited_s, self._waited_s = self._waited_s, 0.0
            if not self._steps.run(candidate, train, drifting=drifting, waited_s=waited_s):
                return False
        except Diverged:
            self._client.release_permit()
            facts: Decision = {"reason": _DIVERGED, **_training_facts(candidate)}
            self._reject(candidate, facts, reset=True)
            return True
        self._client.release_permit()
        if self._steps.losses:
            self._client.update_losses(topic, dict(self._steps.losses))
        if not self._may_publish(candidate):
            return True
        self._update(state="evaluating")
        self._evaluate(candidate, held_out, train)
        return True

    def _may_publish(self, candidate: Candidate) -> bool:
        """Whether the registry takes a candidate of this topic now."""
        self._update_live_stats()
        if not self._live.is_current(candidate.topic, candidate.version):  # the next round follows
            self._update(state="rolled back")
            return False
        if self._live.undecided(candidate.topic):  # a new candidate would throw evidence away
            self._update(state="waiting for the canary")
            return False
        if (why := self._live.closed(candidate.topic)) is not None:
            logger.info("%s: not published, %s", candidate.topic, why)
            self._update(state="not publishing")
            return False
        return True

    def _update_live_stats(self) -> None:
        """Fetch live statistics; train topics that begin to drift at the full rate."""
        for topic in self._live.update(self._client.topic_status()):
            if topic in self._candidates:
                self._candidates[topic].refresh_rate()

    def _follow_registry(self, candidate: Candidate, stable: int, *, stale: bool) -> None:
        """Load the stable weights unless the candidate continues them or its own version on trial.

        Args:
            candidate: of the topic.
            stable: weight_version.
            stale: whether another trainer has trained the topic since.
        """
        topic, state = candidate.topic, self._topics.state(candidate.topic)
        counts = state.counts.beside(stable)
        current = candidate.version in (stable, self._live.candidate(topic))
        if not current or (stale and candidate.steps):
            withdrawn, rate_share = candidate.version > stable and not stale, candidate.rate_share
            self._load_stable(candidate)
            counts = counts.withdrawn() if withdrawn else counts.restarted()
            if withdrawn:
                candidate.scale_rate(decreased(rate_share))
            if self._live.drifting(topic):
                candidate.refresh_rate()
        if (others := self._topics.others_progress(topic)) is not None:
            counts, state.inserted = others.counts.beside(stable), others.inserted
            candidate.acceptance = others.acceptance
            candidate.scale_rate(others.rate_share)
        state.counts = counts  # not before: weights that cannot be had are followed again

    def _load_stable(self, candidate: Candidate) -> None:
        topic = candidate.topic
        newest = self._client.weights(topic)
        if newest is None:
            raise TopicNotTrainable("the registry does not hand its weights out")
        version, flat = newest
        if flat is None and version > 0:
            logger.warning(
                "%s: the weights of version %d are lost, training starts from the initial ones",
                topic,
                version,
            )
        candidate.load(version, flat)

    def _base_on_general(self, candidate: Candidate, version: int) -> None:
        """Put a new expert's first adapters on the served weights of ``general``."""
        newest = self._client.weights(GENERAL) if version and candidate.awaits_general else None
        if newest is not None and newest[1] is not None:
            candidate.rebase(newest[1])
            logger.info("%s: adapters on general's version %d", candidate.topic, newest[0])

    def _training_records(self, topic: str, stats: StatsByTopic) -> list[ReplayRecord]:
        """Training records, synthetic ones in their proportion."""
        count, have = self._settings.train_records, to_learn_from(stats, topic)
        made = total(stats, topic, lambda shard: shard.records("synthetic"))
        synthetic = round(count * made / max(have, 1))
        records = self._sample(topic, count - synthetic, "train", stats)
        return records + (self._sample(topic, synthetic, "synthetic", stats) if synthetic else [])

    def _sample(
        self, topic: str, count: int, split: Split, stats: StatsByTopic
    ) -> list[ReplayRecord]:
        shares = {topic: count}
        if topic == GENERAL:
            have = {name: shard.records(split) for name, shard in stats.items()}
            all_records = max(sum(have.values()), 1)
            shares = {name: -(-count * kept // all_records) for name, kept in have.items()}
        records: list[ReplayRecord] = []
        for name, share in shares.items():
            self._client.release_permit()  # a shard may answer late
            for number, record in enumerate(self._client.sample(name, share, split)):
                if number % _AT_ONCE == 0:
                    self._steps.wait_for_permit()
                records.append(record)
        return records

    def _on_step(self, steps: int, seconds: float, loss: float) -> None:
        self._update(
            steps=steps,
            micro_steps=self.progress.micro_steps + 1,
            training_s=self.progress.training_s + seconds,
            loss=loss if math.isfinite(loss) else None,
        )

    def _evaluate(
        self,
        candidate: Candidate,
        held_out: Sequence[ReplayRecord],
        train: Sequence[ReplayRecord],
    ) -> None:
        """Compare the candidate with the served draft; publish or reject it."""
        scores, served, state, tests, halfway = candidate.compare(
            held_out, self._steps.wait_for_permit
        )
        self._client.release_permit()
        if not self._may_publish(candidate):  # what it was compared with may be served no more
            return
        looks = self._topics.state(candidate.topic).counts.rejections + 1
        decision = decide(scores, served, self._settings.gate, earlier=tests, looks=looks)
        facts: Decision = {
            **decision.facts(),
            **_training_facts(candidate),
            "train_records": len(train),
            "halfway": halfway,
        }
        if not decision.publish:
            if math.isfinite(decision.served):
                candidate.acceptance = decision.served
            self._reject(candidate, facts, reset=_worse(decision))
            return
        candidate.add_basis(state, self._steps.usable(train), self._steps.wait_for_permit)
        self._steps.wait_for_permit()
        flat = flatten(state)
        self._client.release_permit()  # the registry writes a file, and may be slow
        if not self._may_publish(candidate):  # evaluation takes long when permits are rare
            return
        try:
            version = self._client.publish(candidate.topic, flat, facts, candidate.version)
        except CandidateRefusedError as why:  # is about the topic, not these weights: they train on
            logger.info("%s: not published, %s", candidate.topic, why)
            self._update(state="not publishing")
            return
        except ValueError:
            candidate.reset()
            self._count_rejection(candidate.topic, hopeless=True)
            return
        topic, candidate.acceptance = candidate.topic, decision.candidate
        topic_state = self._topics.state(topic)
        topic_state.counts = topic_state.counts.published()
        self._live.published(topic, version)
        self._update(rounds=self.progress.rounds + 1, published=self.progress.published + 1)
        logger.info("%s: published version %d %s", topic, version, facts)
        # a promotion during the round is known to the live statistics first
        stable = max(self._live.stable(topic), topic_state.counts.stable)
        wait = self._steps.wait_for_permit
        candidate.mark_published(version, state, held_out, scores, wait, stable=stable)
        self._client.release_permit()

    def _reject(self, candidate: Candidate, facts: Decision, *, reset: bool) -> None:
        """Reject the candidate; reset it if it is worse than the served draft.

        One that is only not shown to be better trains on: small gains add up over rounds.
        """
        if reset:
            candidate.reset()
        upper_bound = facts.get("gain_upper_bound")  # None if scores are not finite
        hopeless = upper_bound is None or upper_bound < self._settings.schedule.least_hope
        self._count_rejection(candidate.topic, hopeless=hopeless)
        logger.info("%s: rejected %s", candidate.topic, facts)
        self._client.reject(candidate.topic, facts)

    def _note_plateau(self, topic: str, before: int) -> None:
        """Note that a topic has reached a plateau; ``before`` are fruitless rounds before this."""
        now = self._topics.state(topic).counts.fruitless
        enough = self._settings.schedule.max_rejections
        if before < enough <= now:
            why = f"{now} rounds in a row without an expected gain: training pauses"
            self._client.note(topic, {"outcome": "plateau", "reason": why})

    def _count_rejection(self, topic: str, *, hopeless: bool) -> None:
        state = self._topics.state(topic)
        state.counts = state.counts.rejected(hopeless=hopeless)
        self._update(rounds=self.progress.rounds + 1, rejected=self.progress.rejected + 1)

    def _update(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)


def _training_facts(candidate: Candidate) -> Decision:
    return {"steps": candidate.steps, "rate_share": round(candidate.rate_share, 4)}


def _worse(decision: GateDecision) -> bool:
    """Whether a candidate is broken, or shown to be worse than the served draft."""
    return decision.reason == NOT_FINITE or decision.gain_upper_bound < 0.0
