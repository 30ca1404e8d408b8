"""The micro-steps of a round, each with a permit, on records that may still be used."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

import numpy as np

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import micro_batches
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.client import TrainerClient
from paceline.actors.training.distiller import MicroStep
from paceline.actors.training.progress import (
    Diverged,
    LeaseRevoked,
    TopicNotTrainable,
    wait_for_permit,
)
from paceline.actors.training.read_records import ReadRecords
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.shares import Share
from paceline.actors.training.topic_schedule import round_length
from paceline.actors.training.topic_stats import StatsByTopic

logger = logging.getLogger(__name__)

_CHECK_S = 1.0  # between two looks at the shards while a permit is waited for


class StepRunner:
    """Trains a candidate for the length of a round."""

    def __init__(
        self,
        settings: TrainerSettings,
        client: TrainerClient,
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        stopped: Callable[[], bool],
        on_step: Callable[[int, float, float], None],
    ) -> None:
        """Prepare to run.

        Args:
            settings: see TrainerSettings.
            client: grants permits.
            clock: monotonic seconds.
            sleep: waits some seconds.
            stopped: whether to end; read at every wait.
            on_step: called after every micro-step with the candidate's steps, seconds and loss.
        """
        self._settings = settings
        self._client = client
        self._clock = clock
        self._sleep = sleep
        self._stopped = stopped
        self._on_step = on_step
        self._rng = np.random.default_rng(settings.seed)
        self._permit_share = 1.0  # of the time
        self.losses: dict[str, float] = {}  # of this round's records, by request_id
        self._read = ReadRecords({})
        self._checked_at = -math.inf  # monotonic seconds

    def watch(self, stats: StatsByTopic) -> None:
        """Watch over the records that are read from these shards from now on; {} ends it."""
        self._read, self._checked_at = ReadRecords(stats), -math.inf

    def usable(self, records: Sequence[ReplayRecord]) -> list[ReplayRecord]:
        """Those of the records that were within retention at the last look at the shards."""
        return [record for record in records if record.created >= self._read.usable_from]

    def run(
        self,
        candidate: Candidate,
        records: Sequence[ReplayRecord],
        *,
        drifting: bool,
        waited_s: float = 0.0,
    ) -> bool:
        """Run micro-steps for a round's time; whether the weights moved.

        Args:
            candidate: to train.
            records: to train on.
            drifting: whether the topic drifts.
            waited_s: wait for the round's first permit, seconds.

        Raises:
            Diverged: the loss is not finite.
            LeaseRevoked: the round is over.
            TopicNotTrainable: all records have expired.
            Stopped: the trainer ends.
        """
        self.losses.clear()
        started, spent, length = self._clock(), 0.0, self._length(drifting)
        first, shares = candidate.steps, self._shares(candidate, records)
        per_step = self._settings.distiller.accumulation
        while spent < length or candidate.micro_steps_left < per_step:
            self.wait_for_permit()
            begun = self._clock()
            if spent:
                self._permit_share = spent / (waited_s + begun - started)
            if begun - started > self._settings.max_round_s:
                break
            batch, share = next(shares)
            if len(self.usable(batch)) < len(batch):  # expired since its step was put together
                break
            waited = 0.0

            def before_step() -> None:
                nonlocal waited
                since = self._clock()
                self.wait_for_permit()
                waited += self._clock() - since

            step = candidate.learn(share, before_step)
            self._keep_losses(candidate.topic, batch, step)
            took = self._clock() - begun - waited
            spent += took
            self._on_step(candidate.steps, took, step.loss)
            if not math.isfinite(step.loss):
                raise Diverged
        return candidate.steps > first

    def _shares(
        self, candidate: Candidate, records: Sequence[ReplayRecord]
    ) -> Iterator[tuple[list[ReplayRecord], Share]]:
        """Endless micro-steps, epoch after epoch; those of one step are weighed together.

        The first ones complete the step that an earlier round left. Records that expire are left
        out from the next step on.
        """
        size = self._settings.micro_batch
        epochs = iter(lambda: micro_batches(self.usable(records), size, self._rng), [])
        batches = filter(None, map(self.usable, chain.from_iterable(epochs)))
        while True:
            step = list(islice(batches, candidate.micro_steps_left))
            if not step:
                raise TopicNotTrainable("all records have expired")
            yield from zip(step, candidate.make_shares(step), strict=True)

    def _keep_losses(self, topic: str, batch: Sequence[ReplayRecord], step: MicroStep) -> None:
        """Keep the losses on the topic's own records, if its shard uses them."""
        if not self._settings.report_losses:
            return
        for record, loss in zip(batch, step.record_losses, strict=True):
            # the loss of `general` on another topic's record says nothing of that topic's expert
            if record.topic == topic:
                self.losses[record.request_id] = loss

    def _length(self, drifting: bool) -> float:
        settings = self._settings
        return round_length(
            settings.round_seconds,
            self._permit_share,
            settings.max_round_s,
            drifting=drifting,
            settings=settings.schedule,
        )

    def wait_for_permit(self) -> float:
        """Return when a micro-step may begin.

        Returns:
            creation, unix seconds, of the oldest records that may still be used.

        Raises:
            LeaseRevoked: the round is over: its lease was revoked, or its records were purged.
            Stopped: the trainer ends.
        """
        wait_for_permit(
            self._client.acquire_permit,
            self._until_idle,
            self._settings.poll_s,
            sleep=self._sleep,
            stopped=self._stopped,
        )
        return self._read.usable_from

    def _until_idle(self) -> None:
        """Wait until serving is idle; then look what has become of the round's records.

        Only here, without a permit: a shard that answers late must not keep a request waiting.
        """
        self._client.until_idle()
        if not self._read or self._clock() - self._checked_at < _CHECK_S:
            return
        if self._read.update(self._client.stats()):
            logger.info("records were purged: the round that has read them ends")
            raise LeaseRevoked
        self._checked_at = self._clock()
