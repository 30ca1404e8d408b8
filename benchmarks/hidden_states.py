"""Hidden states of EAGLE drafts' records: recorded by the target, or computed again by the trainer.

    .venv/bin/python benchmarks/hidden_states.py --target smollm2 --prompts 64 --steps 40

The same answers are learnt twice, from the recorded states and from those of a forward of the
target in the trainer's process, which then needs the whole target. Seconds are the processor's.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import drive
from harness import arguments, write
from prompts import chat_ids

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.deepspeed_setup import prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import step_agreement
from paceline.actors.training.settings import DistillerSettings
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import TOPICS, generate
from paceline.deploy.draft_store import fetch_models

_HELD_OUT = 16  # records


def collect(target: Path, draft: Path, count: int) -> list[ReplayRecord]:
    """Records of greedy answers."""
    settings = TargetSettings(
        str(target), {"general": str(draft)}, num_threads=1, max_model_len=1024, seed=1
    )
    engine, tokenizer, _ = build_engine(settings)
    texts = [text for topic in TOPICS for text in generate(topic, count // len(TOPICS), seed=9)]
    requests = [
        GenerationRequest(f"{i}", chat_ids(tokenizer, text), SamplingParams(96, temperature=0.0))
        for i, text in enumerate(texts)
    ]
    return [out.record for out in drive(engine, requests, 8) if out.record is not None]


@torch.inference_mode()
def recomputed(model: Any, record: ReplayRecord) -> ReplayRecord:
    """A record with the states of a forward of the target."""
    assert record.hidden is not None
    text = [*record.prompt_token_ids.tolist(), *record.output_token_ids.tolist()]
    end = record.hidden_start + len(record.hidden)
    state = model.model(torch.tensor([text[:end]]), use_cache=False).last_hidden_state[0]
    bits = state[record.hidden_start :].to(torch.bfloat16).view(torch.uint16).numpy()
    return replace(record, hidden=bits)


def learn(
    records: Sequence[ReplayRecord], draft: Path, target: Path, steps: int
) -> tuple[float, list[float]]:
    """Processor seconds of so many steps, and agreement with the target on held-out records."""
    distiller = Distiller(str(draft), DistillerSettings(target_path=str(target)))
    rng, done, began = np.random.default_rng(0), 0, time.process_time()
    while done < steps:
        for part in micro_batches(records[_HELD_OUT:], 8, rng)[: steps - done]:
            distiller.micro_step(make_batch(part, 512))
            done += 1
    seconds = time.process_time() - began
    draft = distiller.served(distiller.state_dict())
    return seconds, step_agreement(draft, records[:_HELD_OUT], max_length=512)


def main() -> int:
    """Print one JSON object."""
    parser = arguments(__doc__)
    parser.add_argument("--target", default="smollm2", help="as target.path")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("out/bench/hidden_states.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    prepare_environment("cpu")
    config = load_config(None, {"target.path": options.target})
    config = fetch_models(config, lambda line: sys.stderr.write(f"{line}\n"))
    target, draft = config.target_path, config.auto_draft
    records = collect(target, draft, options.prompts)
    np.random.default_rng(1).shuffle(records)  # type: ignore[arg-type]
    sizes = [len(encode(record)) for record in records]
    without = [len(encode(replace(record, hidden=None))) for record in records]
    began = time.process_time()
    read = [decode(encode(record)) for record in records]
    decode_s = (time.process_time() - began) / len(records)
    model = load_causal_lm(target, torch.bfloat16, attention="sdpa")
    began = time.process_time()
    again = [recomputed(model, record) for record in records]
    forward_s = (time.process_time() - began) / len(records)
    recorded_s, recorded = learn(read, draft, target, options.steps)
    _, other = learn(again, draft, target, options.steps)
    result = {
        "records": len(records),
        "bytes_per_record": {
            "recorded": round(np.mean(sizes)),
            "recomputed": round(np.mean(without)),
        },
        "seconds_per_record": {
            "recorded": round(decode_s, 4),
            "recomputed": round(forward_s, 4),
        },
        "seconds_per_step": round(recorded_s / options.steps, 3),
        "target_mb_in_the_trainer": round(sum(p.nbytes for p in model.parameters()) / 1e6),
        "agreement": {
            "recorded": [round(value, 3) for value in recorded],
            "recomputed": [round(value, 3) for value in other],
        },
    }
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    write(options.out, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
