"""What studies of learning stand on: a target with its drafts, prompts, kept answers, units."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import yaml
from decoding import Answer, answers
from harness import Store, arguments, digest, written
from models import config_of, load_engine, model_hashes
from prompts import Prompt, mark_of, measured_prompts, source_of, training_prompts
from torch import Tensor

from online.learner import Evaluator, Learner, Learning, SyntheticRecords
from online.rounds import Agreement, Tally, replayed
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import Journal
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.speculation.proposer import INITIAL_SUFFIX
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.synthetic.generator import SyntheticAnswerGenerator
from paceline.actors.training.training_loop import RULES
from paceline.deploy.config.learning_settings import (
    replay_settings,
    synthetic_settings,
    trainer_settings,
)

ROWS = 8  # requests at once
FROZEN = GENERAL + INITIAL_SUFFIX
_ANSWERED_ROWS = 32  # of answers that are kept
_PART = 128  # prompts that one engine answers before another may follow
_SEED = 1
# A micro-step of a record at a time gives the same steps, in more time.
_USUAL = {"training.micro_batch": 8, "training.accumulation": 1, "router.enabled": False}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured.

    Attributes:
        stream: prompts of a topic's stream.
        test: prompts of its test.
        phase: prompts of a phase of a shift.
        ceiling: prompts of the offline ceiling at most.
        window: requests per window.
        checkpoints: requests after which the served draft is evaluated on the test.
        max_tokens: of an answer.
        k: drafted tokens of a round, constant so that windows compare; as many as EAGLE drafts
            are trained for.
    """

    stream: int = 1_000
    test: int = 100
    phase: int = 500
    ceiling: int = 2_000
    window: int = 50
    checkpoints: tuple[int, ...] = (0, 48, 96, 200, 400, 700, 1_000)
    max_tokens: int = 96
    k: int = 3


# Ten minutes at most. A phase has some ten held-out prompts: an expert with less than four is
# not trained.
QUICK = Sizes(stream=64, test=32, phase=32, ceiling=64, window=16, checkpoints=(0, 32, 64))
_QUICK_KEYS = {"replay.held_out_fraction": 0.3}  # of so few prompts a fifth is too few for the gate


def lab_arguments(doc: str | None) -> argparse.ArgumentParser:
    """Parser of the options of a :class:`Lab`."""
    names = ("quick", "target", "data", "threads", "dtype", "out")
    parser = arguments(doc, *names, target="smollm2", threads=2)
    add = parser.add_argument
    add("--set", nargs="+", default=[], metavar="KEY=VALUE", help="keys of the configuration")
    add("--micro-steps", type=int, default=Learning().micro_steps, help="of a round of training")
    return parser


