"""The micro-steps of a round, each with leave of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.backoff import Patience
from paceline.actors.training.batches import micro_batches
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.client import World
from paceline.actors.training.distiller import MicroStep
from paceline.actors.training.progress import Diverged
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.shares import Share
from paceline.actors.training.topic_schedule import round_length


class Drill:
    """Teaches a candidate for as long as a round lasts; waits wherever there is no leave."""

    def __init__(
        self,
        settings: TrainerSettings,
        world: World,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        stopped: Callable[[], bool],
        taken: Callable[[int, float, float], None],
    ) -> None:
        """Teach nothing yet.

        Args:
            settings: see TrainerSettings.
            world: gives leave.
            clock: monotonic seconds.
            sleep: waits some seconds.
            stopped: whether to end; looked at wherever it waits.
            taken: hears of every micro-step: the candidate's steps, its seconds and its loss.
        """
        self._settings = settings
        self._world = world
        self._clock = clock
        self._patience = Patience(settings.poll_s, sleep=sleep, stopped=stopped)
        self._taken = taken
        self._rng = np.random.default_rng(settings.seed)
        self._leave = 1.0
        self.losses: dict[str, float] = {}  # of this round's records, by request

    def train(
        self,
        candidate: Candidate,
        records: Sequence[ReplayRecord],
        *,
        drifting: bool,
        waited_s: float = 0.0,
    ) -> bool:
        """Micro-steps for a round's time; whether the weights moved.

        Args:
            candidate: to teach.
            records: to learn from.
            drifting: whether its topic drifts.
            waited_s: for leave to begin the round at all.

        Raises:
            Diverged: the loss is no number any more.
            Ousted: the broker has ended the round.
            Stopped: the trainer is to end.
        """
        self.losses.clear()
        started, spent, length = self._clock(), 0.0, self._length(drifting)
        first, lessons = candidate.steps, self._lessons(candidate, records)
        whole = self._settings.distiller.accumulation
        while spent < length or candidate.lacking < whole:
            self.wait_for_leave()
            begun = self._clock()
            self._leave = spent / (waited_s + begun - started) if spent else self._leave
            if begun - started > self._settings.max_round_s:
                break
            batch, share = next(lessons)
            waited = 0.0

            def before_step() -> None:
                nonlocal waited
                since = self._clock()
                self.wait_for_leave()
                waited += self._clock() - since

            step = candidate.practise(share, before_step)
            self._note_losses(candidate.topic, batch, step)
            took = self._clock() - begun - waited
            spent += took
            self._taken(candidate.steps, took, step.loss)
            if not math.isfinite(step.loss):
                raise Diverged
        return candidate.steps > first

    def _lessons(
        self, candidate: Candidate, records: Sequence[ReplayRecord]
    ) -> Iterator[tuple[list[ReplayRecord], Share]]:
        """Micro-steps without end, epoch after epoch; those of one step are weighed together.

        What an earlier round left of a step comes first.
        """
        size = self._settings.micro_batch
        epochs = iter(lambda: micro_batches(records, size, self._rng), None)
        batches = chain.from_iterable(epochs)
        while True:
            step = list(islice(batches, candidate.lacking))
            yield from zip(step, candidate.prepare(step), strict=True)

    def _note_losses(self, topic: str, batch: Sequence[ReplayRecord], step: MicroStep) -> None:
        """Keep the losses on a topic's own records, where its shard wants to know them."""
        if not self._settings.report_losses:
            return
        for record, loss in zip(batch, step.record_losses, strict=True):
            # what `general` makes of another topic's record is nothing to that topic's expert
            if record.topic == topic:
                self.losses[record.request_id] = loss

    def _length(self, drifting: bool) -> float:
        settings = self._settings
        return round_length(
            settings.round_seconds,
            self._leave,
            settings.max_round_s,
            drifting=drifting,
            settings=settings.schedule,
        )

    def wait_for_leave(self) -> None:
        """Return when a micro-step may begin; raises Ousted and Stopped."""
        self._patience.until(self._world.may_train)
