"""One topic's candidate: the draft in training, and the served weights that it must beat."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from paceline.actors.general import GENERAL
from paceline.actors.replay.record import ReplayRecord, is_synthetic
from paceline.actors.training.batches import (
    Batch,
    make_batch,
    token_counts,
    usable,
    vocabulary_coverage,
    within,
)
from paceline.actors.training.distiller import Distiller, MicroStep
from paceline.actors.training.eagle import state_basis
from paceline.actors.training.expert_evaluation import records_per_forward, score_records
from paceline.actors.training.learning_rate import decreased, increased, outgrown
from paceline.actors.training.optimizer_state import (
    OptimizerState,
    load_checkpoint,
    save_checkpoint,
)
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.shares import Share, make_shares
from paceline.actors.training.worker_group import DistributedDistiller, WorkerGroup
from paceline.actors.weights.eagle import BASIS, EagleDraft, grown_vocabulary
from paceline.actors.weights.flat_weights import FlatWeights, flatten, unflatten

logger = logging.getLogger(__name__)

_BASIS_RECORDS = 32
_TESTS = 64  # records, the latest: what weights of long ago gained says little
_MOST_KNOWN = 2**14


class Compared(NamedTuple):
    """Weights beside the served ones.

    Attributes:
        scores: acceptance per held-out record, float64 ``[R]``.
        served: of the served draft, likewise.
        state: the weights.
        tests: gains on further records that the weights of their time were not trained on.
        halfway: whether they are half way between the served and the trained ones.
    """

    scores: NDArray[np.float64]
    served: NDArray[np.float64]
    state: dict[str, Tensor]
    tests: list[float]
    halfway: bool


def one_per_conversation(records: Iterable[ReplayRecord]) -> list[ReplayRecord]:
    """The last record of each conversation: its answers are much alike, a single observation."""
    return list({record.conversation: record for record in records}.values())


class Candidate:
    """Trains in place; keeps the served weights, and their scores on held-out records.

    Attributes:
        version: weight_version that training continues.
        acceptance: expected acceptance of the served draft, None if unknown.
        tests: gains over the served draft, of the trained weights and half way to them, on each of
            the last records that came new, before the candidate trained on it; since it last
            started from served weights.
    """

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
        self.acceptance: float | None = None
        self._settings = settings
        path = settings.draft_paths[topic]
        self._distiller = (
            Distiller(path, settings.distiller)
            if workers is None
            else DistributedDistiller(topic, path, settings.distiller, workers)
        )
        self.tests: deque[tuple[float, float]] = deque(maxlen=_TESTS)
        self._newest: float | None = None  # creation of the newest training record so far
        self._known: dict[int, None] = {}  # conversations of training records
        self._differs = False  # from the served weights, by training
        self._initial_records: int | None = None  # see begin_round
        self._ahead = False  # of the served draft, by the last comparison
        self._served: dict[str, Tensor] | None = None
        self._served_scores: dict[str, float] = {}
        self._max_length = min(settings.max_length, self._distiller.max_length)
        folder = settings.optimizer_dir
        self._checkpoints = Path(folder) / topic if folder is not None else None

    @property
    def steps(self) -> int:
        """Optimizer steps since training last started from served weights."""
        return self._distiller.steps

    @property
    def rate_share(self) -> float:
        """Share of the learning rate that the next steps have, in (0, 1]."""
        return self._distiller.rate_share

    @property
    def awaits_general(self) -> bool:
        """Whether its first adapters are still to be put on the served weights of ``general``.

        True for a copy of ``general`` with adapters that has neither learnt nor been published.
        """
        paths = self._settings.draft_paths
        if self._settings.distiller.adapter != "lora" or self.topic == GENERAL:
            return False
        is_copy = paths[self.topic] == paths.get(GENERAL)
        return is_copy and self.version == 0 and self.steps == 0

    def usable(self, records: Sequence[ReplayRecord]) -> list[ReplayRecord]:
        """Records that this draft can learn from or be evaluated on."""
        vocab = self._distiller.vocab_size
        return [
            within(record, vocab)
            for record in records
            if usable(record, vocab) and self._distiller.trains_on(record)
        ]

    def coverage(self, records: Sequence[ReplayRecord]) -> float | None:
        """Share of the target's probability on the tokens that the served draft proposes from.

        See ``vocabulary_coverage``; None of a draft that is no EAGLE draft.
        """
        ids = self._distiller.vocabulary_of(self._served)
        if ids is None:
            return None
        return vocabulary_coverage(ids.cpu().numpy(), self._distiller.vocab_size, records)

    def grow_vocabulary(self, records: Sequence[ReplayRecord]) -> None:
        """Let an EAGLE draft propose tokens that its topic uses, see ``grown_vocabulary``."""
        ids = self._distiller.vocabulary
        if ids is None:
            return
        distiller, counts = self._distiller, token_counts(records)
        if len(ids) == distiller.vocab_size:
            return
        grown = grown_vocabulary(ids, counts, distiller.vocab_size, distiller.plain_tokens)
        if grown is not ids:
            logger.info("%s: the draft's vocabulary changes", self.topic)
            self._distiller.set_vocabulary(grown)

    @property
    def micro_steps_left(self) -> int:
        """Micro-steps until the weights move."""
        return self._distiller.micro_steps_left

    def make_shares(self, step: Sequence[Sequence[ReplayRecord]]) -> list[Share]:
        """The micro-batches of one optimizer step, for :meth:`learn` in this order."""
        branches, settings = self._distiller.branches, self._settings.distiller
        batches = [make_batch(records, self._max_length, branches=branches) for records in step]
        return make_shares(batches, settings.objective)

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        """Run one micro-step; see Distiller.learn."""
        self._differs = True
        return self._distiller.learn(share, before_step)

    def load(self, version: int, flat: FlatWeights | None) -> None:
        """Start over from published weights; None are the initial ones.

        With an optimizer checkpoint of that publication on disk, training resumes from it.

        Raises:
            ValueError: for weights of another draft; the candidate is unchanged.
        """
        served = None if flat is None else unflatten(flat)
        self._distiller.reset(served)
        self._served = served
        self.version = version
        self._initial_records, self._ahead = None, False
        self._forget_tests()
        self._newest = None  # what these weights were trained on is not known
        self.acceptance = None
        self._served_scores.clear()
        if flat is not None and self._checkpoints is not None:
            self._resume(load_checkpoint(self._checkpoints, version, flat.digest()))

    def _resume(self, state: OptimizerState | None) -> None:
        if state is None:
            return
        try:
            self._distiller.resume(state)
        except ValueError as error:
            logger.warning("%s: %s, the optimizer starts fresh", self.topic, error)

    def begin_round(self, records: int, *, rejected: bool) -> bool:
        """Restart the candidate if the topic has outgrown the records that it started with.

        One that is ahead of the served draft, though not yet shown to be, goes on: with few
        held-out records, much would be thrown away.

        Args:
            records: training records of the topic.
            rejected: whether a round was rejected since the last publication, or that rolled back.

        Returns:
            Whether it was restarted.
        """
        if self.steps == 0 or self._initial_records is None:
            self._initial_records = records
        elif rejected and not self._ahead and outgrown(self._initial_records, records):
            logger.info("%s: starts over, with %d records", self.topic, records)
            self.scale_rate(increased(self.rate_share))
            self._distiller.reset(self._served)
            self._forget_tests()
            self._initial_records = records
            return True
        return False

    def rebase(self, flat: FlatWeights) -> None:
        """Start training from another draft's weights; the served ones stay.

        Raises:
            ValueError: for weights that do not fit; the candidate is unchanged.
        """
        self._distiller.reset(unflatten(flat))

    def reset(self) -> None:
        """Start again from the served weights, at a lower learning rate."""
        self.scale_rate(decreased(self.rate_share))
        self._distiller.reset(self._served)
        self._forget_tests()
        self._ahead = False

    def scale_rate(self, share: float) -> None:
        """Learn at this share of the learning rate from now on."""
        self._distiller.scale_rate(share)

    def refresh_rate(self) -> None:
        """Restart the learning-rate schedule, for a topic that drifts."""
        self._distiller.refresh_rate()

    def test(
        self, records: Sequence[ReplayRecord], before_batch: Callable[[], float | None]
    ) -> None:
        """Test the candidate on the new ones of these records; call it before it trains on them.

        New is a record that came after all that were given before, of a conversation that none of
        the last of them was of: a record is a test once, and never after a training on it.

        Args:
            records: usable ones that the candidate is about to be trained on.
            before_batch: called before each forward, see ``score_steps``; if it raises, the
                records are new the next time.
        """
        new: list[ReplayRecord] = []
        if self._differs and self._newest is not None:
            for record in records:
                known = record.created <= self._newest or record.conversation in self._known
                if not known and not is_synthetic(record.request_id):
                    new.append(record)
        if latest := sorted(one_per_conversation(new), key=lambda record: record.created)[-_TESTS:]:
            served = self._score(self._served, latest, before_batch)
            trained, halfway = (
                self._score(state, latest, before_batch) - served for state in self._states()
            )
            gains = zip(trained.tolist(), halfway.tolist(), strict=True)
            self.tests.extend(pair for pair in gains if math.isfinite(sum(pair)))
        given = max((record.created for record in records), default=-math.inf)
        self._newest = given if self._newest is None else max(self._newest, given)
        self._known |= dict.fromkeys(record.conversation for record in records)
        for conversation in [*self._known][:-_MOST_KNOWN]:
            del self._known[conversation]

    def _forget_tests(self) -> None:
        """Forget tests of weights that the candidate does not go on from."""
        self.tests.clear()
        self._differs = False

    def _states(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The trained weights, and those half way from the served ones to them.

        On its first few records a draft learns them rather than its topic: half way it has kept
        more of what it knew.
        """
        state = self._distiller.state_dict()
        return state, self._distiller.halfway(state, self._served)

    def compare(
        self, records: Sequence[ReplayRecord], before_batch: Callable[[], float | None]
    ) -> Compared:
        """Score the better of the trained weights and those half way, beside the served ones.

        Which is better the tests say; while there are none, the held-out records.

        Args:
            records: held-out ones, usable. Those that expire meanwhile get no served score: nan.
            before_batch: called before each forward, see ``score_steps``.
        """
        oldest: float | None = None

        def before_each() -> float | None:
            nonlocal oldest
            oldest = before_batch()
            return oldest

        states = self._states()
        gained = [sum(own) for own in zip(*self.tests, strict=True)]
        judged = (int(gained[1] > gained[0]),) if gained else (0, 1)
        found = {which: self._score(states[which], records, before_each) for which in judged}
        self._ahead = False  # until the served draft is scored
        new = [r for r in records if r.request_id not in self._served_scores]
        if new:
            scores = self._score(self._served, new, before_each)
            for record, score in zip(new, scores, strict=True):
                self._served_scores[record.request_id] = float(score)
        served = np.array([self._served_scores[r.request_id] for r in records])
        if oldest is not None:
            served[[r.created < oldest for r in records]] = math.nan
        # scores of records that are not sampled any more are dropped: a publication may be days off
        self._keep_scores(records, served)
        known = np.isfinite(served)  # as the gate counts
        held_out = {which: float((own - served)[known].sum()) for which, own in found.items()}
        best = max(judged, key=lambda which: held_out[which])
        self._ahead = held_out[best] > 0.0
        tests = [pair[best] for pair in self.tests]
        return Compared(found[best], served, states[best], tests, bool(best))

    def _keep_scores(self, records: Sequence[ReplayRecord], scores: NDArray[np.float64]) -> None:
        self._served_scores = {
            record.request_id: float(score) for record, score in zip(records, scores, strict=True)
        }

    def add_basis(
        self,
        state: dict[str, Tensor],
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], object],
    ) -> None:
        """Find the basis of an EAGLE draft's weights, in place, see ``EagleDraft.basis``.

        Args:
            state: the weights.
            records: usable ones.
            before_batch: called before each forward; may wait for a permit, or raise.
        """
        if BASIS not in state:
            return

        def batches() -> Iterator[Batch]:
            for record in records[:_BASIS_RECORDS]:
                before_batch()
                yield make_batch([record], self._max_length)

        draft = self._distiller.served(state)
        assert isinstance(draft, EagleDraft)
        state[BASIS].copy_(state_basis(draft, batches()))

    def mark_published(
        self,
        version: int,
        state: dict[str, Tensor],
        records: Sequence[ReplayRecord],
        scores: NDArray[np.float64],
        before_part: Callable[[], object] = lambda: None,
        *,
        stable: int = 0,
    ) -> None:
        """Take the evaluated weights as the served ones, and write an optimizer checkpoint.

        Args:
            version: of the publication.
            state: the weights that were evaluated.
            records: that they were evaluated on.
            scores: on these.
            before_part: called before each part of the checkpoint; may wait for a permit, or raise:
                the checkpoint of an earlier version then stays, which fits no other version.
            stable: weight_version that stays the stable one if this one goes on trial: its
                checkpoint is kept.
        """
        self._served = state
        self.version = version
        self.scale_rate(increased(self.rate_share))
        self._initial_records, self._ahead = None, False
        self._forget_tests()
        self._keep_scores(records, scores)
        if self._checkpoints is not None:
            before_part()
            digest = flatten(state).digest()
            before_part()
            optimizer = self._distiller.live_state()
            try:
                save_checkpoint(
                    self._checkpoints, optimizer, version, digest, before_part, beside=stable
                )
            except (OSError, SafetensorError):
                logger.warning("%s: no optimizer checkpoint was written", self.topic, exc_info=True)

    def _score(
        self,
        state: dict[str, Tensor] | None,
        records: Sequence[ReplayRecord],
        before_batch: Callable[[], float | None],
    ) -> NDArray[np.float64]:
        before_batch()  # building the draft takes the processor too
        return score_records(
            self._distiller.served(state),
            records,
            max_length=self._max_length,
            draft_top_k=self._settings.draft_top_k,
            batch_size=records_per_forward(self._settings.micro_batch, self._distiller.device.type),
            before_batch=before_batch,
        )
