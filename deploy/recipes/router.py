"""Train the router: a small BERT that tells a prompt's topic, or that it is of none of them.

    python -m paceline.deploy.recipes.router --data DATA --tokenizer TARGET --out OUT

Its confidence is calibrated by one temperature, fitted on prompts set aside and folded into the
classifier's weights. The confidence that a topic is to need (`router.min_confidence: auto`) goes
into its config.json. Stopped at any moment, the same command carries on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from paceline.actors.router.policy import DEFAULT_MIN_CONFIDENCE, GENERAL
from paceline.deploy.recipes import checkpoints, data
from paceline.deploy.recipes.router_data import router_examples

log = logging.getLogger(__name__)

LABELS = (*data.TOPICS, GENERAL)
Examples = Sequence[tuple[str, str]]
_KEPT = 0.99  # of a topic's own texts
_MOST = 0.99


@dataclass(frozen=True)
class RouterRecipe:
    """All that decides the weights, together with the rows and the tokenizer."""

    per_topic: int = 3000  # prompts, drawn with replacement
    steps: int = 600
    batch: int = 32
    lr: float = 1e-3
    warmup: int = 30
    layers: int = 2
    width: int = 128
    max_tokens: int = 128  # of a prompt; the rest is cut off
    smoothing: float = 0.02
    set_aside: float = 0.1  # of the examples, for the calibration
    seed: int = 1
    checkpoint_every: int = 100


def new_router(tokenizer: Any, recipe: RouterRecipe) -> BertForSequenceClassification:
    """A BERT classifier with random weights over the tokenizer's vocabulary."""
    torch.manual_seed(recipe.seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            num_hidden_layers=recipe.layers,
            num_attention_heads=max(1, recipe.width // 32),
            intermediate_size=recipe.width * 4,
            max_position_embeddings=recipe.max_tokens,
            type_vocab_size=1,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=len(LABELS),
            id2label=dict(enumerate(LABELS)),
            label2id={name: i for i, name in enumerate(LABELS)},
        )
    )


def encode(texts: Sequence[str], tokenizer: Any, max_tokens: int) -> dict[str, torch.Tensor]:
    """Padded ids and mask, int64 [number of texts, longest]."""
    batch = tokenizer(
        list(texts),
        truncation=True,
        max_length=max_tokens,
        padding=True,
        add_special_tokens=False,
        return_tensors="pt",
    )
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def labels_of(examples: Examples) -> torch.Tensor:
    """Class numbers, int64 [number of examples]."""
    return torch.tensor([LABELS.index(topic) for _, topic in examples])


@torch.inference_mode()
def logits_of(model: Any, tokenizer: Any, examples: Examples, max_tokens: int) -> torch.Tensor:
    """Float32 [number of examples, classes]."""
    model.eval()
    parts = [
        model(
            **encode([text for text, _ in examples[i : i + 64]], tokenizer, max_tokens)
        ).logits.float()
        for i in range(0, len(examples), 64)
    ]
    return torch.cat(parts)


