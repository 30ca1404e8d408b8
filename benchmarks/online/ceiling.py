"""The offline ceiling: the same draft distilled on a whole train side until it gains no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import numpy as np
from expert_cache import DRAFT
from safetensors.torch import load_file, save_file
from torch import Tensor

from online import rows
from online.bench import Bench, counts_of, packed
from online.judging import MAX_LENGTH, Judge
from online.serving import serve
from paceline.actors.engine.request import DRAFT_OFF
from paceline.actors.replay.record import ReplayRecord, is_held_out
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.training.batches import make_batch, micro_batches
from paceline.actors.training.distiller import Distiller
from paceline.actors.training.settings import DistillerSettings

# What is learnt from offline: the whole train side, or no more than the stream had.
WHOLE, SAME = "ceiling", "offline"


@dataclass(frozen=True, slots=True)
class Offline:
    """How the ceiling is taught.

    Attributes:
        learning_rates: one after the other, each from the best weights so far.
        micro_batch: records.
        look_every: micro-steps between two looks at the held-out answers.
        patience: looks without a gain after which a rate has given what it can.
        least_gain: of the held-out acceptance, that counts as one.
        held_out_fraction: of the prompts, kept from training.
        max_steps: micro-steps in all; a run that needs them all has not converged.
        seed: of the order.
    """

    learning_rates: tuple[float, ...] = (1.5e-3, 5e-4, 1.5e-4)
    micro_batch: int = 16
    look_every: int = 100
    patience: int = 3
    least_gain: float = 0.001
    held_out_fraction: float = 0.08
    max_steps: int = 8_000
    seed: int = 0


QUICK = Offline(learning_rates=(1.5e-3, 4e-4), look_every=50, patience=2, max_steps=150)


class Plateau:
    """Whether a figure that is looked at now and then still rises."""

    def __init__(self, patience: int, least_gain: float, best: float) -> None:
        """Start from a figure that is already had."""
        self._patience = patience
        self._least_gain = least_gain
        self._waited = 0
        self.best = best

    def look(self, value: float) -> bool:
        """True where the value is the best so far, by ``least_gain`` at least."""
        if value > self.best + self._least_gain:
            self.best, self._waited = value, 0
            return True
        self._waited += 1
        return False

    @property
    def over(self) -> bool:
        """True after ``patience`` looks in a row without a gain."""
        return self._waited >= self._patience


def lesson(bench: Bench, topic: str, most: int | None) -> list[ReplayRecord]:
    """The target's answers to the train side, at most so many: the stream's, then the rest's."""
    whole = bench.stream(topic, len(bench.questions(topic).train))[:most]
    first = bench.frozen(topic, min(len(whole), bench.sizes.stream))
    rest = bench.answers(topic, "rest", whole[len(first) :], DRAFT_OFF)
    return [served.record for served in (*first, *rest)]


def find(bench: Bench, topic: str, offline: Offline, kind: str) -> dict[str, Any] | None:
    """The result on disk, None where there is none; see :func:`ceiling_unit`."""
    name, settings = _unit(bench, topic, offline, kind)
    return bench.store.find(name, settings)


def ceiling_unit(bench: Bench, topic: str, offline: Offline, kind: str = WHOLE) -> dict[str, Any]:
    """The result on disk, or made now; the weights lie beside it.

    Args:
        bench: see Bench.
        topic: whose draft.
        offline: see Offline.
        kind: ``WHOLE`` learns from the whole train side, ``SAME`` from the stream's prompts.
    """
    name, settings = _unit(bench, topic, offline, kind)
    weights = bench.store.path(name, settings, ".safetensors")
    most = settings["prompts_at_most"]
    return bench.store.unit(
        name, settings, lambda: run_ceiling(bench, topic, offline, weights, most)
    )


