"""Trainer in the engine's process: real shards, registry and rounds, without Ray.

Training is interleaved with serving by count instead of by wall clock: after so many requests
the trainer gets so many micro-steps. Results do not depend on how busy the machine is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from expert_cache import DRAFT
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from online.serving import ROWS
from paceline.actors.engine.model_loader import resolve_dtype
from paceline.actors.replay.buffer import ReplaySettings, ShardStats
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.batches import make_batch
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.distiller import MicroStep, load_state, logits_at
from paceline.actors.training.expert_evaluation import acceptance
from paceline.actors.training.gate import GateSettings
from paceline.actors.training.losses import expected_acceptance
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

NEVER = 1_000_000  # rejections in a row
MAX_LENGTH = 512
_PATHS = ("draft_paths", "optimizer_dir")
_MICRO_STEP_S = 2.0**-7  # of the virtual clock: its sums are exact
_REQUEST_S = 1.0
_BATCH, _DRAFT_TOP_K = 16, 64


@dataclass(frozen=True, slots=True)
class Learning:
    """Training of a unit of work.

    Attributes:
        requests_per_round: served requests between two rounds of training.
        micro_steps: of a round, each of ``micro_batch`` records.
        learning_rate: constant.
        micro_batch: records.
        train_records: drawn from replay for a round.
        held_out_records: of the gate, at most.
        held_out_fraction: of the prompts, kept from training for the gate.
        max_rejections: in a row, after which a topic rests.
        recent_share: share of a draw that favours recent records; the rest is uniform.
        seed: of drawing and of the batches' order.
    """

    requests_per_round: int = 16
    micro_steps: int = 32
    learning_rate: float = 1.5e-3
    micro_batch: int = 8
    train_records: int = 256
    held_out_records: int = 256
    held_out_fraction: float = 0.1
    max_rejections: int = 3
    recent_share: float = 0.5
    seed: int = 0

    def tireless(self) -> Learning:
        """The same without rests, so that systems of one and of several drafts train as much."""
        return replace(self, max_rejections=NEVER)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Synthetic prompts and the further training on them.

    Attributes:
        per_record: synthetic prompts per record of the stream, at most.
        micro_steps: of a round, in place of ``Learning.micro_steps``.
        capacity_mb: of the topic's replay; nothing more is generated if it is full.
        held_out_fraction: in place of ``Learning``'s, since synthetic records are not held out;
            0 keeps that.
        rate_hold_steps: see DistillerSettings, and ``average_decay``.
        min_gain: see GateSettings.
        at_once: requests of the generating target.
        dtype: of the generating target.
    """

    per_record: float
    micro_steps: int
    capacity_mb: int = ReplaySettings().capacity_bytes // 2**20
    held_out_fraction: float = 0.0
    rate_hold_steps: int = DistillerSettings().rate_hold_steps
    average_decay: float = DistillerSettings().average_decay
    min_gain: float = GateSettings().min_gain
    at_once: int = ROWS
    dtype: str = "auto"

    def of(self, learning: Learning) -> Learning:
        """``learning`` with these steps, and draws large enough for them."""
        return replace(
            learning,
            micro_steps=self.micro_steps,
            train_records=max(learning.train_records, self.micro_steps * learning.micro_batch),
            held_out_fraction=self.held_out_fraction or learning.held_out_fraction,
        )

    def facts(self) -> dict[str, Any]:
        """Settings other than the defaults: published units lack the others in their keys."""
        usual = asdict(Synthetic(self.per_record, self.micro_steps))
        return {name: value for name, value in asdict(self).items() if value != usual[name]}


