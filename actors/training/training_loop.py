"""Rounds of learning: choose a topic, train while leave is given, judge, publish or reject."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.router.policy import GENERAL
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.client import World
from paceline.actors.training.gate import NOT_FINITE, GateDecision, judge
from paceline.actors.training.learning_rate import Stride
from paceline.actors.training.permits import Assignment
from paceline.actors.training.progress import Diverged, Ousted, Progress, Stopped, Unfit
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.step_runner import Drill
from paceline.actors.training.topic_schedule import wants
from paceline.actors.training.topic_stats import Survey, inserted, to_learn_from, total
from paceline.actors.training.worker_group import WorkerGroup, WorkerGroupError
from paceline.actors.weights.cooldown import NotNow

logger = logging.getLogger(__name__)

# Raised with every change of what is decided here, in the gate, the candidate or the stride:
# results of benchmarks that were made under other rules are then not taken for today's.
RULES = 1
_AT_ONCE = 32  # records that are decoded without asking for leave: some milliseconds
_DIVERGED = "the training loss is not finite"


class Rounds:
    """The trainer's work without thread and actor around it: call :meth:`tick` for ever."""

    def __init__(
        self,
        settings: TrainerSettings,
        world: World,
        *,
        workers: WorkerGroup | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Nothing is loaded yet.

        Args:
            settings: see TrainerSettings.
            world: shards, registry and board.
            workers: of the other ranks; None trains alone.
            clock: monotonic seconds.
            sleep: waits some seconds.
            stopped: whether to end; looked at wherever the trainer waits.
        """
        self._settings = settings
        self._world = world
        self._workers = workers
        self._clock = clock
        self._drill = Drill(
            settings, world, clock=clock, sleep=sleep, stopped=stopped, taken=self._taken
        )
        self._candidates: dict[str, Candidate] = {}
        self._survey = Survey(settings, clock)
        self._outlook = self._survey.outlook
        self._waited_s = 0.0  # for the present round's first leave
        self.progress = Progress()

    def candidate(self, topic: str) -> Candidate:
        """A topic's candidate, made when first asked for."""
        if topic not in self._candidates:
            self._candidates[topic] = Candidate(topic, self._settings, self._workers)
        return self._candidates[topic]

    def drifts(self) -> dict[str, dict[str, Any]]:
        """Per topic how its live acceptance moves; any thread may ask. See Outlook.figures."""
        return self._outlook.figures()

    def tick(self) -> bool:
        """One round of the topic that needs it most; False where nothing was trained.

        A topic that cannot be taught, or whose round raises, rests for a while, longer each
        time: it must neither keep the others waiting nor be asked for in a loop.
        """
        self._enlist(self._world.added())
        stats = self._world.stats()
        self._look_out()
        self._survey.hear(self._world.notes())
        wanted = wants(self._survey.views(stats, self._candidates), self._settings.schedule)
        turn = self._world.take(wanted)
        if turn.topic is None and wanted:
            self._note(state="waiting for a topic", topic=None)
            return False
        if turn.topic is None:
            self._note(state="no new records", topic=None)
            return False
        learnt = self.progress.micro_steps
        try:
            return self._leave(turn.topic) and self._teach(turn.topic, turn, self._world.stats())
        finally:
            note = self._survey.note(turn.topic, self._candidates.get(turn.topic))
            self._world.give_back(note if self.progress.micro_steps > learnt else None)

    def _teach(self, topic: str, turn: Assignment, stats: dict[str, dict[str, Any]]) -> bool:
        """A round of a topic, and what to do where it fails."""
        versions = self._world.versions()
        if versions is None:
            self._note(state="waiting for the registry", topic=None)
            return False
        seen, fruitless = self._survey.seen(topic), self._fruitless(topic)
        if topic not in stats and topic != GENERAL:  # slow or dead: the next look shows which
            self._note(state="waiting for its shard")
            return False
        try:
            trained = self._round(topic, turn, versions, stats)
        except Unfit as why:
            seen.rest.begin(self._clock(), self._settings.schedule)
            self._note(state=str(why))
            logger.info("%s rests: %s", topic, why)
            return False
        except Ousted:
            self._ousted(topic)
            return False
        except Stopped:
            raise
        except Exception as error:
            seen.rest.begin(self._clock(), self._settings.schedule)
            if isinstance(error, WorkerGroupError):
                self._start_over()
            raise
        finally:
            seen.ended_at = self._clock()
        seen.rest.end()
        self._note_plateau(topic, fruitless)
        return trained

    def _enlist(self, added: Mapping[str, str]) -> None:
        """Take up topics that were added meanwhile; they start as other experts' copies."""
        paths = self._settings.draft_paths
        for topic, like in added.items():
            if self._survey.knows(topic) or like not in paths:
                continue
            paths = {**paths, topic: paths[like]}
            self._settings = replace(self._settings, draft_paths=paths)
            self._survey.enlist(topic)
            logger.info("%s: a new topic", topic)

    def _start_over(self) -> None:
        """Drop what lost ranks held a part of: the next round begins from what was published."""
        self._candidates.clear()
        if self._workers is not None:
            self._workers.stop()

    def _leave(self, topic: str) -> bool:
        """Wait for leave: putting a draft together alone takes seconds of a processor.

        False where the broker knows of no round of this trainer.
        """
        self._note(state="waiting for leave", topic=topic)
        since = self._clock()
        try:
            self._drill.wait_for_leave()
        except Ousted:
            self._ousted(topic)
            return False
        self._waited_s = self._clock() - since
        self._world.rest()
        self._look_out()  # what is on trial may have been decided meanwhile
        return True

    def _ousted(self, topic: str) -> None:
        self._note(state="waiting for a topic", topic=None)
        logger.info("%s: the round is over, the broker does not know of it", topic)

    def _round(
        self,
        topic: str,
        turn: Assignment,
        versions: dict[str, int],
        stats: dict[str, dict[str, Any]],
    ) -> bool:
        """Train and judge; False where no time for training was left."""
        candidate = self.candidate(topic)
        self._follow(candidate, versions.get(topic, 0), anew=turn.stale)
        if topic != GENERAL or stats.keys() >= self._settings.draft_paths.keys():
            candidate.begin(to_learn_from(stats, topic))
        self._base_on_general(candidate, versions.get(GENERAL, 0))
        self._note(state="training", topic=topic, steps=candidate.steps)
        self._survey.seen(topic).inserted = inserted(stats, topic)
        train = candidate.usable(self._lesson(topic, stats))
        if not train:
            raise Unfit("no usable records to learn from")
        held_out = self._draw(topic, self._settings.held_out_records, "held_out", stats)
        held_out = candidate.usable(held_out)
        if len(held_out) < max(self._settings.gate.min_records, 2):
            raise Unfit("too few usable records to be judged by")
        try:
            drifting = self._outlook.drifting(topic)
            waited_s, self._waited_s = self._waited_s, 0.0
            if not self._drill.train(candidate, train, drifting=drifting, waited_s=waited_s):
                return False
        except Diverged:
            self._world.rest()
            self._turn_down(candidate, {"reason": _DIVERGED} | _work(candidate), drop=True)
            return True
        self._world.rest()
        if self._drill.losses:
            self._world.update_losses(topic, dict(self._drill.losses))
        if not self._may_publish(candidate):
            return True
        self._note(state="evaluating")
        self._decide(candidate, held_out, len(train))
        return True

    def _may_publish(self, candidate: Candidate) -> bool:
        """Whether the registry's trials leave room for a candidate of this topic now."""
        self._look_out()
        if self._outlook.withdrawn(candidate.topic, candidate.version):  # the next round follows
            self._note(state="rolled back")
            return False
        if self._outlook.undecided(candidate.topic):  # another now would throw evidence away
            self._note(state="waiting for the canary")
            return False
        if (why := self._outlook.closed(candidate.topic)) is not None:
            logger.info("%s: not published, %s", candidate.topic, why)
            self._note(state="not publishing")
            return False
        return True

    def _look_out(self) -> None:
        """See how the drafts do, and say where one begins to lose its topic."""
        for topic in self._outlook.update(self._world.live()):
            figures = self._outlook.drift_figures(topic)
            logger.info("%s: drift %s", topic, figures)
            self._world.note(topic, {"outcome": "drift", **figures})
            if topic in self._candidates:
                self._candidates[topic].hurry()

    def _follow(self, candidate: Candidate, wanted: int, *, anew: bool) -> None:
        """Have the candidate start from what is really served, or is its own and on trial.

        Args:
            candidate: of the topic.
            wanted: the stable weight_version.
            anew: whether another trainer has taught the topic since: what is in memory is stale.
        """
        seen = self._survey.seen(candidate.topic)
        on_trial = self._outlook.candidate(candidate.topic)
        if wanted > seen.stable:
            seen.stable, seen.rolled_back = wanted, 0
        if candidate.version not in (wanted, on_trial) or (anew and candidate.steps):
            withdrawn, stride = candidate.version > wanted and not anew, candidate.stride
            seen.rolled_back += withdrawn
            self._take_served(candidate)
            if withdrawn:
                candidate.step_by(stride.shorter())
            if self._outlook.drifting(candidate.topic):
                candidate.hurry()
            # What held-out records like and live requests do not shall not be tried for ever.
            candidate.rejections = candidate.fruitless = seen.rolled_back
        if (told := self._survey.told(candidate.topic)) is not None:
            candidate.rejections, candidate.fruitless = told.rejections, told.fruitless
            seen.rolled_back = told.rolled_back
            candidate.step_by(Stride(told.rate_share))

    def _take_served(self, candidate: Candidate) -> None:
        topic = candidate.topic
        newest = self._world.weights(topic)
        if newest is None:
            raise Unfit("the registry does not hand its weights out")
        version, flat = newest
        if flat is None and version > 0:
            logger.warning(
                "%s: the weights of version %d are lost, learning starts from the initial ones",
                topic,
                version,
            )
        candidate.take(version, flat)

    def _base_on_general(self, candidate: Candidate, version: int) -> None:
        """Lay first adapters on what ``general`` is served as; it may have learnt meanwhile."""
        newest = self._world.weights(GENERAL) if version and candidate.awaits_general else None
        if newest is not None and newest[1] is not None:
            candidate.start_from(newest[1])
            logger.info("%s: adapters on general's version %d", candidate.topic, newest[0])

    def _lesson(self, topic: str, stats: dict[str, dict[str, Any]]) -> list[ReplayRecord]:
        """Records to learn from, synthetic ones in their proportion."""
        count, have = self._settings.train_records, to_learn_from(stats, topic)
        synthetic = round(count * total(stats, topic, "records_synthetic") / max(have, 1))
        drawn = self._draw(topic, count - synthetic, "train", stats)
        return drawn + (self._draw(topic, synthetic, "synthetic", stats) if synthetic else [])

    def _draw(
        self, topic: str, count: int, split: str, stats: dict[str, dict[str, Any]]
    ) -> list[ReplayRecord]:
        shares = {topic: count}
        if topic == GENERAL:
            have = {name: int(facts[f"records_{split}"]) for name, facts in stats.items()}
            total = max(sum(have.values()), 1)
            shares = {name: -(-count * kept // total) for name, kept in have.items()}
        drawn: list[ReplayRecord] = []
        for name, share in shares.items():
            for record in self._world.sample(name, share, split):
                drawn.append(record)
                if len(drawn) % _AT_ONCE == 0:
                    self._drill.wait_for_leave()
        return drawn

    def _taken(self, steps: int, seconds: float, loss: float) -> None:
        """Note a micro-step."""
        self._note(
            steps=steps,
            micro_steps=self.progress.micro_steps + 1,
            training_s=self.progress.training_s + seconds,
            loss=loss if math.isfinite(loss) else None,
        )

    def _decide(
        self, candidate: Candidate, held_out: Sequence[ReplayRecord], train_records: int
    ) -> None:
        scores, served, state = candidate.compare(held_out, self._drill.wait_for_leave)
        self._world.rest()
        looks = candidate.rejections + 1
        decision = judge(scores, served, self._settings.gate, looks=looks)
        facts = decision.facts() | _work(candidate) | {"train_records": train_records}
        if not decision.publish:
            candidate.acceptance = _known(decision.served, candidate.acceptance)
            self._turn_down(candidate, facts, drop=_hopeless(decision))
            return
        self._drill.wait_for_leave()
        if not self._may_publish(candidate):  # judging takes long where leave is seldom given
            return
        flat = candidate.flat(state)
        self._world.rest()  # the registry writes a file, and may be slow
        try:
            version = self._world.publish(candidate.topic, flat, facts)
        except NotNow as why:  # said of the topic, not of these weights: they go on learning
            logger.info("%s: not published, %s", candidate.topic, why)
            self._note(state="not publishing")
            return
        except ValueError:
            candidate.reset()
            candidate.fruitless += 1
            self._rejected(candidate)
            return
        candidate.acceptance = decision.candidate
        self._note(rounds=self.progress.rounds + 1, published=self.progress.published + 1)
        logger.info("%s: published version %d %s", candidate.topic, version, facts)
        candidate.published(version, state, held_out, scores, self._drill.wait_for_leave)
        self._world.rest()

    def _turn_down(self, candidate: Candidate, facts: dict[str, Any], *, drop: bool) -> None:
        """Reject the candidate, and start it again where it is hopeless.

        One that is not shown to be better keeps what it has learnt: small gains add up over rounds.
        """
        if drop:
            candidate.reset()
        hope = facts.get("gain_upper_bound")  # None where scores are no numbers
        if hope is None or hope < self._settings.schedule.least_hope:
            candidate.fruitless += 1
        else:  # those in a row count; what live requests did not like is not forgotten by it
            kept = self._survey.seen(candidate.topic).rolled_back
            candidate.fruitless = min(candidate.fruitless, kept)
        self._rejected(candidate)
        logger.info("%s: rejected %s", candidate.topic, facts)
        self._world.reject(candidate.topic, facts)

    def _fruitless(self, topic: str) -> int:
        candidate = self._candidates.get(topic)
        return 0 if candidate is None else candidate.fruitless

    def _note_plateau(self, topic: str, before: int) -> None:
        """Say where a round has brought a topic to rest; ``before`` it, so many were fruitless."""
        now, enough = self._fruitless(topic), self._settings.schedule.max_rejections
        if before < enough <= now:
            why = f"{now} rounds in a row left little to hope for: it rests"
            self._world.note(topic, {"outcome": "plateau", "reason": why})

    def _rejected(self, candidate: Candidate) -> None:
        candidate.rejections += 1
        self._note(rounds=self.progress.rounds + 1, rejected=self.progress.rejected + 1)

    def _note(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)


def _work(candidate: Candidate) -> dict[str, Any]:
    """What a decision tells of the training behind it."""
    return {"steps": candidate.steps, "rate_share": round(candidate.stride.share, 4)}


def _hopeless(decision: GateDecision) -> bool:
    """Whether a candidate is broken, or shown to be worse than what is served."""
    return decision.reason == NOT_FINITE or decision.gain_upper_bound < 0.0


def _known(value: float, otherwise: float | None) -> float | None:
    return value if math.isfinite(value) else otherwise