def _unit(bench: Bench, topic: str, offline: Offline, kind: str) -> tuple[str, dict[str, Any]]:
    """Name and settings: all that decides :func:`run_ceiling`."""
    most = bench.sizes.stream if kind == SAME else bench.sizes.ceiling
    settings = bench.settings([topic], {"offline": asdict(offline), "prompts_at_most": most})
    return f"{kind}-{rows.label(bench.data)}-{topic}", settings


def run_ceiling(
    bench: Bench, topic: str, offline: Offline, weights: Path, most: int | None
) -> dict[str, Any]:
    """Distil to convergence, judge on the test, serve the test.

    Returns:
        ``test``: scores per test prompt; ``test_counts``: counts of the test served;
        ``looks``: [micro-steps, learning rate, held-out acceptance]; ``records``, ``converged``.
    """
    records = lesson(bench, topic, most)
    state, facts = distil(records, offline, bench)
    save_file({k: v.contiguous() for k, v in state.items()}, weights)
    tests = [served.record for served in bench.test(topic)]
    engine = bench.engine([topic])
    engine.updates.put(SwapWeights(topic, 1, load_file(weights)))
    test = bench.questions(topic).test
    counts = counts_of(list(serve(engine, test, [topic] * len(test), bench.serving)))
    scores = bench.judge.score(state, tests)
    bench.say(f"{topic}: ceiling {scores.acceptance.mean():.3f} after {facts['steps']} steps")
    return {
        "test": scores.facts(),
        "test_counts": packed(counts),
        **facts,
        "machine": machine.facts(),
    }


def distil(
    records: Sequence[ReplayRecord], offline: Offline, bench: Bench
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights that are best on held-out records, and how they were found."""
    sides: dict[bool, list[ReplayRecord]] = {True: [], False: []}
    for record in records:
        sides[is_held_out(record.prompt_token_ids, offline.held_out_fraction)].append(record)
    held_out, train = sides[True], sides[False]
    judge, rng = bench.judge, np.random.default_rng(offline.seed)
    plateau = Plateau(offline.patience, offline.least_gain, _mean(judge, None, held_out))
    best: dict[str, Tensor] | None = None
    looks: list[list[float]] = [[0, 0.0, plateau.best]]
    steps, converged = 0, True
    for rate in offline.learning_rates:
        distiller = Distiller(str(DRAFT), DistillerSettings(learning_rate=rate, dtype=bench.dtype))
        distiller.reset(best)
        plateau = Plateau(offline.patience, offline.least_gain, plateau.best)
        while not plateau.over:
            if steps >= offline.max_steps:
                converged = False
                break
            _learn(distiller, train, offline, rng)
            steps += offline.look_every
            state = distiller.state_dict()
            value = _mean(judge, state, held_out)
            looks.append([steps, rate, round(value, 5)])
            bench.say(f"ceiling: {steps} steps at {rate:g}, held-out acceptance {value:.4f}")
            if plateau.look(value):
                best = state
    facts = {
        "records": len(records),
        "records_train": len(train),
        "records_held_out": len(held_out),
        "positions_per_epoch": sum(len(r.output_token_ids) for r in train),
        "steps": steps,
        "looks": looks,
        "converged": converged,
    }
    return best or distiller.state_dict(), facts


def _learn(
    distiller: Distiller,
    train: Sequence[ReplayRecord],
    offline: Offline,
    rng: np.random.Generator,
) -> None:
    """``look_every`` micro-steps over fresh draws."""
    left = offline.look_every
    while left > 0:
        for batch in micro_batches(train, offline.micro_batch, rng)[:left]:
            distiller.micro_step(make_batch(batch, MAX_LENGTH))
            left -= 1


def _mean(judge: Judge, state: dict[str, Tensor] | None, records: Sequence[ReplayRecord]) -> float:
    """Of acceptance and overlap together: less noise than either alone."""
    scores = judge.score(state, records)
    return float((scores.acceptance.mean() + scores.overlap.mean()) / 2.0)
