"""The trainer in the engine's process: real shards, registry and training loop, without Ray.

Training is interleaved with serving by count instead of by wall clock: after so many requests
the trainer gets so many micro-steps. Results do not depend on how busy the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import answers
from numpy.typing import NDArray
from torch import Tensor

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import resolve_device, resolve_dtype
from paceline.actors.engine.request import FINISH_ERROR, GenerationRequest
from paceline.actors.replay.buffer import ReplaySettings, ShardStats
from paceline.actors.replay.record import MAX_LENGTH, ReplayRecord, decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.adapters import load_state
from paceline.actors.training.batches import make_batch
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import MicroStep
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.forward import load_trainable, score_positions
from paceline.actors.training.permits import Assignment
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.shares import Share
from paceline.actors.training.synthetic.generator import SyntheticAnswerGenerator
from paceline.actors.training.topic_schedule import TopicPriority, select_topic
from paceline.actors.training.training_loop import TrainingLoop
from paceline.actors.weights.flat_weights import FlatWeights, unflatten
from paceline.actors.weights.registry import WeightRegistry

NEVER = 1_000_000  # rejections in a row
_MICRO_STEP_S = 2.0**-7  # of the virtual clock: its sums are exact
_REQUEST_S = 1.0
_BATCH = 16  # records of a forward


@dataclass(frozen=True, slots=True)
class Learning:
    """When training runs beside serving.

    Attributes:
        requests_per_round: served requests between two rounds of training.
        micro_steps: of a round, each of ``training.micro_batch`` records.
        rests: whether a topic without gains rests; systems of one and of several drafts train as
            much only if none does.
        seed: of drawing and of the batches' order.
    """

    requests_per_round: int = 16
    micro_steps: int = 32
    rests: bool = True
    seed: int = 0


class LocalClient:
    """The trainer's client that calls shards and registry directly; see TrainerClient."""

    def __init__(
        self, folder: Path, experts: Collection[str], replay: ReplaySettings, seed: int
    ) -> None:
        self.shards = {  # answers from disk do not grow old
            expert: ReplayShard(expert, replay, seed=seed, clock=lambda: 0.0) for expert in experts
        }
        self.registry = WeightRegistry(str(folder), experts, "bench", put=lambda flat: flat)
        self.publish, self.reject = self.registry.publish, self.registry.reject
        self.versions = self.registry.stable_versions
        # Permits are free; there is no canary, every published version is served at once.
        self.acquire_permit = lambda: True
        self.until_idle = self.release_permit = self.release_topic = lambda *_: None
        self.note = self.topic_status = lambda *_: None
        self.topic_progress: Callable[[], dict[str, Any]] = dict
        self.added_topics: Callable[[], dict[str, str]] = dict

    def stats(self) -> dict[str, ShardStats]:
        return {topic: shard.stats() for topic, shard in self.shards.items()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        return [decode(data) for data in self.shards[topic].sample(count, split)]

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        return Assignment(select_topic(wanted))

    def weights(self, topic: str) -> tuple[int, FlatWeights | None]:
        stable = self.registry.stable_weights(topic)
        return stable.weight_version, stable.reference

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        self.shards[topic].update_losses(losses)


class _Clock:
    """Virtual clock, seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Candidate(Candidate):
    """Candidate that moves the virtual clock."""

    clock: _Clock

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        step = super().learn(share, before_step)
        self.clock.now += _MICRO_STEP_S
        return step


class _Loop(TrainingLoop):
    def candidate(self, topic: str) -> Candidate:
        if topic not in self._candidates:
            new = _Candidate(topic, self._settings)
            new.clock = self._clock
            self._candidates[topic] = new
        return self._candidates[topic]


class Learner:
    """Adds records to replay, trains after every ``requests_per_round``, and queues new weights.

    The process must have been made ready for DeepSpeed.

    Args:
        folder: of the registry, empty.
        settings: of the trainer; its drafts learn.
        learning: see Learning.
        put: queues new weights, see PendingUpdates.put.
        replay: settings of the shards.
        synthetic: makes synthetic records before each round; None for none.
    """

    def __init__(
        self,
        folder: Path,
        settings: TrainerSettings,
        learning: Learning,
        put: Callable[[SwapWeights], None] = lambda _: None,
        *,
        replay: ReplaySettings | None = None,
        synthetic: SyntheticRecords | None = None,
    ) -> None:
        own = replay or ReplaySettings()
        self.client = LocalClient(folder, settings.draft_paths, own, learning.seed)
        self._put, self._learning, self._synthetic = put, learning, synthetic
        self._clock = _Clock()
        schedule = settings.schedule
        if not learning.rests:
            schedule = replace(schedule, max_rejections=NEVER)
        settings = replace(
            settings,
            schedule=schedule,
            round_seconds=learning.micro_steps * _MICRO_STEP_S,
            train_records=max(settings.train_records, learning.micro_steps * settings.micro_batch),
            optimizer_dir=None,
            seed=learning.seed,
        )
        self._loop = _Loop(settings, self.client, clock=self._clock)
        self._known = dict.fromkeys(settings.draft_paths, 0)
        self._records = 0
        self.seconds = 0.0

    @property
    def until_round(self) -> int:
        """Records to be added until the next round of training, at least 1."""
        size = self._learning.requests_per_round
        return size - self._records % size

    def add(self, record: ReplayRecord, expert: str | None = None) -> None:
        """Add a record for an expert, by default its topic's; train and swap if a round is due."""
        # It comes now, whenever its answer was made.
        record = replace(record, topic=expert or record.topic, created=self._clock.now)
        self.client.shards[record.topic].insert(encode(record))
        self._clock.now += _REQUEST_S
        self._records += 1
        if self._records % self._learning.requests_per_round:
            return
        if self._synthetic is not None:
            self._synthetic.fill(self.client)
        began = time.process_time()
        self._loop.run_round()
        for known in self._known:
            version, state = self.served(known)
            if version != self._known[known] and state is not None:
                self._put(SwapWeights(known, version, state))
                self._known[known] = version
        self.seconds += time.process_time() - began

    def served(self, expert: str) -> tuple[int, dict[str, Tensor] | None]:
        """weight_version and weights that requests get now; None are the initial ones."""
        version, flat = self.client.weights(expert)
        return version, None if flat is None else unflatten(flat)

    def facts(self) -> dict[str, Any]:
        """Cost and decisions of training; ``seconds`` are the processor's, swaps included.

        ``synthetic``: counts and cost of synthetic records, if any were to be made.
        """
        decisions = [
            {k: v for k, v in d.items() if k != "time"} for d in self.client.registry.history()
        ]
        made = {} if self._synthetic is None else {"synthetic": self._synthetic.facts()}
        return made | {
            "seconds": self.seconds,
            "micro_steps": self._loop.progress.micro_steps,
            "published": sum(d["outcome"] == "published" for d in decisions),
            "rejected": sum(d["outcome"] == "rejected" for d in decisions),
            "decisions": decisions,
        }


class SyntheticRecords:
    """Has an engine of its own make synthetic records."""

    def __init__(
        self,
        engine: Engine,
        generator: SyntheticAnswerGenerator,
        at_once: int,
    ) -> None:
        self._engine, self._generator, self._at_once = engine, generator, at_once
        self._seconds = 0.0
        self._client: LocalClient

    def fill(self, client: LocalClient) -> None:
        """Make as many as the shards lack, until many turns in a row bring nothing."""
        began, vain, self._client = time.process_time(), 0, client
        while vain < 2 * self._at_once and self._generator.lacks(client):
            vain = 0 if self._generator.run_once(client, self) else vain + 1
        self._seconds += time.process_time() - began

    def generate(self, requests: Sequence[GenerationRequest]) -> list[str]:
        """See TargetClient; records go to the shards."""
        found = {}
        for answer in answers(self._engine, requests, self._at_once):
            found[answer.key] = answer.finish_reason
            if answer.record is not None:
                self._client.shards[answer.record.topic].insert(encode(answer.record))
        return [found.get(r.run_id, FINISH_ERROR) for r in requests]

    def facts(self) -> dict[str, Any]:
        """Counts of the generator, and processor ``seconds``."""
        return dict(self._generator.counts) | {"seconds": self._seconds}


class Evaluator:
    """Compares weights of a draft with recorded answers, teacher-forced, as they are served.

    Args:
        target: its folder, of which EAGLE drafts read embedding and head.
        draft: folder of the initial weights.
        dtype: of the draft.
    """

    def __init__(self, target: Path, draft: Path, dtype: str = "auto") -> None:
        device = resolve_device("auto")
        self._draft = load_trainable(str(draft), str(target), resolve_dtype(dtype, device), device)
        self._draft.eval().requires_grad_(False)
        self._initial = {k: v.clone() for k, v in self._draft.state_dict().items()}

    def score(
        self, state: Mapping[str, Tensor] | None, records: Sequence[ReplayRecord]
    ) -> NDArray[np.float64]:
        """Mean acceptance per record, float64 ``[R]``; None are the initial weights.

        Raises:
            ValueError: for weights of another draft.
        """
        load_state(self._draft, self._initial if state is None else state)
        return score_records(self._draft, records, max_length=MAX_LENGTH, batch_size=_BATCH)

    @torch.inference_mode()
    def agreements(
        self, state: Mapping[str, Tensor] | None, records: Sequence[ReplayRecord]
    ) -> list[NDArray[np.bool_]]:
        """Whether the draft's best token is the recorded one, bool ``[S, N]`` per record.

        S are the steps of a round (one for all if the draft reads tokens alone), N the record's
        output tokens.
        """
        load_state(self._draft, self._initial if state is None else state)
        found: list[NDArray[np.bool_]] = []
        for start in range(0, len(records), _BATCH):
            own = make_batch(records[start : start + _BATCH], MAX_LENGTH).to(self._draft.device)
            agree = score_positions(
                self._draft, own, lambda logits, labels: logits.argmax(-1) == labels.output_ids
            )
            rows = own.rows.cpu().numpy()
            found += [agree.cpu().numpy()[:, rows == row] for row in range(own.num_records)]
        return found
