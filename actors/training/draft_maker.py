"""Making of a target's first draft without any data.

The target makes prompts up by its chat template (Magpie, Xu et al., arXiv 2406.08464), answers
them, and the draft is distilled from the answers. Generation and training take turns until the time
is over; what is there survives a kill.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paceline.actors.atomic_file import replace_file, replace_text
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine, StepOutput
from paceline.actors.engine.model_loader import load_tokenizer, resolve_device
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.turn_marks import first_turn, turn_marks
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import ReplayRecord, decode, encode, is_held_out
from paceline.actors.training.adapters import load_state
from paceline.actors.training.batches import (
    make_batch,
    micro_batches,
    plain_tokens,
    token_counts,
    usable,
)
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.draft_start import start_linear
from paceline.actors.training.eagle import FULL, STEPS, Effort, state_basis
from paceline.actors.training.expert_evaluation import step_agreement
from paceline.actors.training.forward import load_trainable
from paceline.actors.training.optimizer_state import load_checkpoint, save_checkpoint
from paceline.actors.training.settings import DistillerSettings
from paceline.actors.training.shares import make_shares
from paceline.actors.weights.eagle import (
    BASIS,
    VOCABULARY,
    EagleDraft,
    choose_vocabulary,
    new_draft,
    read_draft,
    save_draft,
)
from paceline.actors.weights.state_folder import lock_folder

# Of two CPU cores, and of a GPU.
_PROMPTS, _GPU_PROMPTS = 192, 1024  # of a turn of generation
_SEQUENCES, _GPU_SEQUENCES = 48, 256  # answered at a time
_STEPS, _GPU_STEPS = 24, 240  # of a turn of training
_MICRO_BATCH, _GPU_MICRO_BATCH = 8, 32  # records of a step
_BASIS_BATCHES = 64  # whose states give the basis
_FIRST_RECORDS = 192  # before training starts and the vocabulary is chosen
_GENERATING = 0.35  # share of the time
_HELD_OUT = 0.06
_PROMPT_TOKENS, _ANSWER_TOKENS = 96, 192
_LEAST_PROMPT = 2  # made-up tokens
_CONTEXT = 512
_TEMPERATURE = 0.8  # of every other answer; the others are greedy
# Of learning: at its highest, that of a draft that has learnt before, and the share at the end.
_RATE, _FURTHER_RATE, _LEAST_RATE = 1.5e-3, 6e-4, 0.05
# A new draft first learns the first token, on a CPU from a part of the vocabulary: the steps are
# seven times as fast. What it does when it serves comes after.
_ROUGH, _PARTIAL = 0.6, 0.95  # shares of the time that end the two
_TOKENS = 2560  # of the part; a GPU computes all, drawing them would take it longer
_SAVE_S = 60.0
_MOST_DRAFTED = 8  # tokens of a round
_MEASURED_TOKENS = 96  # of an answer
# A small target makes up few prompts of some kinds by itself: how two thirds of them begin.
_OPENINGS = (
    "Write a SQL query that",
    "Write SQL to",
    "Given a table with the columns",
    "Which SQL statement",
    "Write a Python function that",
    "Write a function to",
    "Implement a class",
    "Fix the bug in this code:",
    "Explain what this code does:",
    "How do I use the command",
    "Write a shell command that",
    "What does the command",
    "Show me how to list",
    "Tom has",
    "A train travels",
    "If a box holds",
    "How many",
    "Solve the equation",
    "Calculate the",
    "A shop sells",
    "What is",
    "Why do",
    "Explain the difference between",
    "Write a short story about",
    "Write an email",
    "Give me a list of",
    "Translate the following sentence",
    "Summarize the following text:",
    "How can I",
    "Describe",
)


@dataclass(frozen=True, slots=True)
class MakerSettings:
    """What to make, from what, and for how long.

    Attributes:
        target: folder of the target.
        out: folder of the draft; a folder ``making`` below it holds the state until the end.
        seconds: of generation and training, over all runs.
        seed: of prompts, answers and order.
        num_threads: of torch.
        layers: of the trunk.
        start: a draft of this target that has learnt, to go on from; None is the target's first
            layers. A further run keeps the first one's: by then ``out`` may hold what it has made.
    """

    target: str
    out: Path
    seconds: float
    seed: int = 0
    num_threads: int = 1
    layers: int = 1
    start: Path | None = None


@dataclass(frozen=True, slots=True)
class MakerProgress:
    """State of the making: seconds of all runs, answers, optimizer steps, last acceptance."""

    elapsed_s: float
    records: int
    steps: int
    acceptance: float


class DraftMaker:
    """Makes one draft; call :meth:`run`, and then :meth:`write`.

    Attributes:
        device: of generation and training, the GPU if there is one.
        step_records: answers of an optimizer step.
        start: see MakerSettings; the first run's.
    """

    def __init__(
        self,
        settings: MakerSettings,
        clock: Callable[[], float],
        report: Callable[[MakerProgress], None] = lambda _: None,
    ) -> None:
        """Load the target, and what an earlier run has left.

        Args:
            settings: see MakerSettings.
            clock: monotonic seconds.
            report: called a few times a minute.

        Raises:
            ModelError: no draft can be made for this target.
            StateFolderLockedError: another process makes one in this folder.
            ValueError: its chat template does not mark a user's text, or what an earlier run has
                left was begun with other settings.
        """
        self._settings, self._clock, self._report = settings, clock, report
        self.device = resolve_device("auto")
        on_cpu = self.device.type == "cpu"
        self.step_records = _MICRO_BATCH if on_cpu else _GPU_MICRO_BATCH
        self._prompts = _PROMPTS if on_cpu else _GPU_PROMPTS
        self._steps = _STEPS if on_cpu else _GPU_STEPS
        self._work = settings.out / "making"
        lock_folder(self._work, 0.0)
        torch.set_num_threads(settings.num_threads)
        self._tokenizer = load_tokenizer(settings.target)
        self._cue = turn_marks(self._tokenizer).cue
        self._first_turn = first_turn(self._tokenizer)
        self.start = settings.start
        self._elapsed = self._generated = 0.0  # seconds, of all and of generation
        self._chunks = 0  # files of records
        self._records: list[ReplayRecord] = []
        self._acceptance = 0.0
        for partial in self._work.glob(".*.partial"):  # of a killed run
            partial.unlink()
        self._restore()
        self._rng = np.random.default_rng([settings.seed, self._chunks])
        self._distiller: Distiller | None = None
        folder = self._work / "initial"
        if not (folder / "config.json").is_file():
            known = self.start and read_draft(self.start)
            save_draft(known or new_draft(settings.target, settings.layers), folder)
        self._engine = self._make_engine(folder)

    def _make_engine(self, draft: Path) -> Engine:
        own = self._settings
        engine, _, _ = build_engine(
            TargetSettings(
                model_path=own.target,
                drafts={GENERAL: str(draft)},
                num_threads=own.num_threads,
                max_num_seqs=_SEQUENCES if self.device.type == "cpu" else _GPU_SEQUENCES,
                max_model_len=_CONTEXT,
                num_speculative_tokens=0,
                prefix_cache=False,
                seed=own.seed * 7919 + self._chunks,
            )
        )
        return engine

    def run(self) -> None:
        """Generate and train until the time is over."""
        since = saved = self._clock()
        while self._elapsed < self._settings.seconds:
            if generates := self._needs_answers():
                self._generate()
            else:
                self._train()
            now = self._clock()
            self._elapsed += now - since
            self._generated += generates * (now - since)
            since = now
            if now - saved > _SAVE_S:
                self._save()
                saved = since = self._clock()
            self._report(self.progress)
        if self._distiller is None:
            self._prepare()
        self._save()

    def write(self) -> Path:
        """Write the draft that was made; returns its folder."""
        assert self._distiller is not None
        state = self._distiller.state_dict()
        known = self._usable(self._distiller.vocab_size)
        parts = micro_batches(known, self.step_records, self._rng)[:_BASIS_BATCHES]
        batches = (make_batch(part, _CONTEXT) for part in parts)
        state[BASIS] = state_basis(self._distiller.served(state), batches)
        draft = read_draft(self._work / "initial")
        load_state(draft, state)
        save_draft(draft, self._settings.out)
        return self._settings.out

    @property
    def progress(self) -> MakerProgress:
        """The present state."""
        steps = self._distiller.steps if self._distiller else 0
        return MakerProgress(self._elapsed, len(self._records), steps, self._acceptance)

    def parameters(self) -> int:
        """Trained parameters of the draft."""
        draft = read_draft(self._work / "initial")
        return sum(parameter.numel() for parameter in draft.parameters())

    def held_out(self) -> list[ReplayRecord]:
        """Answers that the draft has not learnt from."""
        return [r for r in self._records if is_held_out(r.conversation, _HELD_OUT)]

    def step_acceptance(self, records: Sequence[ReplayRecord]) -> tuple[list[float], list[float]]:
        """Share of tokens on which draft and target agree, for each drafted step in turn.

        Returns:
            of the draft, and of what it started from.
        """
        assert self._distiller is not None
        now, before = (
            step_agreement(self._distiller.served(state), records, max_length=_CONTEXT)
            for state in (self._distiller.state_dict(), None)
        )
        return now, before

    def _needs_answers(self) -> bool:
        """Whether answers come next.

        What a draft has learnt before it forgets on few answers, so all are made first.
        """
        until = self._settings.seconds if self.start else self._elapsed
        return len(self._records) < _FIRST_RECORDS or self._generated < _GENERATING * until

    def _generate(self) -> None:
        """Have prompts made up and answered."""
        texts = self._answers([self._prompt_request(i) for i in range(self._prompts)])
        requests: list[GenerationRequest] = []
        for request, tokens, _ in texts:
            if len(tokens) > _LEAST_PROMPT and tokens[-1] == self._cue[0]:  # it ended the text
                prompt = (*request.prompt_token_ids, *tokens[:-1], *self._cue)
                requests.append(self._answer_request(prompt, len(requests)))
        records = [record for _, _, record in self._answers(requests) if record is not None]
        packed = msgpack.packb([encode(record) for record in records])
        path = self._work / f"records-{self._chunks:05d}.msgpack"
        replace_file(path, lambda partial: partial.write_bytes(packed))
        self._chunks += 1
        self._records += records

    def _prompt_request(self, index: int) -> GenerationRequest:
        opening = _OPENINGS[int(self._rng.integers(len(_OPENINGS)))]
        words = self._tokenizer(opening, add_special_tokens=False)["input_ids"]
        start = (*self._first_turn, *(words if index % 3 else ()))
        sampling = SamplingParams(_PROMPT_TOKENS, temperature=1.0, stop_token_ids=self._cue[:1])
        return GenerationRequest(f"p{index}", start, sampling, draft=GENERAL, recorded=False)

    def _answer_request(self, prompt: tuple[int, ...], index: int) -> GenerationRequest:
        temperature = _TEMPERATURE if index % 2 else 0.0
        sampling = SamplingParams(_ANSWER_TOKENS, temperature=temperature)
        return GenerationRequest(f"{self._chunks}-{index}", prompt, sampling, draft=GENERAL)

    def _answers(
        self, requests: Sequence[GenerationRequest]
    ) -> list[tuple[GenerationRequest, list[int], ReplayRecord | None]]:
        """Each request with its output and record."""
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        records: dict[str, ReplayRecord] = {}
        for request in requests:
            self._engine.add(request)
        while self._engine.has_work:
            for output in self._engine.step():
                tokens[output.request_id] += output.chunk.token_ids
                if output.record is not None:
                    records[output.request_id] = output.record
        ids = [(request, request.request_id) for request in requests]
        return [(request, tokens[i], records.get(i)) for request, i in ids]

    def _prepare(self) -> None:
        """Choose the vocabulary, and start or resume training."""
        folder, further = self._work / "initial", self.start is not None
        if not (further or (self._work / "weights.safetensors").is_file()):
            self._begin(folder)
        settings = DistillerSettings(
            learning_rate=_FURTHER_RATE if further else _RATE,
            warmup_steps=20,
            weight_decay=0.05,
            average_decay=0.995,
            target_path=self._settings.target,
        )
        self._distiller = Distiller(str(folder), settings)
        self._resume(self._distiller)

    def _begin(self, folder: Path) -> None:
        """Choose a new draft's vocabulary and first weights."""
        draft = load_trainable(str(folder), self._settings.target, torch.float32, self.device)
        assert isinstance(draft, EagleDraft)
        ids = choose_vocabulary(
            token_counts(self._records),
            plain_tokens(self._tokenizer),
            int(draft.config.vocab_size),
            len(draft.get_buffer(VOCABULARY)),
        )
        draft.get_buffer(VOCABULARY).copy_(ids)
        start_linear(draft, self._usable(int(draft.config.vocab_size)), _CONTEXT)
        save_draft(draft, folder)

    def _usable(self, vocab_size: int) -> list[ReplayRecord]:
        """The records to learn from."""
        return [
            record
            for record in self._records
            if usable(record, vocab_size) and not is_held_out(record.conversation, _HELD_OUT)
        ]

    def _effort(self, part: float) -> Effort:
        """What the objective computes in a part of the time."""
        if part >= _PARTIAL:
            return FULL
        rough = part < _ROUGH and self.start is None
        tokens = _TOKENS if self.device.type == "cpu" else None
        return Effort(1 if rough else STEPS, tokens, self._rng)

    def _train(self) -> None:
        if self._distiller is None:
            self._prepare()
        assert self._distiller is not None
        distiller = self._distiller
        records = self._usable(distiller.vocab_size)
        part = min(1.0, self._elapsed / self._settings.seconds)
        rate = _LEAST_RATE + (1 - _LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * part))
        distiller.scale_rate(rate)
        distiller.set_effort(self._effort(part))
        for batch in micro_batches(records, self.step_records, self._rng)[: self._steps]:
            share = make_shares([make_batch(batch, _CONTEXT)], distiller.settings.objective)[0]
            self._acceptance = distiller.learn(share).expected_acceptance

    def _save(self) -> None:
        """Write what a further run needs."""
        if self._distiller is not None and self._distiller.steps:
            state = self._distiller.state_dict()
            replace_file(
                self._work / "weights.safetensors",
                lambda partial: save_file(state, partial, metadata={"format": "pt"}),
            )
            save_checkpoint(
                self._work / "optimizer", self._distiller.live_state(), 1, _STATE_DIGEST
            )
        facts = self._chosen() | {
            "start": None if self.start is None else str(self.start),
            "elapsed_s": self._elapsed,
            "generated_s": self._generated,
        }
        text = json.dumps(facts) + "\n"
        path = self._work / "state.json"
        replace_text(path, text)

    def _chosen(self) -> dict[str, Any]:
        """What must be the same in every run."""
        return {"seed": self._settings.seed, "layers": self._settings.layers}

    def _restore(self) -> None:
        state = self._work / "state.json"
        if state.is_file():
            facts = json.loads(state.read_text(encoding="utf-8"))
            for name, value in self._chosen().items():
                if facts[name] != value:
                    raise ValueError(
                        f"{self._work} was begun with {name} {facts[name]} instead of {value}; "
                        "go on with that, or remove the folder"
                    )
            self.start = None if facts["start"] is None else Path(facts["start"])
            self._elapsed, self._generated = facts["elapsed_s"], facts["generated_s"]
        for path in sorted(self._work.glob("records-*.msgpack")):
            self._records += map(decode, msgpack.unpackb(path.read_bytes()))
            self._chunks += 1

    def _resume(self, distiller: Distiller) -> None:
        weights = self._work / "weights.safetensors"
        if not weights.is_file():
            return
        distiller.reset(load_file(weights))
        state = load_checkpoint(self._work / "optimizer", 1, _STATE_DIGEST)
        if state is not None:
            distiller.resume(state)


