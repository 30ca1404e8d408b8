"""A draft model for the peers: the target's first layers, distilled on the target's own answers.

    PYTHONPATH=benchmarks .venv/bin/python -m peers.draft --target smollm2 --seconds 900 FOLDER

Paceline's own drafts read the target's hidden states, which no peer can give them; this one is a
plain causal LM with the target's vocabulary. It learns from the prompts that experts learn from,
none of which is measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from decoding import drive
from harness import say
from prompts import training_prompts
from safetensors.torch import save_file

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings
from paceline.deploy import model_store
from paceline.deploy.demo.prompts import TOPICS

_ROWS, _MICRO_BATCH, _MAX_TOKENS = 16, 8, 128


def first_layers(target: Path, layers: int, folder: Path) -> None:
    """Write a model of the target's embedding, first layers, norm and head, with its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)


def answers(target: Path, count: int, data: Path | None, threads: int) -> list[ReplayRecord]:
    """Records of the target's greedy answers to ``count`` training prompts of each topic."""
    settings = TargetSettings(
        str(target), num_threads=threads, max_num_seqs=_ROWS, max_model_len=1024, seed=1
    )
    engine, tokenizer, _ = build_engine(settings)
    prompts = [p for topic in TOPICS for p in training_prompts(data, topic, tokenizer, count)]
    sampling = SamplingParams(_MAX_TOKENS, temperature=0.0)
    requests = [GenerationRequest(p.key, p.token_ids, sampling, draft=DRAFT_OFF) for p in prompts]
    outputs = drive(engine, requests, _ROWS)
    return [output.record for output in outputs if output.record is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the draft, unless it is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="smollm2", help="as target.path")
    parser.add_argument("--data", type=Path, help="folder of rows; default: generated prompts")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=150, help="per topic")
    parser.add_argument("--seconds", type=float, default=900.0, help="of training")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(argv)
    if (options.folder / "config.json").is_file():
        say(f"A draft is in {options.folder}")
        return 0
    torch.set_num_threads(options.threads)
    prepare_environment()
    forbid_compiling()
    target = model_store.fetch(options.target, say, "--target")
    records = answers(target, options.answers, options.data, options.threads)
    say(f"{len(records)} answers")
    making = options.folder.with_name(f"{options.folder.name}.making")
    first_layers(target, options.layers, making)
    distiller = Distiller(str(making), DistillerSettings(learning_rate=5e-4))
    rng, began = np.random.default_rng(0), time.perf_counter()
    while time.perf_counter() - began < options.seconds:
        for batch in micro_batches(records, _MICRO_BATCH, rng):
            result = distiller.micro_step(make_batch(batch, distiller.max_length))
            if time.perf_counter() - began > options.seconds:
                break
        say(f"{distiller.steps} steps: expected acceptance {result.expected_acceptance:.3f}")
    save_file(distiller.state_dict(), making / "model.safetensors", metadata={"format": "pt"})
    making.rename(options.folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
