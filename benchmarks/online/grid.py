"""Losses x sampling x weighting, and adapters, each trained on one logged replay in short runs.

    make bench-grid ARGS="--data FOLDER --topics sql shell"
    make bench-adapters ARGS="--data FOLDER"

The engine answers prompts with the frozen general draft and logs what its verifier saw, branches
behind rejected tokens too. Every cell of the grid is the same number of steps of the real distiller
from the same weights, on the same records in the same order, and then as many as fit into the
processor seconds of the reference; a seed is another order.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
from experts import endless_batches, prepare
from harness import Interval, interval, machine, say, show, t_interval, write
from prompts import Prompt

from online.lab import FROZEN, Lab, Sizes, lab_arguments
from paceline.actors.general import GENERAL
from paceline.actors.replay.record import MAX_LENGTH, ReplayRecord, decode, encode
from paceline.actors.replay.shard import Journal
from paceline.actors.training.batches import make_batch
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import (
    DistillerSettings,
    Loss,
    ObjectiveSettings,
    Sampling,
    Weighting,
)

_MICRO_BATCH, _TEMPERATURE, _MIB = 8, 0.8, 2.0**20
_LORA_RATE = 5e-3
_KINDS = ("greedy", "sampled")
_FULL, _QUICK = Sizes(stream=600, test=200), Sizes(stream=160, test=48, max_tokens=64)


@dataclass(frozen=True, slots=True)
class Cell:
    """A point of the grid; ``lora_rank`` 0 trains a full copy."""

    loss: Loss = "forward_kl"
    sampling: Sampling = "target"
    weighting: Weighting = "uniform"
    lora_rank: int = 0

    @property
    def name(self) -> str:
        """For files and tables."""
        adapter = f"-lora{self.lora_rank}" if self.lora_rank else ""
        return f"{self.loss}-{self.sampling}-{self.weighting}{adapter}"

    def settings(self, base: DistillerSettings) -> DistillerSettings:
        """The trainer's settings with this objective and adapter."""
        goal = ObjectiveSettings(self.loss, weighting=self.weighting, sampling=self.sampling)
        if not self.lora_rank:
            return replace(base, objective=goal)
        own = {"lora_rank": self.lora_rank, "lora_alpha": 2.0 * self.lora_rank}
        return replace(base, objective=goal, adapter="lora", learning_rate=_LORA_RATE, **own)


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
ADAPTERS = (REFERENCE, *(Cell(lora_rank=rank) for rank in (4, 8, 16, 32)))


def every_cell() -> tuple[Cell, ...]:
    """The whole grid of objectives, the reference first.

    Rejected positions alone are the same for every sampling, except behind rejected tokens, where
    nothing is rejected: they come once per loss.
    """
    points = product(get_args(Loss), get_args(Sampling), get_args(Weighting))
    cells = [Cell(*p) for p in points if p[1] == "target" or p[2] != "rejected_only"]
    return (REFERENCE, *(cell for cell in cells if cell != REFERENCE))


@dataclass(frozen=True, slots=True)
class Replay:
    """Training records, and test records of other prompts; every second one is sampled."""

    train: tuple[ReplayRecord, ...]
    test: tuple[ReplayRecord, ...]


def logged_replay(lab: Lab, topic: str) -> Replay:
    """The topic's replay from disk, else answered now and kept.

    Raises:
        DataError: the source lacks the topic, or is not there.
        RuntimeError: the draft failed.
    """
    kept = {}
    for side, prompts in (("train", lab.stream(topic)), ("test", lab.test_prompts(topic))):
        settings = lab.settings([topic], {"side": side})
        path = lab.store.path(f"replay-{topic}-{side}", settings, ".records")
        if not path.is_file() or not path.stat().st_size:
            Journal(path).rewrite(encode(record) for record in _answered(lab, prompts))
        kept[side] = tuple(decode(entry) for entry in Journal(path).read())
    return Replay(**kept)


def _answered(lab: Lab, prompts: Sequence[Prompt]) -> list[ReplayRecord]:
    engine, records = lab.engine([GENERAL], replay_branches=True), []
    for first, temperature in enumerate((0.0, _TEMPERATURE)):
        found = lab.serve(engine, prompts[first::2], lambda _: FROZEN, temperature)
        records += [answer.record for answer in found if answer.record is not None]
    return records


def evaluate(lab: Lab, replay: Replay, state: Any) -> dict[str, list[float]]:
    """Acceptance on each test record as it was decoded, greedy and sampled ones apart."""
    scores = {}
    for kind in _KINDS:
        records = [r for r in replay.test if r.greedy == (kind == "greedy")]
        scores[kind] = np.round(lab.evaluator.score(state, records), 5).tolist()
    return scores


def train(
    lab: Lab, replay: Replay, cell: Cell, seed: int, steps: int, seconds: float | None
) -> dict[str, Any]:
    """Scores after so many steps, and ``in_time``: after so many processor seconds; cost.

    ``seconds`` are the reference's, None of itself.
    """
    settings = cell.settings(lab.trainer(()).distiller)
    distiller = Distiller(str(lab.draft), settings)
    branches = distiller.branches
    batches = endless_batches(replay.train, _MICRO_BATCH, np.random.default_rng(seed))
    spent, found, in_time = 0.0, {}, {}
    for records in batches:
        began = time.process_time()
        distiller.micro_step(make_batch(records, MAX_LENGTH, branches=branches))
        spent += time.process_time() - began
        if distiller.steps == steps:
            found = evaluate(lab, replay, distiller.state_dict()) | {"training_s": round(spent, 1)}
            seconds = spent if seconds is None else seconds
        if seconds is not None and spent >= seconds and not in_time:
            in_time = evaluate(lab, replay, distiller.state_dict()) | {"steps": distiller.steps}
        if found and in_time:
            break
    sizes = (round(size / _MIB, 2) for size in distiller.nbytes())
    memory = dict(zip(("weights", "gradients", "optimizer"), sizes, strict=True))
    return found | {"in_time": in_time, "mib": memory}


