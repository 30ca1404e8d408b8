"""Rows that the recipes' tests train on, and the comparison of what came of them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from paceline.deploy.recipes.data import Row, write_rows

TEXTS = {
    "math": ("Ann has {n} plums and gets 3 more. How many?", "{n} + 3 = plums\n#### {n}"),
    "code": ("Write a function that adds {n} to x.", "def add{n}(x):\n    return x + {n}"),
    "sql": ("Show the names of the first {n} boats.", "SELECT name FROM boats LIMIT {n}"),
    "shell": ("How do I use the command `tool{n}`?", "Run a tool.\n\n`tool{n} path/to/file`"),
    "general": ("Tell me {n} things about rain.", "It is wet."),
}


def write_own_rows(folder: Path) -> Path:
    """Write eight rows of each topic for training and eight held-out ones; returns the folder."""
    for split, start in (("train", 0), ("test", 100)):
        rows = [
            Row(f"{topic}-{i}", topic, prompt.format(n=i), response.format(n=i))
            for topic, (prompt, response) in TEXTS.items()
            for i in range(start, start + 8)
        ]
        write_rows(folder / f"own_{split}.jsonl.gz", rows)
    return folder


def assert_equal_weights(one: Path, two: Path) -> None:
    """Assert that two model folders hold the same bits."""
    first, second = (load_file(folder / "model.safetensors") for folder in (one, two))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
