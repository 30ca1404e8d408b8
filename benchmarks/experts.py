"""Train one draft per topic offline for the benchmarks; those that are there are kept.

    make experts ARGS="--seconds 60"

The engine answers the topic's training prompts; the distiller trains the general draft on the
replay records. An expert is a model folder with the facts that decided its weights.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decoding import answers
from harness import arguments, say
from models import DRAFT, SMALL, TARGET, file_hash, find_models, load_engine, model_hashes
from prompts import Prompt, mark_of, source_of, training_prompts
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import logging

from paceline.actors.atomic_file import replace_file
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.replay.record import MAX_LENGTH, ReplayRecord, is_held_out
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.settings import DistillerSettings
from paceline.deploy.demo.prompts import TOPICS

_ROWS = 16
_SAMPLED, _TEMPERATURE = 0.3, 0.8
_FACTS, _WEIGHTS = "recipe.json", "model.safetensors"


def prepare(threads: int) -> None:
    """Make this process ready to serve and train on so many threads."""
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_environment()
    forbid_compiling()


def endless_batches(
    records: Sequence[ReplayRecord], size: int, seed: int = 0
) -> Iterator[list[ReplayRecord]]:
    """Micro-batches of ``size`` records, pass after pass, each in another order."""
    rng = np.random.default_rng(seed)
    while True:
        yield from micro_batches(records, size, rng)


def split_records(
    records: Sequence[ReplayRecord], held_out_fraction: float
) -> tuple[list[ReplayRecord], list[ReplayRecord]]:
    """Training records, and held-out ones of other prompts.

    Raises:
        ValueError: too few records.
    """
    sides: dict[bool, list[ReplayRecord]] = {False: [], True: []}
    for record in records:
        sides[is_held_out(record.conversation, held_out_fraction)].append(record)
    if not all(sides.values()):
        raise ValueError(f"{len(records)} records are too few")
    return sides[False], sides[True]


@dataclass(frozen=True, slots=True)
class Offline:
    """Offline training: until a limit, or until it gains no more.

    Attributes:
        micro_batch: records.
        steps_per_look: micro-steps between two evaluations on the held-out records.
        patience: evaluations without a gain after which training goes back to the best weights, at
            a third of the learning rate.
        least_gain: of the held-out acceptance, that counts as one.
        least_rate: share of the learning rate below which training has converged.
        held_out_fraction: of the prompts, kept from training.
        max_steps: micro-steps.
        max_seconds: of micro-steps; None is no limit.
    """

    micro_batch: int = 16
    steps_per_look: int = 100
    patience: int = 3
    least_gain: float = 0.001
    least_rate: float = 0.1
    held_out_fraction: float = 0.1
    max_steps: int = 8_000
    max_seconds: float | None = None


def distil(
    records: Sequence[ReplayRecord],
    distiller: Distiller,
    offline: Offline,
    kept: Path | None = None,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights that are best on held-out records, and how they were found.

    ``looks`` are evaluations: micro-steps, share of the learning rate, held-out acceptance.

    Args:
        records: of one topic or of several.
        distiller: at the weights to begin with.
        offline: see Offline.
        kept: file of the best weights so far, written at every look. If it is there, training goes
            on from them with a fresh optimizer.

    Raises:
        ValueError: too few records.
    """
    train, held_out = split_records(records, offline.held_out_fraction)
    batches, length = endless_batches(train, offline.micro_batch), distiller.max_length

    def evaluate(state: Mapping[str, torch.Tensor] | None) -> float:
        draft = distiller.served(state)
        return float(score_records(draft, held_out, max_length=min(MAX_LENGTH, length)).mean())

    if kept is not None and kept.exists():
        best, (best_value, rate, waited, spent, looks) = _read_progress(kept)
        distiller.reset(best)
        distiller.scale_rate(rate)
    else:
        best, best_value, rate, waited, spent = distiller.state_dict(), evaluate(None), 1.0, 0, 0.0
        looks = [[0, rate, round(best_value, 5)]]
    limit_s = float("inf") if offline.max_seconds is None else offline.max_seconds
    while rate >= offline.least_rate and looks[-1][0] < offline.max_steps and spent < limit_s:
        steps, began = 0, time.perf_counter()
        while steps < offline.steps_per_look and spent + time.perf_counter() - began < limit_s:
            distiller.micro_step(make_batch(next(batches), min(MAX_LENGTH, length)))
            steps += 1
        spent += time.perf_counter() - began
        state = distiller.state_dict()
        value, waited = evaluate(state), waited + 1
        looks.append([looks[-1][0] + steps, round(rate, 3), round(value, 5)])
        if value > best_value + offline.least_gain:
            best, best_value, waited = state, value, 0
        if waited == offline.patience:
            rate, waited = rate / 3.0, 0
            distiller.reset(best)
            distiller.scale_rate(rate)
        if kept is not None:
            say(f"{looks[-1][0]} micro-steps: {value:.4f} on held-out records")
            progress = json.dumps([best_value, rate, waited, spent, looks])
            replace_file(kept, partial(save_file, best, metadata={"progress": progress}))
    return best, {
        "held_out_acceptance": best_value,
        "records": len(records),
        "looks": looks,
        "converged": rate < offline.least_rate,
    }


