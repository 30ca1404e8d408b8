"""Losses x sampling x weighting, each learnt from one logged replay in short runs.

    PYTHONPATH=benchmarks python -m online.grid --quick
    PYTHONPATH=benchmarks python -m online.grid --data FOLDER --topics sql shell

The real engine answers prompts with the frozen general draft on, and logs what its verifier saw,
behind rejected tokens too. Every cell of the grid is then the same number of steps of the real
distiller from the same weights, on the same records in the same order; a seed is another order.
Each ends as a file, and a run that was broken off goes on behind the last of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from expert_cache import DRAFT, base_hashes
from transformers.utils import logging

from online.fragments import command_of
from online.grid_replay import Replay, Sizes, logged_replay
from online.grid_tables import markdown, summary
from online.rows import label
from online.store import Store
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.expert_evaluation import score_records
from paceline.actors.training.settings import (
    DistillerSettings,
    Loss,
    ObjectiveSettings,
    Sampling,
    Weighting,
)

_MICRO_BATCH, _MAX_LENGTH, _DRAFT_TOP_K = 8, 512, 64
_QUICK = Sizes(train=160, test=48, max_tokens=64)


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid; the other settings of its objective are the defaults."""

    loss: Loss = "forward_kl"
    sampling: Sampling = "target"
    weighting: Weighting = "uniform"

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.loss}-{self.sampling}-{self.weighting}"


REFERENCE = Cell()  # what the product does
QUICK_CELLS = (
    REFERENCE,
    Cell(weighting="first_rejection"),
    Cell(weighting="rejected_only"),
    Cell(sampling="student"),
    Cell(sampling="mixed"),
    Cell(loss="total_variation"),
    Cell(loss="lk_hybrid"),
    Cell(loss="hard_label"),
)


def every_cell() -> tuple[Cell, ...]:
    """The whole grid, the reference first.

    Rejected positions alone are the same whichever text is learnt from, but for behind rejected
    tokens, where nothing is rejected: they come once per loss.
    """
    cells = [
        Cell(*point)
        for point in product(get_args(Loss), get_args(Sampling), get_args(Weighting))
        if point[1] == "target" or point[2] != "rejected_only"
    ]
    return (REFERENCE, *(cell for cell in cells if cell != REFERENCE))


class School:
    """One draft under one distiller, taught anew for every cell."""

    def __init__(self, replay: Replay, learning_rate: float, steps: int) -> None:
        """Load the general draft."""
        self._replay = replay
        self._steps = steps
        self._settings = DistillerSettings(
            learning_rate=learning_rate, objective=ObjectiveSettings(sampling="mixed")
        )
        self._distiller = Distiller(str(DRAFT), self._settings)
        self._max_length = min(_MAX_LENGTH, self._distiller.max_length)

    def facts(self) -> dict[str, Any]:
        """What decides a cell beside its point of the grid, as JSON holds it."""
        return asdict(self._settings)

    def judge(self, state: dict[str, torch.Tensor] | None) -> dict[str, list[float]]:
        """Acceptance on each held-out record as it was decoded, greedy and sampled ones apart."""
        draft = self._distiller.served(state)
        scores = {}
        for kind in ("greedy", "sampled"):
            records = [r for r in self._replay.test if r.greedy == (kind == "greedy")]
            found = score_records(
                draft, records, max_length=self._max_length, draft_top_k=_DRAFT_TOP_K
            )
            scores[kind] = [round(float(score), 5) for score in found]
        return scores

    def teach(self, cell: Cell, seed: int) -> dict[str, Any]:
        """A run from the initial weights, and what it brought."""
        goal = ObjectiveSettings(**asdict(cell))
        self._distiller.settings = replace(self._settings, objective=goal)
        self._distiller.reset(None)
        rng = np.random.default_rng(seed)
        seconds, tokens, losses = 0.0, 0, []
        while self._distiller.steps < self._steps:
            for records in micro_batches(self._replay.train, _MICRO_BATCH, rng):
                began = time.process_time()  # not the neighbours' time
                batch = make_batch(records, self._max_length, branches=goal.needs_branches)
                losses.append(self._distiller.micro_step(batch).loss)
                seconds += time.process_time() - began
                tokens += batch.num_positions
                if self._distiller.steps >= self._steps:
                    break
        return self.judge(self._distiller.state_dict()) | {
            "steps": self._distiller.steps,
            "positions": tokens,
            "training_s": round(seconds, 1),
            "loss_first": round(float(np.mean(losses[:5])), 5),
            "loss_last": round(float(np.mean(losses[-5:])), 5),
        }


