"""Figures of the router on held-out rows, as JSON for its card.

python -m paceline.deploy.recipes.evaluate --data DATA --router ROUTER --out figures.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from paceline.actors.router.policy import GENERAL
from paceline.deploy.demo import prompts
from paceline.deploy.recipes import data, router

log = logging.getLogger(__name__)

OTHER_GENERAL = {"arena: creative_writing"} | {
    f"spec-bench: {kind}" for kind in ("qa", "rag", "writing", "roleplay", "humanities")
}


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
    parser.add_argument("--router", required=True, type=Path)
    parser.add_argument("--out", type=Path, help="write the figures here, beside the log")
    parser.add_argument("--any-source", action="store_true", help="trust the rows' own topics")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rows = data.read_rows(args.data, split="test", topics=router.LABELS, any_source=args.any_source)
    text = json.dumps({"router": router_figures(args.router, args.data, rows)}, indent=1)
    log.info("%s", text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