_STATE_DIGEST = "making"


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of one greedy request with a draft, over plain decoding.

    Attributes:
        k: drafted tokens per round, the best by prediction.
        predicted: from the acceptance of each step, and the profiled times of target and draft.
        measured: tokens per second with k drafted tokens over those with none, the median of pairs
            in turns.
        mean_acceptance_length: tokens per round of the measured answers.
    """

    k: int
    predicted: float
    measured: float
    mean_acceptance_length: float


def measure_speed(
    settings: MakerSettings,
    acceptance: Sequence[float],
    prompts: Sequence[tuple[int, ...]],
    clock: Callable[[], float],
) -> Speed:
    """Predict the speed-up of a made draft, then measure it.

    Args:
        settings: of the maker; the draft is in ``out``.
        acceptance: of each drafted step.
        prompts: answered one at a time.
        clock: seconds.
    """
    own = TargetSettings(
        model_path=settings.target,
        drafts={GENERAL: str(settings.out)},
        num_threads=settings.num_threads,
        max_num_seqs=1,
        max_model_len=_CONTEXT,
        prefix_cache=False,
        seed=settings.seed,
    )
    engine, _, _ = build_engine(own)
    costs = engine.draft_runner.expected_round_seconds(_MOST_DRAFTED)
    gains, reach = [1.0], 1.0
    for step in range(_MOST_DRAFTED):
        reach *= acceptance[min(step, len(acceptance) - 1)]
        gains.append(gains[-1] + reach)
    predicted = [gain * costs[0] / cost for gain, cost in zip(gains, costs, strict=True)]
    k = max(range(1, _MOST_DRAFTED + 1), key=lambda tokens: predicted[tokens])
    ratios, drafted = [], [0, 0]
    for number, prompt in enumerate(prompts):
        rates = {}
        for tokens in (0, k) if number % 2 else (k, 0):
            sampling = SamplingParams(_MEASURED_TOKENS, temperature=0.0)
            request = GenerationRequest(
                f"{number}-{tokens}",
                prompt,
                sampling,
                draft=GENERAL,
                num_speculative_tokens=tokens,
                recorded=False,
            )
            start, emitted, rounds = clock(), 0, 0
            for output in _run(engine, request):
                emitted, rounds = emitted + len(output.chunk.token_ids), rounds + 1
            rates[tokens] = emitted / (clock() - start)
            if tokens:
                drafted = [drafted[0] + emitted, drafted[1] + rounds]
        ratios.append(rates[k] / rates[0])
    return Speed(k, predicted[k], float(np.median(ratios)), drafted[0] / max(drafted[1], 1))


def _run(engine: Engine, request: GenerationRequest) -> Iterator[StepOutput]:
    engine.add(request)
    while engine.has_work:
        yield from engine.step()
