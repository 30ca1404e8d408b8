"""Drafts and Medusa heads that learn from the same answers of the target, kept as folders."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from expert_cache import DRAFT, TARGET, is_current, note_facts, recipe_of, save_expert
from torch import Tensor

from online.bench import Bench
from online.judging import MAX_LENGTH
from online.rows import label
from paceline.actors.engine.model_loader import load_causal_lm, resolve_device, resolve_dtype
from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.speculation.medusa import HeadsConfig, MedusaHeads, save_heads
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.medusa import (
    HeadDataset,
    HeadTrainingSettings,
    head_accuracy,
    make_dataset,
    train_heads,
)
from paceline.actors.training.settings import DistillerSettings

ALL = "all"


@dataclass(frozen=True, slots=True)
class Teaching:
    """How both learn.

    Attributes:
        answers: of the target per topic, at most.
        passes: over the answers, for drafts and heads alike.
        num_heads: Medusa heads.
        own_output: whether every head has an output matrix of its own, as in the paper.
        learning_rates: of a draft: all passes but the last third, and that third.
        head_learning_rate: of the heads, falling to zero.
        micro_batch: records of a draft's step.
        held_out_fraction: of the prompts, that judge.
        seed: of the order.
    """

    answers: int = 1_000
    passes: int = 6
    num_heads: int = 4
    own_output: bool = True
    learning_rates: tuple[float, float] = (1.5e-3, 3e-4)
    head_learning_rate: float = 5e-3
    micro_batch: int = 16
    held_out_fraction: float = 0.1
    seed: int = 0


class School:
    """Teaches what is missing, from answers that each are computed once."""

    def __init__(self, bench: Bench, topics: Sequence[str], teaching: Teaching) -> None:
        """Nothing is computed yet.

        Args:
            bench: gives the answers.
            topics: that the ones taught on all of them learn.
            teaching: see Teaching.
        """
        self._bench = bench
        self._topics = list(topics)
        self._teaching = teaching
        self._records: dict[str, list[ReplayRecord]] = {}

    def folder(self, kind: str, topic: str) -> Path:
        """Where a ``draft`` or ``heads`` lie; ``topic`` may be ``ALL``."""
        name = f"{label(self._bench.data)}-{kind}-{topic}-{self._teaching.answers}"
        return self._bench.store.folder / "taught" / name

    def recipe(self, kind: str, topic: str) -> dict[str, Any]:
        """All that decides the weights."""
        teaching = self._teaching
        keys = [q.key for t in self._own(topic) for q in self._bench.stream(t, teaching.answers)]
        settings = {"kind": kind, **asdict(teaching), "serving": asdict(self._bench.serving)}
        return recipe_of(
            keys, {k: list(v) if k == "learning_rates" else v for k, v in settings.items()}
        )

    def missing(self) -> list[tuple[str, str]]:
        """(kind, topic) of what has not been taught by these very settings."""
        wanted = [(kind, t) for kind in ("draft", "heads") for t in (*self._topics, ALL)]
        return [(k, t) for k, t in wanted if not is_current(self.folder(k, t), self.recipe(k, t))]

    def teach(self) -> None:
        """Teach what is missing; the process must have been made ready for DeepSpeed."""
        for kind, topic in self.missing():
            records = [r for own in self._own(topic) for r in self._answers(own)]
            sides: dict[bool, list[ReplayRecord]] = {True: [], False: []}
            for record in records:
                held = is_held_out(record.prompt_token_ids, self._teaching.held_out_fraction)
                sides[held].append(record)
            make = self._draft if kind == "draft" else self._heads
            figures = make(topic, sides[False], sides[True])
            self._bench.say(f"{kind} for {topic}: {figures}")

    def _own(self, topic: str) -> list[str]:
        return self._topics if topic == ALL else [topic]

    def _answers(self, topic: str) -> list[ReplayRecord]:
        if topic not in self._records:
            served = self._bench.frozen(topic, self._teaching.answers)
            self._records[topic] = [one.record for one in served]
        return self._records[topic]

    def _draft(
        self, topic: str, train: Sequence[ReplayRecord], held_out: Sequence[ReplayRecord]
    ) -> dict[str, Any]:
        judge = self._bench.judge
        before = float(judge.score(None, held_out).acceptance.mean())
        began = time.process_time()
        state = _distilled(train, self._teaching)
        spent = time.process_time() - began
        figures = {
            "held_out_acceptance_before": before,
            "held_out_acceptance": float(judge.score(state, held_out).acceptance.mean()),
            "records": len(train),
            "seconds": round(spent, 1),
        }
        save_expert(self.folder("draft", topic), state, self.recipe("draft", topic), figures)
        return figures

    def _heads(
        self, topic: str, train: Sequence[ReplayRecord], held_out: Sequence[ReplayRecord]
    ) -> dict[str, Any]:
        teaching = self._teaching
        dtype = resolve_dtype("auto", resolve_device("auto"))
        target = load_causal_lm(TARGET, dtype, attention="sdpa")
        began = time.process_time()
        dataset, exam = (_lesson(target, side, teaching.num_heads) for side in (train, held_out))
        output = target.get_output_embeddings().weight
        config = HeadsConfig(
            teaching.num_heads, output.shape[1], output.shape[0], teaching.own_output
        )
        heads = MedusaHeads(config, output)
        training = HeadTrainingSettings(
            steps=1, learning_rate=teaching.head_learning_rate, dtype=dtype, seed=teaching.seed
        )
        steps = -(-len(dataset.labels) // training.positions) * teaching.passes
        train_heads(heads, dataset, HeadTrainingSettings(**asdict(training) | {"steps": steps}))
        figures = {
            "held_out_accuracy": [round(share, 4) for share in head_accuracy(heads, exam)],
            "records": len(train),
            "positions": len(dataset.labels),
            "steps": steps,
            "parameters": sum(p.numel() for p in heads.parameters()),
            "seconds": round(time.process_time() - began, 1),
        }
        folder = self.folder("heads", topic)
        shutil.rmtree(folder, ignore_errors=True)
        save_heads(folder, config, {k: v.to(dtype) for k, v in heads.state_dict().items()})
        note_facts(folder, self.recipe("heads", topic), figures)
        return figures


def _lesson(target: Any, records: Sequence[ReplayRecord], num_heads: int) -> HeadDataset:
    pairs = [(r.prompt_token_ids.tolist(), r.output_token_ids.tolist()) for r in records]
    return make_dataset(target, pairs, num_heads, MAX_LENGTH)


def _distilled(train: Sequence[ReplayRecord], teaching: Teaching) -> Mapping[str, Tensor]:
    """The general draft's weights after so many passes over the records."""
    rng = np.random.default_rng(teaching.seed)
    last = max(1, teaching.passes // 3)
    state: dict[str, Tensor] | None = None
    for rate, passes in zip(teaching.learning_rates, (teaching.passes - last, last), strict=True):
        distiller = Distiller(str(DRAFT), DistillerSettings(learning_rate=rate))
        distiller.reset(state)
        for _ in range(passes):
            for batch in micro_batches(train, teaching.micro_batch, rng):
                distiller.micro_step(make_batch(batch, MAX_LENGTH))
        state = distiller.state_dict()
    assert state is not None
    return state