class LocalClient:
    """Trainer's client that calls the shards and the registry directly; permits are free."""

    def __init__(
        self, folder: Path, experts: Sequence[str], learning: Learning, synthetic: Synthetic | None
    ) -> None:
        settings = ReplaySettings(
            held_out_fraction=learning.held_out_fraction, recent_share=learning.recent_share
        )
        if synthetic is not None:
            settings = replace(
                settings,
                capacity_bytes=synthetic.capacity_mb * 2**20,
                synthetic_per_record=synthetic.per_record,
            )
        self.shards = {  # answers from disk do not grow old
            expert: ReplayShard(expert, settings, seed=learning.seed, clock=lambda: 0.0)
            for expert in experts
        }
        self.registry = WeightRegistry(str(folder), experts, "bench", put=lambda flat: flat)
        self.publish, self.reject = self.registry.publish, self.registry.reject

    def stats(self) -> dict[str, ShardStats]:
        return {topic: shard.stats() for topic, shard in self.shards.items()}

    def sample(self, topic: str, count: int, split: Any) -> list[ReplayRecord]:
        return [decode(data) for data in self.shards[topic].sample(count, split)]

    def topic_progress(self) -> dict[str, TopicProgress]:
        return {}

    def acquire_topic(self, wanted: Sequence[TopicPriority]) -> Assignment:
        return Assignment(select_topic(wanted))

    def release_permit(self) -> None:
        pass

    def release_topic(self, progress: TopicProgress | None) -> None:
        pass

    def acquire_permit(self) -> bool:
        return True

    def versions(self) -> dict[str, int] | None:
        return self.registry.stable_versions()

    def weights(self, topic: str) -> tuple[int, FlatWeights | None] | None:
        stable = self.registry.stable_weights(topic)
        return stable.weight_version, stable.reference

    def update_losses(self, topic: str, losses: dict[str, float]) -> None:
        self.shards[topic].update_losses(losses)

    def note(self, topic: str, decision: dict[str, Any]) -> None:
        pass

    def added_topics(self) -> dict[str, str]:
        return {}

    def topic_status(self) -> dict[str, TopicStatus] | None:
        """None: there is no canary, every published version is served at once."""
        return None


class _Clock:
    """Virtual clock, seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Counted(Candidate):
    """Candidate that moves the virtual clock and counts its training."""

    def __init__(self, topic: str, settings: TrainerSettings, clock: _Clock) -> None:
        super().__init__(topic, settings)
        self._clock = clock
        self.positions, self.micro_steps, self.learning_s = 0, 0, 0.0

    def learn(self, share: Share, before_step: Callable[[], None] = lambda: None) -> MicroStep:
        began = time.process_time()
        step = super().learn(share, before_step)
        self.learning_s += time.process_time() - began
        self._clock.now += _MICRO_STEP_S
        self.positions += step.positions
        self.micro_steps += 1
        return step


class _CountedLoop(TrainingLoop):
    def __init__(self, settings: TrainerSettings, client: LocalClient, clock: _Clock) -> None:
        super().__init__(settings, client, clock=clock)
        self._virtual = clock
        self.counted: dict[str, _Counted] = {}

    def candidate(self, topic: str) -> Candidate:
        if topic not in self.counted:
            new = _Counted(topic, self._settings, self._virtual)
            self.counted[topic] = self._candidates[topic] = new
        return self.counted[topic]


class Learner:
    """Adds records to replay, trains after every ``requests_per_round``, and queues new weights.

    The process must have been made ready for DeepSpeed.

    Args:
        folder: of the registry, empty.
        experts: drafts that learn, by the engine's names.
        learning: see Learning.
        put: queues new weights, see PendingUpdates.put.
        draft: folder of the weights that every expert starts from.
        synthetic: see Synthetic; ``generate`` adds such records before every round.
        dtype: of training.
    """

    def __init__(
        self,
        folder: Path,
        experts: Sequence[str],
        learning: Learning,
        put: Callable[[SwapWeights], None],
        *,
        draft: Path = DRAFT,
        synthetic: Synthetic | None = None,
        generate: Callable[[LocalClient], None] = lambda _: None,
        dtype: str = "auto",
    ) -> None:
        self.client = LocalClient(folder, experts, learning, synthetic)
        self._put, self._learning, self._generate = put, learning, generate
        self._clock = _Clock()
        settings = _settings(experts, learning, draft, synthetic, dtype)
        self._loop = _CountedLoop(settings, self.client, self._clock)
        self._known = dict.fromkeys(experts, 0)
        self._records = 0
        self.seconds = 0.0
        for expert in experts:
            self._loop.candidate(expert)

    def add(self, record: ReplayRecord) -> None:
        """Add a record under its topic; train and swap if a round is due."""
        self.client.shards[record.topic].insert(encode(record))
        self._clock.now += _REQUEST_S
        self._records += 1
        if self._records % self._learning.requests_per_round:
            return
        self._generate(self.client)
        began = time.process_time()
        self._loop.run_round()
        for expert in self._known:
            version, state = self.served(expert)
            if version != self._known[expert] and state is not None:
                self._put(SwapWeights(expert, version, state))
                self._known[expert] = version
        self.seconds += time.process_time() - began

    def served(self, expert: str) -> tuple[int, dict[str, Tensor] | None]:
        """weight_version and weights that requests get now; None are the initial ones."""
        stable = self.client.registry.stable_weights(expert)
        flat = stable.reference
        return stable.weight_version, None if flat is None else unflatten(flat)

    def facts(self) -> dict[str, Any]:
        """Cost and decisions of training so far.

        ``seconds`` are all of a round's, evaluation and swaps included; ``learning_s`` those of
        micro-steps; ``positions`` the target positions learnt from, each as often as it was used.
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
    """All trainer settings that no Learning decides, for the keys of units."""
    facts = asdict(_settings((), Learning(), DRAFT))
    for newer in ("rate_hold_steps", "target_path"):  # than published keys
        if not facts["distiller"][newer]:
            del facts["distiller"][newer]
    rules = {"rules": RULES} if RULES > 1 else {}  # published keys are older
    return {name: value for name, value in facts.items() if name not in _PATHS} | rules


