"""Losses x sampling x weighting, each trained on one logged replay in short runs.

    make bench-grid ARGS="--data FOLDER --topics sql shell"

The engine answers prompts with the frozen general draft and logs what its verifier saw, branches
behind rejected tokens too. Every cell of the grid is the same number of steps of the real distiller
from the same weights, on the same records in the same order; a seed is another order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from expert_cache import DRAFT, base_hashes
from harness import Store, arguments, digest, interval, machine, say, show, t_interval, write

from online.bench import Bench, Sizes, prepare
from online.rows import Question, label, load, mark_of
from online.serving import FROZEN, Serving, serve
from paceline.actors.replay.record import ReplayRecord, decode, encode
from paceline.actors.replay.shard import Journal
from paceline.actors.router.policy import GENERAL
from paceline.actors.training.batches import make_batch, micro_batches
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
_TEMPERATURE = 0.8
_KINDS = ("greedy", "sampled")


@dataclass(frozen=True, slots=True)
class ReplaySizes:
    """Records; every second prompt is sampled, the others are greedy."""

    train: int = 600
    test: int = 200
    max_tokens: int = 96
    num_speculative_tokens: int = 4


_QUICK = ReplaySizes(train=160, test=48, max_tokens=64)


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid; the other settings of its objective are the defaults."""

    loss: Loss = "forward_kl"
    sampling: Sampling = "target"
    weighting: Weighting = "uniform"

    @property
    def name(self) -> str:
        """For files and tables."""
        return f"{self.loss}-{self.sampling}-{self.weighting}"