def calibration_error(probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean gap of confidence and accuracy over confidence bins."""
    confidence, predicted = probabilities.max(-1)
    hit = (predicted == labels).float()
    which = (confidence * bins).long().clamp(max=bins - 1)
    gaps = [
        (confidence[which == b].mean() - hit[which == b].mean()).abs() * (which == b).sum()
        for b in range(bins)
        if bool((which == b).any())
    ]
    return float(sum(gaps)) / len(labels)


def fit_temperature(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The temperature on a grid from 0.5 to 5 under which the labels are likeliest."""
    grid = torch.logspace(np.log10(0.5), np.log10(5.0), 200)
    losses = [nn.functional.cross_entropy(logits / t, labels) for t in grid]
    return float(grid[int(torch.stack(losses).argmin())])


def figures(logits: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Accuracy, by class too, and calibration error of held-out examples."""
    predicted = logits.argmax(-1)
    result = {
        "accuracy": float((predicted == labels).float().mean()),
        "ece": calibration_error(logits.softmax(-1), labels),
    }
    for number, name in enumerate(LABELS):
        mine = labels == number
        if bool(mine.any()):
            result[f"accuracy_{name}"] = float((predicted[mine] == number).float().mean())
    return result


def train(
    model: nn.Module,
    tokenizer: Any,
    examples: Examples,
    recipe: RouterRecipe,
    checkpoint: Path,
    *,
    stop_after: int | None = None,
) -> int:
    """Run the recipe from its last checkpoint, if any, to its end; returns steps done."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.01)
    state = checkpoints.read_state(checkpoint)
    start = int(state["step"]) if state else 0
    if state:
        checkpoints.load_weights(checkpoint, model)
        checkpoints.load_optimizer_state(checkpoint, [optimizer])
    end = min(recipe.steps, stop_after or recipe.steps)
    model.train()
    for step in tqdm(range(start, end), initial=start, total=recipe.steps, desc="router"):
        # Dropout draws from the global generator: seeded by step, a resumed run draws the same.
        torch.manual_seed(recipe.seed * 1_000_003 + step)
        rng = np.random.default_rng([recipe.seed, step])
        part = [examples[i] for i in rng.integers(len(examples), size=recipe.batch)]
        logits = model(**encode([text for text, _ in part], tokenizer, recipe.max_tokens)).logits
        loss = nn.functional.cross_entropy(
            logits, labels_of(part), label_smoothing=recipe.smoothing
        )
        rate = recipe.lr * checkpoints.linear_to_zero(step, recipe.steps, recipe.warmup)
        optimizer.param_groups[0]["lr"] = rate
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % recipe.checkpoint_every == 0 or step + 1 == end:
            log.info("step %d of %d: loss %.3f", step + 1, recipe.steps, float(loss.detach()))
            checkpoints.save_checkpoint(checkpoint, model, [optimizer], {"step": step + 1})
    return end


def calibrate(model: Any, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Fit the temperature on what the model says of examples set aside, and fold it in.

    Args:
        model: whose classifier's weights are divided by it.
        logits: its own, ``[N, L]``.
        labels: int64 ``[N]``, places in ``LABELS``.

    Returns:
        the temperature.
    """
    temperature = fit_temperature(logits, labels)
    with torch.no_grad():
        model.classifier.weight /= temperature
        model.classifier.bias /= temperature
    return temperature


def least_confidence(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """What a topic needs, so that hardly a text of a topic's own goes to ``general`` for it.

    Texts that are none of the topics' often get one with less confidence than the topics' own
    texts do (Hendrycks and Gimpel, ICLR 2017). Kept are 99 % of the own texts that are told right,
    and what people write in their own words has at least a hundredth of room.

    Args:
        logits: calibrated, ``[N, L]``, of texts that were not trained on.
        labels: int64 ``[N]``, places in ``LABELS``.
    """
    shares, found = logits.softmax(-1).max(-1)
    right = (found == labels) & (labels != LABELS.index(GENERAL))
    if not bool(right.any()):
        return DEFAULT_MIN_CONFIDENCE
    kept = float(torch.quantile(shares[right].double(), 1 - _KEPT))
    return max(DEFAULT_MIN_CONFIDENCE, min(_MOST, round(kept, 3)))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; the defaults are those of `RouterRecipe`."""
    parser = argparse.ArgumentParser(prog="router", description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="folder of *_train.jsonl.gz, or dataset id")
    parser.add_argument("--tokenizer", required=True, type=Path, help="the target's folder")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--any-source", action="store_true", help="trust the rows' own topics")
    for name in ("per-topic", "steps", "batch", "layers", "width", "seed", "checkpoint-every"):
        default = getattr(RouterRecipe, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--stop-after", type=int)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; see the module's text."""
    args = parse(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    recipe = RouterRecipe(
        per_topic=args.per_topic,
        steps=args.steps,
        batch=args.batch,
        layers=args.layers,
        width=args.width,
        seed=args.seed,
        checkpoint_every=args.checkpoint_every,
    )
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rows = data.read_rows(args.data, topics=LABELS, any_source=args.any_source)
    examples = router_examples(rows, recipe.per_topic, recipe.seed)
    aside = max(1, int(len(examples) * recipe.set_aside))
    model = new_router(tokenizer, recipe)
    log.info("%d examples, %d parameters", len(examples), model.num_parameters())
    checkpoint = args.out.with_name(args.out.name + ".checkpoint")
    done = train(model, tokenizer, examples[aside:], recipe, checkpoint, stop_after=args.stop_after)
    if done < recipe.steps:
        return 0
    kept, labels = examples[:aside], labels_of(examples[:aside])
    logits = logits_of(model, tokenizer, kept, recipe.max_tokens)
    temperature = calibrate(model, logits, labels)
    model.config.min_confidence = least_confidence(logits / temperature, labels)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    result: dict[str, float] = {"temperature": temperature}
    try:
        test = data.read_rows(args.data, split="test", topics=LABELS, any_source=args.any_source)
        held_out = [(row.prompt, row.topic) for row in test]
        logits = logits_of(model, tokenizer, held_out, recipe.max_tokens)
        result |= figures(logits, labels_of(held_out))
    except data.DataError:
        log.info("no held-out rows: no held-out figures")
    log.info("written: %s, figures %s", args.out, json.dumps(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