def _read_progress(kept: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Best weights; their value, share of the rate, looks without a gain, seconds, all looks."""
    with safe_open(kept, framework="pt") as tensors:
        weights = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
        return weights, json.loads(tensors.metadata()["progress"])


def records_of(engine: Engine, prompts: Sequence[Prompt], max_tokens: int) -> list[ReplayRecord]:
    """Records of the answers, a share of ``_SAMPLED`` sampled, the others greedy."""
    requests = []
    for i, prompt in enumerate(prompts):
        sampled = int((i + 1) * _SAMPLED) > int(i * _SAMPLED)
        sampling = SamplingParams(max_tokens, temperature=_TEMPERATURE if sampled else 0.0)
        requests.append(
            GenerationRequest(prompt.key, prompt.token_ids, sampling, topic=prompt.topic)
        )
    found = (answer.record for answer in answers(engine, requests, len(requests)))
    return [record for record in found if record is not None]


def folder_of(out: Path, data: str | None, target: str = SMALL) -> Path:
    """Folder of the experts of a target, trained on prompts of a source."""
    parts = ["experts", *([] if data is None else [source_of(data)])]
    return out / "-".join(parts + ([] if target == SMALL else [Path(target).name]))


def recipe_of(
    prompts: Sequence[Prompt], settings: Mapping[str, Any], models: Sequence[Path] = (TARGET, DRAFT)
) -> dict[str, Any]:
    """All that decides an expert: base weights, prompts, settings."""
    own = {"base": model_hashes(*models), "prompts": mark_of(prompts), "settings": dict(settings)}
    return dict(json.loads(json.dumps(own)))


def facts_of(folder: Path) -> dict[str, Any] | None:
    """Recipe and figures of an expert; None if there is no whole one."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
        whole = facts["weights"] == file_hash(folder / _WEIGHTS)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(facts) if whole else None


def is_current(folder: Path, recipe: Mapping[str, Any]) -> bool:
    """Whether the folder holds a whole expert of this recipe."""
    facts = facts_of(folder)
    return facts is not None and facts.get("recipe") == recipe


def is_usable(folder: Path, topic: str, data: str | None) -> bool:
    """Whether the folder holds an expert of today's prompts and base, trained for any time."""
    settings = (facts_of(folder) or {}).get("recipe", {}).get("settings", {})
    if "answers" not in settings:
        return False
    prompts = training_prompts(data, topic, load_tokenizer(TARGET), settings["answers"])
    return is_current(folder, recipe_of(prompts, settings))


def save_expert(
    folder: Path,
    state: Mapping[str, torch.Tensor],
    recipe: Mapping[str, Any],
    figures: Mapping[str, Any],
    draft: Path = DRAFT,
) -> None:
    """Write a model folder, its facts last: half an expert is never taken for a whole one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in draft.iterdir():
        if path.suffix in {".json", ".jinja"}:
            shutil.copyfile(path, folder / path.name)
    tensors = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    note_facts(folder, recipe, figures)


def note_facts(folder: Path, recipe: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    """Write recipe, figures and the weights' hash into a folder of whole weights."""
    facts = {"recipe": recipe, "figures": figures, "weights": file_hash(folder / _WEIGHTS)}
    (folder / _FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is missing."""
    usual = {"threads": os.cpu_count() or 1}
    parser = arguments(__doc__, "target", "data", "threads", "out", **usual)
    parser.add_argument("--answers", type=int, default=400, help="per topic")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training per topic")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    options = parser.parse_args(argv)
    prepare(options.threads)
    target, draft = find_models(options.target)
    tokenizer, folder = load_tokenizer(target), folder_of(options.out, options.data, options.target)
    offline = Offline(micro_batch=8, max_seconds=options.seconds)
    settings = {"answers": options.answers, "max_tokens": options.max_tokens, **asdict(offline)}
    own = {"threads": options.threads, "target": target, "max_num_seqs": _ROWS}
    engine, _, _ = load_engine({"general": str(draft)}, **own)
    distiller = Distiller(str(draft), DistillerSettings(target_path=str(target)))
    for topic in TOPICS:
        prompts = training_prompts(options.data, topic, tokenizer, options.answers)
        recipe = recipe_of(prompts, settings, (target, draft))
        if is_current(folder / topic, recipe):
            say(f"{topic}: up to date")
            continue
        distiller.reset(None)
        state, figures = distil(records_of(engine, prompts, options.max_tokens), distiller, offline)
        save_expert(folder / topic, state, recipe, figures, draft)
        say(f"{topic}: {figures}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
