"""Accuracy and time of topic classifiers on rows that none of them was made from.

    make bench-router ARGS="--data FOLDER"    # *_test.jsonl.gz, and *_train.jsonl.gz of `finance`

Topics are chosen as in serving, with each router's own minimum confidence. Times are of one text
on one thread, the routers in turns. The small router has seen training rows of the sets marked *.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import arguments, json_lines, machine, rotation, say, show, write, written
from models import ROUTER

from paceline.actors.general import GENERAL
from paceline.actors.router.added_topic_head import AddedTopicHead
from paceline.actors.router.policy import MinConfidence, choose_topic
from paceline.actors.router.router import TopicRouter
from paceline.actors.router.topic_fit import TopicFitSettings
from paceline.deploy import model_store
from paceline.deploy.api.topic_admin import bundled_prompts
from paceline.deploy.config.config import load_config
from paceline.deploy.config.preflight import router_confidence
from paceline.deploy.config.replica_settings import router_arguments
from paceline.deploy.demo.prompts import TOPICS

# The first that matches "id|topic" of a row: its set, and where its prompts belong.
_SETS = tuple(
    (re.compile(pattern), name, label)
    for pattern, name, label in (
        (r"^gsm8k-", "GSM8K *", "math"),
        (r": mgsm$", "MGSM, 7 languages", "math"),
        (r"^spec.*: math_reasoning$", "Spec-Bench math", "math"),
        (r"arena: hard_prompt/math", "Arena-Hard v2 math", "math"),
        (r"\|(mt|spec|vicuna)-bench: math$", "MT-bench math", "math"),
        (r"^mbpp-", "MBPP *", "code"),
        (r"^HumanEval", "HumanEval", "code"),
        (r"^cpython313-", "CPython docstrings *", "code"),
        (r"arena: hard_prompt/coding", "Arena-Hard v2 coding", "code"),
        (r"\|(mt|spec|vicuna)-bench: coding$", "MT-bench coding", "code"),
        (r"^spider-", "Spider *", "sql"),
        (r"^tldr-en", "tldr *", "shell"),
        (r": tldr$", "tldr, 8 languages", "shell"),
        (r"arena: creative_writing", "Arena-Hard v2 writing", GENERAL),
        (r"\|(mt|vicuna)-bench: ", "MT-bench, Vicuna-bench, rest", GENERAL),
        (r"\|spec-bench: ", "Spec-Bench, rest", GENERAL),
        (r"^alpaca-\D|^alpaca-\d|^selfinstruct-", "Alpaca, Self-Instruct", GENERAL),
        (r"^instructwild", "InstructionWild users", GENERAL),
        (r"^tatqa-", "TAT-QA *", GENERAL),
        (r"^xquad-en", "XQuAD *", GENERAL),
        (r"^xpersona-en", "XPersona *", GENERAL),
        (r"\|lang-\w\w: (?!mt-bench/(math|coding))", "other languages *", GENERAL),
    )
)
_WORDS = "The old ferry left the harbour at seven in the morning with twelve passengers and a dog. "
_LENGTHS = (32, 128, 512)
_NEW, _EXAMPLES = "finance", 60


class Router:
    """A router as it is served."""

    def __init__(self, path: str) -> None:
        config = load_config(None, {"router.path": path})
        if config.encoder is not None:
            model_store.fetch(config.encoder, say, "router.path")
        self.router = TopicRouter(*router_arguments(config))
        self.classifier = self.router._classifier
        self.min_confidence: MinConfidence = router_confidence(config)

    def topic(self, text: str, *new: str) -> str:
        """Topic of a text."""
        found = self.classifier.classify(text)
        return choose_topic(found, {*TOPICS, GENERAL, *new}, self.min_confidence)

    def add(self, examples: Sequence[str]) -> dict[str, Any]:
        """Add a topic as a server does; returns its figures."""
        settings = TopicFitSettings(min_confidence=self.min_confidence)
        others, known = list(bundled_prompts()), (GENERAL, *TOPICS)
        fit = asyncio.run(self.router.fit_topic(_NEW, examples, others, known, None, settings))
        self.classifier.set_head(AddedTopicHead.restore(fit.head.facts, fit.head.arrays))
        return {"refused": fit.rejection or "no", "recall": fit.fit.recall, "moved": fit.fit.moved}


def rows(folder: Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows of all files of a split."""
    for path in sorted(folder.glob(f"*_{split}.jsonl.gz")):
        yield from json_lines(path)