class Lab:
    """Prompts, answers, engines and evaluator of units, each made once and when it is needed.

    The configuration decides how drafts are trained.

    Args:
        options: of :func:`lab_arguments`.
        sizes: see Sizes.
    """

    def __init__(self, options: argparse.Namespace, sizes: Sizes) -> None:
        self.store, self.data, self.sizes = Store(options.out / "online"), options.data, sizes
        self.threads, self.dtype, self._options = options.threads, options.dtype, options
        pairs = (text.split("=", 1) for text in options.set)
        keys = _USUAL | (_QUICK_KEYS if options.quick else {})
        self.config = config_of(
            options.target, keys | {key: yaml.safe_load(value) for key, value in pairs}
        )
        self.target, self.draft = self.config.target_path, self.config.draft_paths[GENERAL]
        self._training: dict[str, list[Prompt]] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer."""
        return load_tokenizer(self.target)

    @cached_property
    def answering_engine(self) -> Engine:
        """Engine of the kept answers; it has a draft, so that records hold what drafts read."""
        return self.engine([GENERAL], max_num_seqs=_ANSWERED_ROWS)

    @cached_property
    def evaluator(self) -> Evaluator:
        """Evaluator of the general draft's architecture."""
        return Evaluator(self.target, self.draft, self.dtype)

    def engine(self, experts: Sequence[str], **more: Any) -> Engine:
        """A new engine; every expert starts as the general draft. ``more`` as TargetSettings."""
        own = {"target": self.target, "max_num_seqs": ROWS, "dtype": self.dtype}
        named = {"threads": self.threads, "k": self.sizes.k, **own}
        return load_engine(dict.fromkeys(experts, str(self.draft)), **(named | more))[0]

    def trainer(self, experts: Sequence[str]) -> TrainerSettings:
        """Settings of a trainer of these experts, by the configuration."""
        settings = trainer_settings(self.config)
        return replace(
            settings,
            draft_paths=dict.fromkeys(experts, str(self.draft)),
            distiller=replace(settings.distiller, dtype=self.dtype),
        )

    @contextmanager
    def learner(
        self,
        experts: Sequence[str],
        learning: Learning,
        put: Callable[[SwapWeights], None] = lambda _: None,
    ) -> Iterator[Learner]:
        """A learner of these experts, as configured."""
        synthetic, replay = self._synthetic(), replay_settings(self.config)
        with tempfile.TemporaryDirectory() as folder:
            more = {"replay": replay, "synthetic": synthetic}
            yield Learner(Path(folder), self.trainer(experts), learning, put, **more)

    def _synthetic(self) -> SyntheticRecords | None:
        settings = synthetic_settings(self.config)
        if settings is None:
            return None
        names = map(str, range(10**9))
        own = replace(settings, at_once=_ANSWERED_ROWS)
        generator = SyntheticAnswerGenerator(own, mark=lambda: next(names))
        engine = self.engine([GENERAL], max_num_seqs=_ANSWERED_ROWS)
        return SyntheticRecords(engine, generator, _ANSWERED_ROWS)

    def test_prompts(self, topic: str) -> list[Prompt]:
        """Prompts of a topic's test."""
        return measured_prompts(self.data, topic, self.tokenizer, self.sizes.test)

    def training_prompts(self, topic: str) -> list[Prompt]:
        """A topic's whole training side."""
        if topic not in self._training:
            self._training[topic] = training_prompts(self.data, topic, self.tokenizer)
        return self._training[topic]

    def stream(self, topic: str, count: int | None = None) -> list[Prompt]:
        """The first prompts of a topic's training side."""
        return self.training_prompts(topic)[: self.sizes.stream if count is None else count]

    def serve(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        draft_of: Callable[[Prompt], str] = lambda prompt: prompt.topic,
        temperature: float = 0.0,
        rows: int = ROWS,
    ) -> Iterator[Answer]:
        """Answer prompts, ``rows`` at once; yield each as it ends, with its record."""
        sampling = SamplingParams(self.sizes.max_tokens, temperature=temperature)
        requests = (
            GenerationRequest(p.key, p.token_ids, sampling, topic=p.topic, draft=draft_of(p))
            for p in prompts
        )
        return answers(engine, requests, rows)

    def records(self, name: str, prompts: Sequence[Prompt]) -> list[ReplayRecord]:
        """Records of greedy answers, in the prompts' order; those on disk are not made again.

        No draft changes what the target says, so every arm learns from and is judged by the same.
        """
        facts = {"max_tokens": self.sizes.max_tokens, **self.facts}
        name = f"{source_of(self.data)}-{name}-{digest(facts)}.records"
        journal = Journal(self.store.folder / "answers" / name)
        kept = {str(msgpack.unpackb(data)["mark"]): data for data in journal.read()}
        journal.rewrite(kept.values())  # a torn end would hide what is appended behind it
        marks = {prompt.key: mark_of([prompt]) for prompt in prompts}
        missing = [prompt for prompt in prompts if marks[prompt.key] not in kept]
        for at in range(0, len(missing), _PART):
            part = missing[at : at + _PART]
            found = self.serve(
                self.answering_engine, part, lambda _: DRAFT_OFF, rows=_ANSWERED_ROWS
            )
            for answer in found:
                assert answer.record is not None
                entry = {"mark": marks[answer.key], "record": encode(answer.record)}
                kept[entry["mark"]] = data = msgpack.packb(entry)
                journal.append(data)
        return [decode(msgpack.unpackb(kept[marks[prompt.key]])["record"]) for prompt in prompts]

    def stream_records(self, topic: str, count: int | None = None) -> list[ReplayRecord]:
        """Records of the first prompts of a topic's training side."""
        return self.records(f"{topic}-train", self.stream(topic, count))

    def test_records(self, topic: str) -> list[ReplayRecord]:
        """Records of a topic's test."""
        return self.records(f"{topic}-test", self.test_prompts(topic))

    def replayed(self, agreements: Iterable[Agreement]) -> list[Tally]:
        """What speculation with a draft that agrees so would have done."""
        return [replayed(own, self.sizes.k, self.sizes.max_tokens) for own in agreements]

    def scores(self, topic: str, state: Mapping[str, Tensor] | None) -> list[float]:
        """Acceptance per test prompt of a topic under these weights; None are the initial ones."""
        found = self.evaluator.score(state, self.test_records(topic))
        return [round(float(score), 5) for score in found]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """Models and their arithmetic, for settings."""
        return {
            "models": digest(model_hashes(self.target, self.draft)),
            "dtype": self.dtype,
            "threads": self.threads,
        }

    def settings(self, topics: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
        """All that decides a unit over these topics; ``more`` must hold its Learning, if any."""
        prompts = [p for t in topics for p in (*self.stream(t), *self.test_prompts(t))]
        trainer = self.trainer(())
        plain = replace(trainer.distiller, target_path=None)
        return {
            **self.facts,
            "data": source_of(self.data),
            "topics": list(topics),
            "prompts": mark_of(prompts),
            "serving": [self.sizes.max_tokens, self.sizes.k],
            "trainer": asdict(replace(trainer, distiller=plain, optimizer_dir=None)),
            "replay": asdict(replay_settings(self.config)),
            "rules": RULES,
            **more,
        }

    def run_settings(self, topics: Sequence[str]) -> dict[str, Any]:
        """Settings of a run over these topics, its sizes and options among them."""
        own = {"sizes": asdict(self.sizes), "options": written(self._options)}
        return self.settings(topics, own)

    def kept(self, name: str, settings: Mapping[str, Any]) -> Path:
        """File that a unit which takes long writes while it is made."""
        return self.store.path(self._named(name), settings, ".safetensors")

    def unit(
        self, name: str, settings: Mapping[str, Any], make: Callable[[], dict[str, Any]] | None
    ) -> dict[str, Any] | None:
        """A unit from disk, else from ``make`` if there is one."""
        named = self._named(name)
        if make is None:
            return self.store.find(named, settings)
        return self.store.unit(named, settings, make)

    def _named(self, unit: str) -> str:
        return f"{Path(self.target).name}-{source_of(self.data)}-{unit}"
