"""Train one draft per topic for the benchmarks; those that are there are kept.

    make experts ARGS="--seconds 60"

The engine answers the topic's prompts with plain decoding; the distiller trains the general draft
on the replay records.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import drive
from expert_cache import DRAFT, TARGET, experts_dir, is_current, recipe_of, save_expert
from harness import arguments, say
from prompts import encode, training_texts
from tqdm import tqdm
from transformers.utils import logging

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.training.batches import make_batch, micro_batches, usable
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.settings import DistillerSettings

ROWS, MICRO_BATCH, MAX_LENGTH = 16, 8, 512
_HELD_OUT, _SAMPLED, _TEMPERATURE = 0.15, 0.3, 0.8
_EVALUATIONS = 4  # the best weights are kept


def answer(
    engine: Engine, topic: str, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[ReplayRecord]:
    """Records of plainly decoded answers, a share of ``_SAMPLED`` sampled, the others greedy."""
    requests = []
    for i, prompt in enumerate(prompts):
        sampled = int((i + 1) * _SAMPLED) > int(i * _SAMPLED)
        sampling = SamplingParams(max_tokens, temperature=_TEMPERATURE if sampled else 0.0)
        name = f"{topic}-{i}"
        requests.append(GenerationRequest(name, prompt, sampling, topic=topic, draft=DRAFT_OFF))
    outputs = drive(engine, requests, len(requests))
    records = (output.record for output in outputs if output.record is not None)
    return list(tqdm(records, total=len(prompts), desc=f"{topic}: answers", leave=False))


class Lesson:
    """One topic's training: distiller, training records, and held-out ones.

    Raises:
        ValueError: too few records.
    """

    def __init__(
        self, records: Sequence[ReplayRecord], settings: DistillerSettings, held_out: float
    ) -> None:
        self.distiller = Distiller(str(DRAFT), settings)
        self._max_length = min(MAX_LENGTH, self.distiller.max_length)
        good = [r for r in records if usable(r, self.distiller.vocab_size)]
        self.held_out = [r for r in good if is_held_out(r.prompt_token_ids, held_out)]
        kept = {r.request_id for r in self.held_out}
        self.train = [r for r in good if r.request_id not in kept]
        self.seconds = 0.0
        if not self.train or not self.held_out:
            raise ValueError(f"{len(good)} usable records are too few")

    def evaluate(self, state: dict[str, torch.Tensor] | None) -> float:
        """Mean held-out acceptance of these weights as served (None: the general draft's)."""
        draft = self.distiller.served(state)
        return float(score_records(draft, self.held_out, max_length=self._max_length).mean())

    def learn(self, seconds: float, topic: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Train for so long; return the best weights of a few evaluations, and figures."""
        before = self.evaluate(None)
        best, after = self.distiller.state_dict(), -1.0
        rng, evaluations = np.random.default_rng(0), 0
        with tqdm(total=round(seconds), desc=f"{topic}: distil", leave=False) as bar:
            while evaluations < _EVALUATIONS:
                for batch in micro_batches(self.train, MICRO_BATCH, rng):
                    self.step(batch, time.perf_counter)
                    bar.update(min(round(self.seconds), bar.total) - bar.n)
                    if self.seconds >= seconds * (evaluations + 1) / _EVALUATIONS:
                        evaluations += 1
                        state = self.distiller.state_dict()
                        if (score := self.evaluate(state)) > after:
                            best, after = state, score
                        break
        return best, {
            "held_out_acceptance_before": before,
            "held_out_acceptance_after": after,
            "records_train": len(self.train),
            "records_held_out": len(self.held_out),
            "steps": self.distiller.steps,
        }

    def step(self, batch: Sequence[ReplayRecord], clock: Any) -> None:
        """One micro-step, its time added to ``seconds``."""
        began = clock()
        self.distiller.micro_step(make_batch(batch, self._max_length))
        self.seconds += clock() - began


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "out")
    parser.add_argument("--data", type=Path, help="folder of *_train.jsonl.gz; default: generated")
    parser.add_argument("--answers", type=int, default=400, help="per topic")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training per topic")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    names = ("answers", "seconds", "max_tokens", "learning_rate")
    settings = {name: getattr(options, name) for name in names}
    texts = training_texts(options.answers, options.data)
    recipes = {topic: recipe_of(own, settings) for topic, own in texts.items()}
    folder = experts_dir(options.out, options.data)
    missing = [topic for topic in texts if not is_current(folder / topic, recipes[topic])]
    if not missing:
        say(f"The experts in {folder} are up to date.")
        return 0
    prepare_environment()
    forbid_compiling()
    target = TargetSettings(str(TARGET), num_threads=options.threads, max_num_seqs=ROWS, seed=1)
    engine, tokenizer, _ = build_engine(target)
    prompts = encode(tokenizer, texts)
    for topic in missing:
        ids = [prompt.token_ids for prompt in prompts[topic]]
        records = answer(engine, topic, ids, options.max_tokens)
        lesson = Lesson(records, DistillerSettings(learning_rate=options.learning_rate), _HELD_OUT)
        state, figures = lesson.learn(options.seconds, topic)
        save_expert(folder / topic, state, recipes[topic], figures)
        say(f"{topic}: {figures}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