def run_topic(topic: str, options: argparse.Namespace, store: Store) -> dict[str, Any]:
    """All cells of a topic; returns its figures."""
    sizes = options.sizes
    replay = logged_replay(store.folder, options.data, topic, sizes, options.threads)
    print(f"{topic}: {replay.facts()}", flush=True)  # noqa: T201
    school = School(replay, options.learning_rate, options.steps)
    common = {
        "topic": topic,
        "data": label(options.data),
        "prompts": replay.prompts,  # any folder has that label
        "sizes": asdict(sizes),
        "steps": options.steps,
        "distiller": school.facts(),
        "models": base_hashes(),
    }
    before = store.unit(f"grid-{topic}-untaught", common, lambda: school.judge(None))
    runs: dict[str, list[dict[str, Any]]] = {}
    # seed by seed: what a broken run leaves is a whole grid of fewer seeds
    for seed, cell in product(range(options.seeds), options.cells):
        key = common | asdict(cell) | {"seed": seed}
        unit = store.unit(
            f"grid-{topic}-{cell.name}-{seed}", key, lambda c=cell, s=seed: school.teach(c, s)
        )
        runs.setdefault(cell.name, []).append(unit)
        greedy, sampled = (float(np.mean(unit[kind])) for kind in ("greedy", "sampled"))
        line = f"{cell.name} seed {seed}: greedy {greedy:.4f}, sampled {sampled:.4f}"
        print(f"{topic}: {line}, {unit['training_s']:.0f} s", flush=True)  # noqa: T201
    return {"replay": replay.facts(), **summary(before, runs, REFERENCE.name)}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", help="folder of rows, or hf; default: generated prompts")
    parser.add_argument("--topics", nargs="+", default=["sql"])
    parser.add_argument("--quick", action="store_true", help="fewer cells, prompts and steps")
    parser.add_argument(
        "--cells", nargs="+", metavar="LOSS-SAMPLING-WEIGHTING", help="these beside the reference"
    )
    parser.add_argument("--steps", type=int, help="of a run; 200, with --quick 40")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    parser.add_argument(
        "--published", type=Path, help="folder of units to go on from, and to add to"
    )
    options = parser.parse_args(argv)
    options.sizes = _QUICK if options.quick else Sizes()
    grid = {cell.name: cell for cell in every_cell()}
    wanted = options.cells or [c.name for c in (QUICK_CELLS if options.quick else grid.values())]
    if unknown := sorted(set(wanted) - set(grid)):
        parser.error(f"no such cell: {unknown[0]}; there are {', '.join(grid)}")
    options.cells = [grid[name] for name in dict.fromkeys([REFERENCE.name, *wanted])]
    options.steps = options.steps or (40 if options.quick else 200)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Do what is missing, then write figures and tables."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_environment()
    forbid_compiling()
    store = Store(options.out / "online", options.published)
    figures = {
        "steps": options.steps,
        "seeds": options.seeds,
        "learning_rate": options.learning_rate,
        "data": label(options.data),
        "topics": {topic: run_topic(topic, options, store) for topic in options.topics},
    }
    path = store.folder / "grid.json"
    path.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    text = markdown(figures, command_of("bench-grid", argv))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
