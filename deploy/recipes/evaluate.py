"""Figures of target, draft and router on held-out rows, as JSON for the model cards.

    python -m paceline.deploy.recipes.evaluate --data DATA --target TARGET --draft DRAFT \\
        --router ROUTER --out figures.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from paceline.actors.router.policy import GENERAL
from paceline.deploy.demo import prompts
from paceline.deploy.recipes import data, router
from paceline.deploy.recipes.answers import Answer, answer_rows, loops, prompt_ids_of
from paceline.deploy.recipes.draft import Lesson, expected_acceptance, greedy_agreement

log = logging.getLogger(__name__)

OTHER_GENERAL = {"arena: creative_writing"} | {
    f"spec-bench: {kind}" for kind in ("qa", "rag", "writing", "roleplay", "humanities")
}
LOSS_ROWS = 96  # the first ones of a topic's held-out rows
LOOP_TOKENS = 200  # a greedy answer that has not ended by then counts as endless


@torch.inference_mode()
def answer_loss(model: Any, tokenizer: Any, rows: Sequence[data.Row]) -> float:
    """Mean loss in nats per token of the rows' own answers, end-of-text included."""
    context = model.config.max_position_embeddings
    total, count = 0.0, 0
    prompts = prompt_ids_of(rows, tokenizer)
    for row, prompt in zip(data.encode_rows(rows, tokenizer), prompts, strict=True):
        ids = torch.from_numpy(row[:context]).long()[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        total += float(nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
        count += len(logits)
    return total / count


def loop_share(answers: Sequence[Answer], eos: int) -> dict[str, float]:
    """Shares of answers that repeat themselves, that do not end, and of either kind."""
    looping = np.array([loops(a.output_ids) for a in answers])
    endless = np.array([a.output_ids[-1] != eos for a in answers])
    return {
        "looping": float(looping.mean()),
        "endless": float(endless.mean()),
        "either": float((looping | endless).mean()),
    }


@torch.inference_mode()
def step_seconds(model: Any, context: int = 64, rounds: int = 40) -> float:
    """Time of one forward of one token over a cache of `context` tokens; the best of many."""
    ids = torch.ones((1, context), dtype=torch.long)
    best = float("inf")
    cache = model(input_ids=ids, use_cache=True).past_key_values
    for _ in range(rounds):
        begun = time.perf_counter()
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        best = min(best, time.perf_counter() - begun)
    return best


def target_figures(
    model: Any, tokenizer: Any, rows: Sequence[data.Row], prompts_per_topic: int, seed: int
) -> dict[str, dict[str, float]]:
    """Loss and loop shares by topic."""
    figures = {}
    for topic in data.TOPICS:
        mine = [row for row in rows if row.topic == topic]
        if not mine:
            continue
        answers = answer_rows(
            model,
            tokenizer,
            data.sample_rows(mine, prompts_per_topic, seed),
            max_new_tokens=LOOP_TOKENS,
            batch=prompts_per_topic,
        )
        figures[topic] = {
            "loss": answer_loss(model, tokenizer, mine[:LOSS_ROWS]),
            **loop_share(answers, model.config.eos_token_id),
        }
        log.info("%s %s", topic, figures[topic])
    return figures


def draft_figures(
    target: Any,
    draft: Any,
    tokenizer: Any,
    rows: Sequence[data.Row],
    prompts_per_topic: int,
    seed: int,
) -> dict[str, Any]:
    """Expected acceptance and greedy agreement by topic, and the cost of a step."""
    figures: dict[str, Any] = {}
    for topic in data.TOPICS:
        mine = data.sample_rows([r for r in rows if r.topic == topic], prompts_per_topic, seed)
        if not mine:
            continue
        answers = answer_rows(target, tokenizer, mine, max_new_tokens=96, batch=prompts_per_topic)
        lesson = Lesson(target, answers)
        figures[topic] = {
            "expected_acceptance": expected_acceptance(draft, lesson),
            "greedy_agreement": greedy_agreement(draft, lesson),
        }
        log.info("%s %s", topic, figures[topic])
    figures["step_cost_ratio"] = step_seconds(draft) / step_seconds(target)
    return figures


def router_figures(folder: Path, source: str, rows: Sequence[data.Row]) -> dict[str, Any]:
    """Accuracy and calibration error on held-out rows and on prompts of another style."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    sets = {
        "held_out": [(row.prompt, row.topic) for row in rows],
        "demo_prompts": [(text, t) for t in prompts.TOPICS for text in prompts.generate(t, 300, 7)],
        "other_general": [(text, GENERAL) for text in other_general(Path(source))],
    }
    limit = model.config.max_position_embeddings
    return {
        name: {
            "prompts": len(examples),
            **router.figures(
                router.logits_of(model, tokenizer, examples, limit), router.labels_of(examples)
            ),
        }
        for name, examples in sets.items()
        if examples
    }


def other_general(folder: Path) -> list[str]:
    """Prompts of no topic from test sets that no recipe trains on, where the folder has them."""
    texts = []
    for name in ("arena", "specbench"):
        path = folder / f"{name}_test.jsonl.gz"
        if path.is_file():
            with gzip.open(path, "rt", encoding="utf-8") as lines:
                items = [json.loads(line) for line in lines]
            texts += [item["prompt"] for item in items if item["topic"] in OTHER_GENERAL]
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate as the command line says; see the module's text."""
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of *_test.jsonl.gz, or dataset id")
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--router", type=Path)
    parser.add_argument("--out", type=Path, help="write the figures here, beside the log")
    parser.add_argument("--any-source", action="store_true", help="trust the rows' own topics")
    parser.add_argument("--skip-target", action="store_true", help="not the target's figures")
    parser.add_argument("--prompts-per-topic", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rows = data.read_rows(args.data, split="test", any_source=args.any_source)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.bfloat16).eval()
    figures: dict[str, Any] = {}
    count, seed = args.prompts_per_topic, args.seed
    if not args.skip_target:
        figures["target"] = target_figures(target, tokenizer, rows, count, seed)
    if args.draft:
        draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=torch.bfloat16).eval()
        figures["draft"] = draft_figures(target, draft, tokenizer, rows, count, seed)
    if args.router:
        every = data.read_rows(
            args.data, split="test", topics=router.LABELS, any_source=args.any_source
        )
        figures["router"] = router_figures(args.router, args.data, every)
    text = json.dumps(figures, indent=1)
    log.info("%s", text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
