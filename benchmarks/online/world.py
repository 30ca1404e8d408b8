"""The trainer in the same process as the engine: real shards, registry, rounds, no Ray, no clock.

Training is interleaved with serving by count instead of by wall clock: after so many requests
the trainer gets so many micro-steps. Results then do not depend on how busy the machine is;
seconds are measured all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from expert_cache import DRAFT
from torch import Tensor

from online.learning import CAPACITY_MB, Imagining, Learning
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import MicroStep
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.permits import Assignment, TopicProgress
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.training.shares import Share
from paceline.actors.training.topic_schedule import (
    ScheduleSettings,
    TopicPriority,
    min_hope_for,
    select_topic,
)
from paceline.actors.training.training_loop import RULES, TrainingLoop
from paceline.actors.weights.flat_weights import FlatWeights, unflatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.versions import TopicStatus

_PATHS = ("draft_paths", "optimizer_dir")
_MICRO_STEP_S = 2.0**-7  # of the virtual clock: its sums are exact
_REQUEST_S = 1.0


class Ticks:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        """Start at 0 s."""
        self.now = 0.0

    def __call__(self) -> float:
        """Virtual seconds."""
        return self.now


class LocalClient:
    """The real shards and registry, called directly; leave is always given."""

    def __init__(
        self,
        folder: Path,
        experts: Sequence[str],
        learning: Learning,
        imagined_per_record: float = 0.0,
        capacity_mb: int = CAPACITY_MB,
    ) -> None:
        """Start with empty shards and initial weights.

        Args:
            folder: of the registry, empty.
            experts: drafts that learn; each has a shard.
            learning: see Learning.
            imagined_per_record: see ReplaySettings.
            capacity_mb: of a shard.
        """
        settings = ReplaySettings(
            capacity_bytes=capacity_mb * 2**20,
            held_out_fraction=learning.held_out_fraction,
            synthetic_per_record=imagined_per_record,
            recent_share=learning.recent_share,
        )
        self.shards = {  # answers from disk do not grow old
            expert: ReplayShard(expert, settings, seed=learning.seed, clock=lambda: 0.0)
            for expert in experts
        }
        self.registry = WeightRegistry(str(folder), experts, "bench", put=lambda flat: flat)

    def stats(self) -> dict[str, dict[str, Any]]:
        """Of every shard."""
        return {topic: shard.stats() for topic, shard in self.shards.items()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        """As the shard draws them."""
        return [decode(data) for data in self.shards[topic].sample(count, split)]

    def topic_progress(self) -> dict[str, TopicProgress]:
        """There is no other trainer."""
        return {}

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        """The best of them: nobody else trains."""
        return Assignment(select_topic(wanted))

    def release_permit(self) -> None:
        """Nobody waits for the processor."""

    def release_topic(self, progress: TopicProgress | None) -> None:
        """Nobody else has the topic next."""

    def acquire_permit(self) -> bool:
        """Always."""
        return True

    def versions(self) -> dict[str, int] | None:
        """Published ones."""
        return self.registry.stable_versions()

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        """The newest ones."""
        stable = self.registry.stable_weights(topic)
        return stable.weight_version, stable.reference

    def publish(self, topic: str, flat: FlatWeights, decision: dict[str, Any]) -> int:
        """To the registry."""
        return self.registry.publish(topic, flat, decision)

    def reject(self, topic: str, decision: dict[str, Any]) -> None:
        """To the registry."""
        self.registry.reject(topic, decision)

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        """To the shard."""
        self.shards[topic].update_losses(losses)

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        """Nothing is decided here but by the gate."""

    def added_topics(self) -> dict[str, str]:
        """No topic comes while a benchmark runs."""
        return {}

    def topic_status(self) -> dict[str, TopicStatus] | None:
        """None: there is no canary, every published version is served at once."""
        return None


class Muse(Protocol):
    """What imagines further records."""

    amount: Imagining

    def __call__(self, client: LocalClient) -> None:
        """Put them into the shards."""


class _Counted(Candidate):
    """A candidate that moves the virtual clock and counts what it learns from."""

    def __init__(self, topic: str, settings: TrainerSettings, clock: Ticks) -> None:
        super().__init__(topic, settings)
        self._clock = clock
        self.positions = 0
        self.micro_steps = 0
        self.learning_s = 0.0

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        began = time.process_time()
        step = super().learn(share, before_step)
        self.learning_s += time.process_time() - began
        self._clock.now += _MICRO_STEP_S
        self.positions += step.positions
        self.micro_steps += 1
        return step


class _CountedLoop(TrainingLoop):
    """A training loop over such candidates."""

    def __init__(self, settings: TrainerSettings, client: LocalClient, clock: Ticks) -> None:
        super().__init__(settings, client, clock=clock)
        self._ticks = clock
        self.counted: dict[str, _Counted] = {}

    def candidate(self, topic: str) -> Candidate:
        if topic not in self.counted:
            self.counted[topic] = self._candidates[topic] = _Counted(
                topic, self._settings, self._ticks
            )
        return self.counted[topic]


class Learner:
    """Takes records as they come, trains in between, hands new weights out."""

    def __init__(
        self,
        folder: Path,
        experts: Sequence[str],
        learning: Learning,
        put: Callable[[SwapWeights], None],
        *,
        draft: Path = DRAFT,
        muse: Muse | None = None,
        dtype: str = "auto",
    ) -> None:
        """Load a candidate for every expert.

        The process must have been made ready for DeepSpeed.

        Args:
            folder: of the registry, empty.
            experts: drafts that learn, by the engine's names.
            learning: see Learning.
            put: queues new weights, see PendingUpdates.put.
            draft: folder of the weights that every expert starts from.
            muse: has further records in the shards before every round.
            dtype: of training.
        """
        more = (muse.amount.per_record, muse.amount.capacity_mb) if muse is not None else ()
        self.client = LocalClient(folder, experts, learning, *more)
        self._muse = muse
        self._put = put
        self._clock = Ticks()
        settings = _settings(experts, learning, draft, muse.amount if muse else None, dtype)
        self._loop = _CountedLoop(settings, self.client, self._clock)
        self._learning = learning
        self._known = dict.fromkeys(experts, 0)
        self._taken = 0
        self.seconds = 0.0
        for expert in experts:
            self._loop.candidate(expert)

    def take(self, record: ReplayRecord) -> None:
        """Keep a record under its topic; where a round is due, train and swap."""
        self.client.shards[record.topic].insert(encode(record))
        self._clock.now += _REQUEST_S
        self._taken += 1
        if self._taken % self._learning.requests_per_round == 0:
            if self._muse is not None:
                self._muse(self.client)
            self._round()

    def _round(self) -> None:
        began = time.process_time()
        self._loop.run_round()
        for expert, version in self.client.registry.stable_versions().items():
            flat = self.client.registry.stable_weights(expert).reference
            if version != self._known[expert] and flat is not None:
                self._put(SwapWeights(expert, version, unflatten(flat)))
                self._known[expert] = version
        self.seconds += time.process_time() - began

    def served(self, expert: str) -> tuple[int, dict[str, Tensor] | None]:
        """weight_version and weights that requests get now; None are the initial ones."""
        stable = self.client.registry.stable_weights(expert)
        flat = stable.reference
        return stable.weight_version, None if flat is None else unflatten(flat)

    def facts(self) -> dict[str, Any]:
        """What learning has cost and decided so far.

        ``seconds`` are all of a round's, judging and swapping included; ``learning_s`` the
        micro-steps' alone; ``positions`` the target positions learnt from, each as often as it
        was used.
        """
        counted = self._loop.counted.values()
        decisions = [
            {k: v for k, v in d.items() if k != "time"} for d in self.client.registry.history()
        ]
        return {
            "seconds": self.seconds,
            "learning_s": sum(c.learning_s for c in counted),
            "micro_steps": sum(c.micro_steps for c in counted),
            "positions": sum(c.positions for c in counted),
            "published": sum(d["outcome"] == "published" for d in decisions),
            "rejected": sum(d["outcome"] == "rejected" for d in decisions),
            "decisions": decisions,
        }


def trainer_facts() -> dict[str, Any]:
    """The trainer's rules and all of its settings that no Learning decides, as JSON holds them."""
    facts = asdict(_settings((), Learning(), DRAFT))
    if not facts["distiller"]["rate_hold_steps"]:  # keys that are older than it say nothing
        del facts["distiller"]["rate_hold_steps"]
    rules = {"rules": RULES} if RULES > 1 else {}  # keys that are older than the number say nothing
    return {name: value for name, value in facts.items() if name not in _PATHS} | rules


def _settings(
    experts: Sequence[str],
    learning: Learning,
    draft: Path,
    imagining: Imagining | None = None,
    dtype: str = "auto",
) -> TrainerSettings:
    distiller = DistillerSettings(learning_rate=learning.learning_rate, dtype=dtype)
    gate = GateSettings()
    schedule = ScheduleSettings(max_rejections=learning.max_rejections)
    if imagining is not None:
        distiller = replace(
            distiller,
            rate_hold_steps=imagining.rate_hold_steps,
            average_decay=imagining.average_decay,
        )
        gate = GateSettings(min_gain=imagining.min_gain)
        schedule = replace(schedule, least_hope=min_hope_for(imagining.min_gain))
    return TrainerSettings(
        draft_paths=dict.fromkeys(experts, str(draft)),
        distiller=distiller,
        gate=gate,
        micro_batch=learning.micro_batch,
        round_seconds=learning.micro_steps * _MICRO_STEP_S,
        train_records=learning.train_records,
        held_out_records=learning.held_out_records,
        schedule=schedule,
        seed=learning.seed,
    )