def summary(
    before: Mapping[str, Sequence[float]],
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    reference: str,
) -> dict[str, Any]:
    """Figures of a topic.

    Chance may explain a gain over the reference by the order of the records (over seeds) and by
    the test records (each averaged over the seeds); it is ``clearly`` better or worse if neither
    does. ``gain`` has the wider of the two intervals.
    """
    cells = {}
    for name, own in runs.items():
        cell: dict[str, Any] = {"training_s": float(np.mean([run["training_s"] for run in own]))}
        for kind in _KINDS:
            scores, base = (np.array([r[kind] for r in rs]) for rs in (own, runs[reference]))
            gains = scores - base[: len(scores)]
            over = t_interval(gains.mean(1)), t_interval(gains.mean(0))
            better = all(gain.low is not None and gain.low > 0.0 for gain in over)
            worse = all(gain.high is not None and gain.high < 0.0 for gain in over)
            cell[kind] = {
                "acceptance": asdict(t_interval(scores.mean(1))),
                "in_time": float(np.mean([run["in_time"][kind] for run in own])),
                "gain_over_seeds": asdict(over[0]),
                "gain_over_records": asdict(over[1]),
                "gain": asdict(max(over, key=_width)),
                "clearly": "better" if better else "worse" if worse else None,
            }
        cells[name] = cell | {"mib": own[0]["mib"]}
    untrained = {kind: float(np.mean(before[kind])) for kind in _KINDS}
    return {"untrained": untrained, "reference": reference, "cells": cells}


def _width(gain: Interval) -> float:
    return math.inf if gain.low is None or gain.high is None else gain.high - gain.low


def run_topic(lab: Lab, topic: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of all cells of a topic."""
    replay = logged_replay(lab, topic)
    common = lab.settings([topic], {"steps": options.steps})
    before = lab.store.unit(f"grid-{topic}-untrained", common, lambda: evaluate(lab, replay, None))
    runs: dict[str, list[dict[str, Any]]] = {}
    # Seed by seed: an interrupted run leaves a whole grid of fewer seeds.
    for seed, cell in product(range(options.seeds), options.cells):
        seconds = None if cell == REFERENCE else runs[REFERENCE.name][seed]["training_s"]
        unit = lab.store.unit(
            f"grid-{topic}-{cell.name}-{seed}",
            common | asdict(cell) | {"seed": seed},
            lambda c=cell, s=seed, t=seconds: train(lab, replay, c, s, options.steps, t),  # type: ignore[misc]
        )
        runs.setdefault(cell.name, []).append(unit)
        greedy, sampled = (np.mean(unit[kind]) for kind in _KINDS)
        say(f"{topic}: {cell.name} seed {seed}: greedy {greedy:.4f}, sampled {sampled:.4f}")
    return summary(before, runs, REFERENCE.name)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = lab_arguments(__doc__)
    parser.add_argument("--topics", nargs="+", default=["sql"])
    parser.add_argument(
        "--cells", nargs="+", metavar="LOSS-SAMPLING-WEIGHTING", help="these beside the reference"
    )
    parser.add_argument("--adapters", action="store_true", help="full copies and adapters instead")
    parser.add_argument("--steps", type=int, help="of a run; 200, with --quick 40")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    grid = {cell.name: cell for cell in (*every_cell(), *ADAPTERS)}
    usual = ADAPTERS if options.adapters else QUICK_CELLS if options.quick else every_cell()
    wanted = options.cells or [cell.name for cell in usual]
    if unknown := sorted(set(wanted) - set(grid)):
        parser.error(f"no such cell: {unknown[0]}; there are {', '.join(grid)}")
    options.cells = [grid[name] for name in dict.fromkeys([REFERENCE.name, *wanted])]
    options.steps = options.steps or (40 if options.quick else 200)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write figures and tables."""
    options = parse(argv)
    prepare(options.threads)
    lab = Lab(options, _QUICK if options.quick else _FULL)
    figures = {name: getattr(options, name) for name in ("steps", "seeds")} | {
        "machine": machine(),
        "settings": lab.run_settings(options.topics),
        "topics": {topic: run_topic(lab, topic, options) for topic in options.topics},
    }
    name = "adapters" if options.adapters else "grid"
    write(options.out / f"{name}.json", figures)
    for topic, facts in figures["topics"].items():
        rows = [
            {"cell": name, "training_s": cell["training_s"]}
            | {kind: interval(cell[kind]["acceptance"]) for kind in _KINDS}
            | {f"{k} gain": interval(cell[k]["gain"]) for k in _KINDS}
            | {f"{k} clearly": cell[k]["clearly"] for k in _KINDS}
            | {f"{k} in the reference's time": cell[k]["in_time"] for k in _KINDS}
            | {f"{part}, MiB": size for part, size in cell["mib"].items()}
            for name, cell in facts["cells"].items()
        ]
        show(f"{topic}: acceptance, untrained {facts['untrained']}", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