def read_sets(folder: Path, most: int) -> dict[tuple[str, str], list[str]]:
    """At most so many prompts of each set, drawn with a seed."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows(folder, "test"):
        mark = f"{row['id']}|{row['topic']}"
        for pattern, name, label in _SETS:
            if pattern.search(mark):
                found[name, label].add(row["prompt"])
                break
    rng = random.Random(0)
    order = [(name, label) for _, name, label in _SETS if (name, label) in found]
    drawn = {key: rng.sample(sorted(found[key]), min(most, len(found[key]))) for key in order}
    return drawn


def accuracy(routers: Mapping[str, Router], sets: Mapping[tuple[str, str], list[str]]) -> list[Any]:
    """A row per set: share of each router that is right, and that goes to ``general``."""
    table = []
    for (name, label), prompts in sets.items():
        row: dict[str, Any] = {"set": name, "belongs to": label, "prompts": len(prompts)}
        for router, own in routers.items():
            chosen = Counter(map(own.topic, prompts))
            row[f"{router}: right"] = chosen[label] / len(prompts)
            if label != GENERAL:
                row[f"{router}: general"] = chosen[GENERAL] / len(prompts)
        table.append(row)
        say(row)
    return table


def times(routers: Mapping[str, Router], repeats: int) -> list[Any]:
    """A row per length in words: median and p99 of each router, ms."""
    table = []
    for length in _LENGTHS:
        words = (_WORDS * length).split()[:length]
        took: dict[str, list[float]] = defaultdict(list)
        for turn in range(repeats):
            for router in rotation(list(routers), turn):
                began = time.perf_counter()
                routers[router].classifier.classify(" ".join(words))
                took[router].append(1e3 * (time.perf_counter() - began))
        row: dict[str, Any] = {"words": length}
        for router, own in took.items():
            row |= {f"{router}: ms": np.median(own), f"{router}: p99": np.percentile(own, 99)}
        table.append(row)
    return table


def added(routers: Mapping[str, Router], folder: Path, most: int) -> list[Any]:
    """A row per router: a topic added from training rows, and its share of test rows."""
    parts = {
        split: [row["prompt"] for row in rows(folder, split) if row["id"].startswith("alpaca")
                and row["topic"] == _NEW]
        for split in ("train", "test")
    }  # fmt: skip
    table = []
    for name, router in routers.items():
        figures = router.add(parts["train"][:_EXAMPLES])
        chosen = Counter(router.topic(text, _NEW) for text in parts["test"][:most])
        share = chosen[_NEW] / chosen.total()
        table.append({"router": name, **figures, "recall on test rows": share})
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = arguments(__doc__, "data", "threads", "out")
    parser.add_argument("--rows", type=int, default=500, help="of each set, at most")
    parser.add_argument("--repeats", type=int, default=200, help="of each length")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = Path(options.data)
    routers = {"minilm": Router("minilm"), "small": Router(str(ROUTER))}
    torch.set_num_threads(options.threads)
    before = machine()
    figures = {
        "times": times(routers, options.repeats),
        "accuracy": accuracy(routers, read_sets(folder, options.rows)),
        "added": added(routers, folder, options.rows),
    }
    for title, table in figures.items():
        show(title, table)
    write(options.out / "router.json", {"machine": before, "settings": written(options), **figures})


if __name__ == "__main__":
    main()