def _settings(
    experts: Sequence[str],
    learning: Learning,
    draft: Path,
    synthetic: Synthetic | None = None,
    dtype: str = "auto",
) -> TrainerSettings:
    distiller = DistillerSettings(learning_rate=learning.learning_rate, dtype=dtype)
    gate = GateSettings()
    schedule = ScheduleSettings(max_rejections=learning.max_rejections)
    if synthetic is not None:
        distiller = replace(
            distiller,
            rate_hold_steps=synthetic.rate_hold_steps,
            average_decay=synthetic.average_decay,
        )
        gate = GateSettings(min_gain=synthetic.min_gain)
        schedule = replace(schedule, least_hope=min_hope_for(synthetic.min_gain))
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


@dataclass(frozen=True, slots=True)
class Scores:
    """Teacher-forced scores per record, in the records' order.

    Attributes:
        acceptance: float64 ``[R]``, probability that a served draft's token is accepted as the
            answer was decoded: greedy ones by argmax agreement, sampled ones by sum of min(p, q).
        overlap: float64 ``[R]``, sum of min(p, q) at temperature 1, a lower bound.
    """

    acceptance: NDArray[np.float64]
    overlap: NDArray[np.float64]

    def facts(self) -> dict[str, list[float]]:
        """As JSON."""
        return {name: np.round(getattr(self, name), 5).tolist() for name in self.__slots__}


class Evaluator:
    """Scores weights on recorded answers, with a draft model of its own."""

    def __init__(self, draft: Path, *, device: str = "cpu", dtype: str = "auto") -> None:
        self._device = torch.device(device)
        self._draft = AutoModelForCausalLM.from_pretrained(
            draft,
            dtype=resolve_dtype(dtype, self._device),
            attn_implementation="eager",
            local_files_only=True,
        ).to(self._device)
        self._draft.eval().requires_grad_(False)
        self._initial = {k: v.clone() for k, v in self._draft.state_dict().items()}

    @torch.inference_mode()
    def score(self, state: Mapping[str, Tensor] | None, records: Sequence[ReplayRecord]) -> Scores:
        """Score records under some weights, None being the initial ones.

        Raises:
            ValueError: for weights of another draft.
        """
        load_state(self._draft, self._initial if state is None else state)
        order = sorted(range(len(records)), key=lambda i: len(records[i].output_token_ids))
        found = np.zeros((2, len(records)))
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            batch = make_batch([records[i] for i in part], MAX_LENGTH).to(self._device)
            logits = logits_at(self._draft, batch)
            served = acceptance(logits, batch, _DRAFT_TOP_K)
            lower, _ = expected_acceptance(
                logits, batch.top_ids, batch.top_logprobs, batch.tail_mass
            )
            sums = torch.zeros(2, len(part), dtype=torch.float64, device=self._device)
            sums.index_add_(1, batch.rows, torch.stack([served, lower]).double())
            counts = torch.bincount(batch.rows, minlength=len(part))
            found[:, part] = (sums / counts).cpu().numpy()
        return Scores(found[0], found[1])

    @torch.inference_mode()
    def agreements(
        self, state: Mapping[str, Tensor] | None, records: Sequence[ReplayRecord]
    ) -> list[list[bool]]:
        """Per record and output token, whether the draft's best token is the recorded one."""
        load_state(self._draft, self._initial if state is None else state)
        found: list[list[bool]] = []
        for start in range(0, len(records), _BATCH):
            batch = make_batch(records[start : start + _BATCH], MAX_LENGTH)
            agrees = (logits_at(self._draft, batch).argmax(-1) == batch.output_ids).tolist()
            own: list[list[bool]] = [[] for _ in range(batch.num_records)]
            for row, agree in zip(batch.rows.tolist(), agrees, strict=True):
                own[row].append(agree)
            found += own
        return found

    def checkpoint(
        self, learner: Learner, topic: str, tests: Sequence[ReplayRecord]
    ) -> dict[str, Any]:
        """Scores of the weights served now, and the cost of training so far."""
        version, state = learner.served(topic)
        facts = learner.facts()
        cost = {name: facts[name] for name in ("seconds", "micro_steps", "positions")}
        return {"weight_version": version, **self.score(state, tests).facts(), **cost}
