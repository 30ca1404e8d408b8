"""Make one trained draft per topic for the benchmarks; those that are there are kept.

    make experts ARGS="--seconds 60"

The project's own engine answers the topic's prompts with plain decoding, its replay records are
the lesson, and the project's own distiller teaches the general draft.
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
from expert_cache import DRAFT, TARGET, experts_dir, is_current, recipe_of, save_expert
from prompts import encode, training_texts
from rich.console import Console
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

_ROWS, _MICRO_BATCH, _MAX_LENGTH = 16, 8, 512
_HELD_OUT, _SAMPLED, _TEMPERATURE = 0.15, 0.3, 0.8
_LOOKS = 4  # times that the candidate is judged; the best one is kept


def answer(
    engine: Engine, topic: str, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[ReplayRecord]:
    """Records of plainly decoded answers, ``_SAMPLED`` of them sampled, the others greedy."""
    for i, prompt in enumerate(prompts):
        sampled = int((i + 1) * _SAMPLED) > int(i * _SAMPLED)
        sampling = SamplingParams(max_tokens, temperature=_TEMPERATURE if sampled else 0.0)
        engine.add(
            GenerationRequest(f"{topic}-{i}", prompt, sampling, topic=topic, draft=DRAFT_OFF)
        )
    records = []
    with tqdm(total=len(prompts), desc=f"{topic}: answers", leave=False) as bar:
        while engine.has_work:
            for output in engine.step():
                if output.record is not None:
                    records.append(output.record)
                    bar.update()
    return records


class Lesson:
    """One topic's training: the distiller, its records, and those that judge it."""

    def __init__(self, topic: str, records: Sequence[ReplayRecord], learning_rate: float) -> None:
        """Load the general draft as the candidate.

        Raises:
            ValueError: too few records to learn from and to judge by.
        """
        settings = DistillerSettings(learning_rate=learning_rate)
        self._distiller = Distiller(str(DRAFT), settings)
        self._topic = topic
        self._max_length = min(_MAX_LENGTH, self._distiller.max_length)
        good = [r for r in records if usable(r, self._distiller.vocab_size)]
        self.held_out = [r for r in good if is_held_out(r.prompt_token_ids, _HELD_OUT)]
        kept = {r.request_id for r in self.held_out}
        self.train = [r for r in good if r.request_id not in kept]
        if not self.train or not self.held_out:
            raise ValueError(f"{topic}: {len(good)} usable records are too few")

    def judge(self, state: dict[str, torch.Tensor] | None) -> float:
        """Mean acceptance on the held-out records of these weights (None: the general draft's)."""
        draft = self._distiller.served(state)
        scores = score_records(draft, self.held_out, max_length=self._max_length)
        return float(scores.mean())

    def learn(self, seconds: float) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Train for so long; the best weights of a few looks, and figures."""
        before = self.judge(None)
        best, after = self._distiller.state_dict(), -1.0
        rng = np.random.default_rng(0)
        spent, looks = 0.0, 0
        with tqdm(total=round(seconds), desc=f"{self._topic}: distil", leave=False) as bar:
            while looks < _LOOKS:
                for batch in micro_batches(self.train, _MICRO_BATCH, rng):
                    began = time.perf_counter()
                    self._distiller.micro_step(make_batch(batch, self._max_length))
                    spent += time.perf_counter() - began
                    bar.update(min(round(spent), bar.total) - bar.n)
                    if spent >= seconds * (looks + 1) / _LOOKS:
                        break
                else:
                    continue
                looks += 1
                state = self._distiller.state_dict()
                if (score := self.judge(state)) > after:
                    best, after = state, score
        return best, {
            "held_out_acceptance_before": before,
            "held_out_acceptance_after": after,
            "records_train": len(self.train),
            "records_held_out": len(self.held_out),
            "steps": self._distiller.steps,
        }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder of *_train.jsonl.gz; default: generated")
    parser.add_argument("--answers", type=int, default=400, help="per topic")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training per topic")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Make what is missing; say what training brought."""
    options, console = parse(argv), Console()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    names = ("answers", "seconds", "max_tokens", "learning_rate")
    settings = {name: getattr(options, name) for name in names}
    texts = training_texts(options.answers, options.data)
    recipes = {topic: recipe_of(own, settings) for topic, own in texts.items()}
    folders = {topic: experts_dir(options.out, options.data) / topic for topic in texts}
    missing = [topic for topic in texts if not is_current(folders[topic], recipes[topic])]
    if not missing:
        console.print(f"The experts in {experts_dir(options.out, options.data)} are up to date.")
        return 0
    prepare_environment()
    forbid_compiling()
    target = TargetSettings(str(TARGET), num_threads=options.threads, max_num_seqs=_ROWS, seed=1)
    engine, tokenizer, _ = build_engine(target)
    prompts = encode(tokenizer, texts)
    for topic in missing:
        ids = [prompt.token_ids for prompt in prompts[topic]]
        records = answer(engine, topic, ids, options.max_tokens)
        state, figures = Lesson(topic, records, options.learning_rate).learn(options.seconds)
        save_expert(folders[topic], state, recipes[topic], figures)
        console.print(
            f"{topic}: acceptance on {figures['records_held_out']} held-out answers "
            f"{figures['held_out_acceptance_before']:.3f} -> "
            f"{figures['held_out_acceptance_after']:.3f} "
            f"({figures['steps']} steps on {figures['records_train']} answers)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
