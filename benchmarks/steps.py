"""Measure step times as the goodput controller does at start; ``paceline plan --steps`` reads them.

    .venv/bin/python benchmarks/steps.py
    .venv/bin/paceline plan tests/fixtures/target tests/fixtures/draft-general \
        --steps out/bench/steps.json

Target steps by (rows, new tokens of each row), draft steps by (rows, experts), each the best of
several runs. The experts are copies of one draft: a step's time does not depend on the weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from harness import arguments, machine, write
from models import DRAFT, TARGET

from paceline.actors.engine.model_loader import load_causal_lm, resolve_device, target_dtype
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.speculation.costs import grid_points, profile
from paceline.actors.speculation.profiling import stepper


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Both tables and what the planner reads beside them."""
    device = resolve_device(options.device)
    dtype = target_dtype(options.dtype, device, options.target)
    tokens = sorted({1, 2, (options.k + 2) // 2, options.k + 1})
    before = machine()

    def runner(path: Path, copies: int) -> ModelRunner:
        models = [load_causal_lm(path, dtype, device) for _ in range(copies)]
        return ModelRunner(models, options.rows, options.context + tokens[-1])

    rows, most = grid_points(options.rows), options.repeats
    run = stepper(runner(options.target, 1), options.context)
    target = profile(lambda b, t: run(b, t, 1), rows, tokens, time.perf_counter, most)
    run = stepper(runner(options.draft, options.experts), options.context)
    experts = grid_points(min(options.experts, options.rows))
    draft = profile(lambda b, e: run(b, 1, e), rows, experts, time.perf_counter, most)
    return {
        "context": options.context,
        "precision": dict.fromkeys(("weight", "kv", "activation"), dtype.itemsize),
        "target": {f"{b},{t}": seconds for (b, t), seconds in target.items()},
        "draft": {f"{b},{e}": seconds for (b, e), seconds in draft.items()},
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
        "machine": before,
        "load_average_after": machine()["load_average"],
    }


def main() -> None:
    """Measure and write the file."""
    parser = arguments(__doc__, "dtype")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--draft", type=Path, default=DRAFT)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16, help="most requests at once")
    parser.add_argument("--experts", type=int, default=5)
    parser.add_argument("--k", type=int, default=8, help="largest num_speculative_tokens")
    parser.add_argument("--context", type=int, default=128, help="cached positions of every row")
    parser.add_argument("--repeats", type=int, default=20, help="of which the best counts")
    parser.add_argument("--out", type=Path, default=Path("out/bench/steps.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    write(options.out, measure(options))


if __name__ == "__main__":
    main()
