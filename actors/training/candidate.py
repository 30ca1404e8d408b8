"""One topic's candidate: the draft in training, and the served weights that it must beat."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from paceline.actors.replay.record import ReplayRecord
from paceline.actors.router.policy import GENERAL
from paceline.actors.training import optimizer_state as moments
from paceline.actors.training.batches import make_batch, usable, within
from paceline.actors.training.distiller import Distiller, MicroStep
from paceline.actors.training.expert_evaluation import records_per_forward, score_records
from paceline.actors.training.learning_rate import Stride, outgrown
from paceline.actors.training.optimizer_state import OptimizerState
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.shares import Share, of_a_step
from paceline.actors.training.worker_group import DistributedDistiller, WorkerGroup
from paceline.actors.weights.flat_weights import FlatWeights, flatten, unflatten

logger = logging.getLogger(__name__)


class Candidate:
    """Trains in place; keeps the served weights, and their scores on held-out records."""

    def __init__(
        self, topic: str, settings: TrainerSettings, workers: WorkerGroup | None = None
    ) -> None:
        """Load the initial weights as both candidate and served, version 0.

        Args:
            topic: an expert's name.
            settings: see TrainerSettings.
            workers: of the other ranks; None trains alone.
        """
        self.topic = topic
        self.version = 0
        self.rejections = self.fruitless = 0
        self.acceptance: float | None = None
        self._settings = settings
        path = settings.draft_paths[topic]
        self._distiller = (
            Distiller(path, settings.distiller)
            if workers is None
            else DistributedDistiller(topic, path, settings.distiller, workers)
        )
        self._began_with: int | None = None  # records, see :meth:`begin`
        self._ahead = False  # of what is served, when it was last looked at
        self._served: dict[str, Tensor] | None = None
        self._served_scores: dict[str, float] = {}
        self._max_length = min(settings.max_length, self._distiller.max_length)
        folder = settings.optimizer_dir
        self._memory = Path(folder) / topic if folder is not None else None

    @property
    def steps(self) -> int:
        """Optimizer steps since training last started from served weights."""
        return self._distiller.steps

    @property
    def stride(self) -> Stride:
        """The share of the learning rate that the next steps have."""
        return Stride(self._distiller.rate_share)

    @property
    def awaits_general(self) -> bool:
        """Whether its first adapters are still to be laid on what ``general`` is served as.

        So it is until an expert that starts as a copy of ``general`` has learnt or was published.
        """
        paths = self._settings.draft_paths
        if self._settings.distiller.adapter != "lora" or self.topic == GENERAL:
            return False
        is_copy = paths[self.topic] == paths.get(GENERAL)
        return is_copy and self.version == 0 and self.steps == 0

    def usable(self, records: Sequence[ReplayRecord]) -> list[ReplayRecord]:
        """Those that this draft can learn from or be judged by."""
        vocab = self._distiller.vocab_size
        return [within(record, vocab) for record in records if usable(record, vocab)]

    @property
    def lacking(self) -> int:
        """Micro-steps until the weights move."""
        return self._distiller.lacking

    def prepare(self, step: Sequence[Sequence[ReplayRecord]]) -> list[Share]:
        """The micro-batches of one step of the optimizer, for :meth:`practise` in this order."""
        branches, settings = self._distiller.branches, self._settings.distiller
        batches = [make_batch(records, self._max_length, branches=branches) for records in step]
        return of_a_step(batches, settings.objective)

    def practise(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        """One micro-step; ``before_step`` as in Distiller.learn."""
        return self._distiller.learn(share, before_step)

    def take(self, version: int, flat: FlatWeights | None) -> None:
        """Start over from weights that another process published; None are the initial ones.

        Where the optimizer's state at that publication lies on disk, training goes on with it.

        Raises:
            ValueError: for weights of another draft; the candidate stays what it was.
        """
        served = None if flat is None else unflatten(flat)
        self._distiller.reset(served)
        self._served = served
        self.version = version
        self.rejections = self.fruitless = 0
        self._began_with, self._ahead = None, False
        self.acceptance = None
        self._served_scores.clear()
        if flat is not None and self._memory is not None:
            self._resume(moments.load(self._memory, version, flat.digest()))

    def _resume(self, state: OptimizerState | None) -> None:
        if state is None:
            return
        try:
            self._distiller.resume(state)
        except ValueError as error:
            logger.warning("%s: %s, moments start anew", self.topic, error)

    def begin(self, records: int) -> None:
        """A round begins: start over where the topic has outgrown what this candidate began with.

        One that is ahead of what is served, though not yet shown to be, goes on: where little
        judges, much would be thrown away.

        Args:
            records: that the topic has to learn from.
        """
        if self.steps == 0 or self._began_with is None:
            self._began_with = records
        elif self.rejections and not self._ahead and outgrown(self._began_with, records):
            logger.info("%s: starts over, with %d records", self.topic, records)
            self.step_by(self.stride.longer())
            self._distiller.reset(self._served)
            self._began_with = records
            self.fruitless = 0  # those were another's; the looks of the gate go on

    def start_from(self, flat: FlatWeights) -> None:
        """Start training from another draft's weights; what is served stays what it is.

        Raises:
            ValueError: for weights that do not fit; the candidate stays what it was.
        """
        self._distiller.reset(unflatten(flat))

    def reset(self) -> None:
        """Give the candidate up and start again from the served weights, with shorter steps."""
        self.step_by(self.stride.shorter())
        self._distiller.reset(self._served)
        self._ahead = False

    def step_by(self, stride: Stride) -> None:
        """Learn at this share of the learning rate from now on."""
        self._distiller.scale_rate(stride.share)

    def hurry(self) -> None:
        """Its topic drifts: where the rate has fallen with the steps, it is the full one again."""
        self._distiller.refresh_rate()

    def compare(
        self, records: Sequence[ReplayRecord], before_batch: Callable[[], None]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[str, Tensor]]:
        """Acceptance per record of candidate and served draft, float64 ``[R]`` each.

        Args:
            records: usable ones.
            before_batch: called before each forward; may wait for leave, or raise.

        Returns:
            both scores, and the candidate's weights that were judged.
        """
        state = self._distiller.state_dict()
        candidate = self._score(state, records, before_batch)
        self._ahead = False  # until the served draft's are there
        new = [r for r in records if r.request_id not in self._served_scores]
        if new:
            scores = self._score(self._served, new, before_batch)
            for record, score in zip(new, scores, strict=True):
                self._served_scores[record.request_id] = float(score)
        served = np.array([self._served_scores[r.request_id] for r in records])
        # those that are drawn no more are forgotten: a topic may go unpublished for days
        self._served_scores = {
            r.request_id: float(score) for r, score in zip(records, served, strict=True)
        }
        self._ahead = bool(candidate.mean() > served.mean())
        return candidate, served, state

    def published(
        self,
        version: int,
        state: dict[str, Tensor],
        records: Sequence[ReplayRecord],
        scores: NDArray[np.float64],
        before_part: Callable[[], None] = lambda: None,
    ) -> None:
        """The judged candidate is the served draft now; training goes on from it.

        Args:
            version: as which it was published.
            state: the weights that were judged.
            records: that they were judged by.
            scores: of these.
            before_part: called before each piece of keeping moments; may wait for leave, or raise:
                then the moments of an earlier version stay on disk, which nobody takes for these.
        """
        self._served = state
        before, self.version = self.version, version
        self.rejections = self.fruitless = 0
        self.step_by(self.stride.longer())
        self._began_with, self._ahead = None, False
        self._served_scores = {
            record.request_id: float(score) for record, score in zip(records, scores, strict=True)
        }
        if self._memory is not None:
            before_part()
            digest = flatten(state).digest()
            before_part()
            kept = self._distiller.live_state()
            try:
                # what it replaces is still the stable one where it goes on trial now
                moments.save(self._memory, kept, version, digest, before_part, beside=before)
            except (OSError, SafetensorError):
                logger.warning("%s: moments were not kept", self.topic, exc_info=True)

    @staticmethod
    def flat(state: dict[str, Tensor]) -> FlatWeights:
        """Weights in transport."""
        return flatten(state)

    def _score(
        self,
        state: dict[str, Tensor] | None,
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], None],
    ) -> NDArray[np.float64]:
        before_batch()  # a draft is put together for it first
        return score_records(
            self._distiller.served(state),
            records,
            max_length=self._max_length,
            draft_top_k=self._settings.draft_top_k,
            batch_size=records_per_forward(self._settings.micro_batch, self._distiller.device.type),
            before_batch=before_batch,
        )