REFERENCE = Cell()  # the product's default
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

    Rejected positions alone are the same for every sampling, except behind rejected tokens, where
    nothing is rejected: they come once per loss.
    """
    points = product(get_args(Loss), get_args(Sampling), get_args(Weighting))
    cells = [Cell(*p) for p in points if p[1] == "target" or p[2] != "rejected_only"]
    return (REFERENCE, *(cell for cell in cells if cell != REFERENCE))


@dataclass(frozen=True, slots=True)
class Replay:
    """Training records, and test records of other prompts."""

    train: tuple[ReplayRecord, ...]
    test: tuple[ReplayRecord, ...]

    @property
    def prompts(self) -> str:
        """Mark of the prompts in settings."""
        return mark_of(
            Question(record.request_id, record.topic, tuple(record.prompt_token_ids.tolist()))
            for record in (*self.train, *self.test)
        )


def logged_replay(bench: Bench, topic: str, sizes: ReplaySizes) -> Replay:
    """The topic's replay from disk, else answered now and kept.

    Raises:
        paceline.deploy.recipes.data.DataError: the source lacks the topic, or is not there.
        RuntimeError: the draft failed.
    """
    facts = {"data": label(bench.data), "sizes": asdict(sizes), "models": base_hashes()}
    folder = bench.store.folder
    paths = {p: folder / f"grid-{topic}-{p}-{digest(facts)}.records" for p in ("train", "test")}
    if not all(path.is_file() and path.stat().st_size for path in paths.values()):
        engine = bench.engine([GENERAL], replay_branches=True)
        questions = load(bench.data, topic, bench.tokenizer, train=sizes.train, test=sizes.test)
        for part, path in paths.items():
            records: list[ReplayRecord] = []
            for first, temperature in enumerate((0.0, _TEMPERATURE)):
                own = getattr(questions, part)[first::2]
                serving = replace(bench.serving, temperature=temperature)
                records += [a.record for a in serve(engine, own, [FROZEN] * len(own), serving)]
            Journal(path).rewrite(encode(record) for record in records)
    kept = {p: tuple(decode(entry) for entry in Journal(path).read()) for p, path in paths.items()}
    return Replay(**kept)


class CellTrainer:
    """One draft under one distiller, trained anew for every cell."""

    def __init__(self, replay: Replay, learning_rate: float, steps: int) -> None:
        self._replay, self._steps = replay, steps
        self._settings = DistillerSettings(
            learning_rate=learning_rate, objective=ObjectiveSettings(sampling="mixed")
        )
        self._distiller = Distiller(str(DRAFT), self._settings)
        self._max_length = min(_MAX_LENGTH, self._distiller.max_length)

    def facts(self) -> dict[str, Any]:
        """Settings of all cells, as JSON."""
        return asdict(self._settings)

    def evaluate(self, state: dict[str, torch.Tensor] | None) -> dict[str, list[float]]:
        """Acceptance on each test record as it was decoded, greedy and sampled ones apart."""
        draft = self._distiller.served(state)
        scores = {}
        for kind in _KINDS:
            records = [r for r in self._replay.test if r.greedy == (kind == "greedy")]
            found = score_records(
                draft, records, max_length=self._max_length, draft_top_k=_DRAFT_TOP_K
            )
            scores[kind] = [round(float(score), 5) for score in found]
        return scores

    def train(self, cell: Cell, seed: int) -> dict[str, Any]:
        """Train from the initial weights; scores and cost."""
        goal = ObjectiveSettings(**asdict(cell))
        self._distiller.settings = replace(self._settings, objective=goal)
        self._distiller.reset(None)
        rng = np.random.default_rng(seed)
        seconds, positions, losses = 0.0, 0, []
        while self._distiller.steps < self._steps:
            for records in micro_batches(self._replay.train, _MICRO_BATCH, rng):
                began = time.process_time()
                batch = make_batch(records, self._max_length, branches=goal.needs_branches)
                losses.append(self._distiller.micro_step(batch).loss)
                seconds += time.process_time() - began
                positions += batch.num_positions
                if self._distiller.steps >= self._steps:
                    break
        return self.evaluate(self._distiller.state_dict()) | {
            "steps": self._distiller.steps,
            "positions": positions,
            "training_s": round(seconds, 1),
            "loss_first": round(float(np.mean(losses[:5])), 5),
            "loss_last": round(float(np.mean(losses[-5:])), 5),
        }


def summary(
    before: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    reference: str,
) -> dict[str, Any]:
    """Figures of a topic.

    Chance may explain a gain over the reference by the order of the records (over seeds) and by
    the test records (each averaged over the seeds); it is ``clearly`` better or worse if neither
    does.
    """
    cells = {}
    for name, own in runs.items():
        cell: dict[str, Any] = {
            key: float(np.mean([run[key] for run in own])) for key in ("training_s", "positions")
        }
        for kind in _KINDS:
            scores, base = (np.array([r[kind] for r in rs]) for rs in (own, runs[reference]))
            gains = scores - base[: len(scores)]
            over = t_interval(gains.mean(1)), t_interval(gains.mean(0))
            better = all(gain.low is not None and gain.low > 0.0 for gain in over)
            worse = all(gain.high is not None and gain.high < 0.0 for gain in over)
            cell[kind] = {
                "acceptance": asdict(t_interval(scores.mean(1))),
                "gain_over_seeds": asdict(over[0]),
                "gain_over_records": asdict(over[1]),
                "clearly": "better" if better else "worse" if worse else None,
            }
        cells[name] = cell
    untrained = {kind: float(np.mean(before[kind])) for kind in _KINDS}
    return {"untrained": untrained, "reference": reference, "cells": cells}


def run_topic(bench: Bench, topic: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all cells of a topic."""
    replay = logged_replay(bench, topic, options.sizes)
    trainer = CellTrainer(replay, options.learning_rate, options.steps)
    common = {
        "topic": topic,
        "data": label(options.data),
        "prompts": replay.prompts,
        "sizes": asdict(options.sizes),
        "steps": options.steps,
        "distiller": trainer.facts(),
        "models": base_hashes(),
    }
    store = bench.store
    before = store.unit(f"grid-{topic}-untaught", common, lambda: trainer.evaluate(None))
    runs: dict[str, list[dict[str, Any]]] = {}
    # Seed by seed: an interrupted run leaves a whole grid of fewer seeds.
    for seed, cell in product(range(options.seeds), options.cells):
        key = common | asdict(cell) | {"seed": seed}
        unit = store.unit(
            f"grid-{topic}-{cell.name}-{seed}", key, lambda c=cell, s=seed: trainer.train(c, s)
        )
        runs.setdefault(cell.name, []).append(unit)
        greedy, sampled = (np.mean(unit[kind]) for kind in _KINDS)
        say(f"{topic}: {cell.name} seed {seed}: greedy {greedy:.4f}, sampled {sampled:.4f}")
    return summary(before, runs, REFERENCE.name)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "data", "quick", "threads", "out", "published")
    parser.add_argument("--topics", nargs="+", default=["sql"])
    parser.add_argument(
        "--cells", nargs="+", metavar="LOSS-SAMPLING-WEIGHTING", help="these beside the reference"
    )
    parser.add_argument("--steps", type=int, help="of a run; 200, with --quick 40")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=DistillerSettings().learning_rate)
    options = parser.parse_args(argv)
    options.sizes = _QUICK if options.quick else ReplaySizes()
    grid = {cell.name: cell for cell in every_cell()}
    wanted = options.cells or [c.name for c in (QUICK_CELLS if options.quick else grid.values())]
    if unknown := sorted(set(wanted) - set(grid)):
        parser.error(f"no such cell: {unknown[0]}; there are {', '.join(grid)}")
    options.cells = [grid[name] for name in dict.fromkeys([REFERENCE.name, *wanted])]
    options.steps = options.steps or (40 if options.quick else 200)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and tables."""
    options = parse(argv)
    prepare(options.threads)
    sizes = options.sizes
    serving = Serving(
        max_tokens=sizes.max_tokens, num_speculative_tokens=sizes.num_speculative_tokens
    )
    store = Store(options.out / "online", options.published)
    bench = Bench(store, options.data, Sizes(), serving, threads=options.threads)
    names = ("steps", "seeds", "learning_rate")
    figures = {name: getattr(options, name) for name in names} | {
        "machine": machine(),
        "data": label(options.data),
        "topics": {topic: run_topic(bench, topic, options) for topic in options.topics},
    }
    write(store.folder / "grid.json", figures)
    for topic, facts in figures["topics"].items():
        rows = [
            {"loss, sampling, weighting": name, "training_s": cell["training_s"]}
            | {kind: interval(cell[kind]["acceptance"]) for kind in _KINDS}
            | {f"{k} gain": interval(cell[k]["gain_over_records"]) for k in _KINDS}
            | {f"{k} clearly": cell[k]["clearly"] for k in _KINDS}
            for name, cell in facts["cells"].items()
        ]
        show(f"{topic}: acceptance, untrained {facts['untrained']}", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
