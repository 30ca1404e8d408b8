"""Hold the planner against measured steps: fit this machine, state the error."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.deploy.errors import ConfigError
from paceline.deploy.planner.costs import Precision, Work, step_time, step_work
from paceline.deploy.planner.hardware import Hardware
from paceline.deploy.planner.shapes import ModelShape

Table = Mapping[tuple[int, int], float]
_LOWEST, _HIGHEST = 8.0, 16.0  # powers of ten within which bandwidth and FLOP/s are sought
_POINTS, _ZOOMS, _ZOOM = 17, 9, 3.0


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured seconds.

    Attributes:
        context: positions of every row that were in the cache.
        precision: bytes of a number, as it ran.
        target: by (rows, new tokens of each).
        draft: of one step by (rows, experts among which they are divided).
    """

    context: int
    precision: Precision
    target: Table
    draft: Table


@dataclass(frozen=True, slots=True)
class Point:
    """A measured figure beside its prediction.

    Attributes:
        kind: ``target`` and ``draft`` are steps in seconds, ``speed-up`` is of a round.
        rows: requests.
        column: new tokens, experts, or k.
        measured: the figure.
        predicted: what the fitted machine says.
    """

    kind: str
    rows: int
    column: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative: 0.1 is predicted ten per cent too high."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A machine that explains the measured steps as well as a roofline can.

    Attributes:
        hardware: fitted to all steps.
        points: every step, and the speed-ups that follow from them.
        unseen: the same, each batch size predicted by a machine fitted to the others; empty
            where only one was measured.
    """

    hardware: Hardware
    points: tuple[Point, ...]
    unseen: tuple[Point, ...]


def read_steps(path: Path) -> StepTable:
    """A table as ``benchmarks/steps.py`` writes it.

    ``{"context": C, "precision": {"weight", "kv", "activation"}, "target": {"rows,tokens":
    seconds}, "draft": {"rows,experts": seconds}}``; other entries are not read.

    Raises:
        ConfigError: for a file that is missing or something else; the message is one line.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise ConfigError(f"{path}: not a JSON file") from None
    try:
        return StepTable(
            context=int(data["context"]),
            precision=Precision(**{k: float(v) for k, v in data["precision"].items()}),
            target=_table(data["target"]),
            draft=_table(data["draft"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: not a step table of benchmarks/steps.py ({type(error).__name__}: {cause})"
        ) from None


def _table(entries: Mapping[str, Any]) -> dict[tuple[int, int], float]:
    table = {}
    for key, value in entries.items():
        rows, column = (int(part) for part in key.split(","))
        seconds = float(value)
        if rows < 1 or column < 1 or not (0.0 < seconds < math.inf):
            raise ValueError(f"{key}: {value}")
        table[rows, column] = seconds
    if not table:
        raise ValueError("no steps")
    return table


def step_works(
    target: ModelShape, draft: ModelShape, steps: StepTable
) -> dict[tuple[str, int, int], tuple[Work, float]]:
    """Work and measured seconds by (model, rows, column).

    Of a draft's experts no more have work to do than there are rows.
    """
    found = {}
    for (rows, tokens), seconds in steps.target.items():
        work = step_work(target, steps.precision, rows, tokens, steps.context)
        found["target", rows, tokens] = (work, seconds)
    for (rows, experts), seconds in steps.draft.items():
        copies = min(rows, experts)
        work = step_work(draft, steps.precision, rows, 1, steps.context, copies)
        found["draft", rows, experts] = (work, seconds)
    return found


def fit_models(
    target: ModelShape, draft: ModelShape, steps: StepTable, name: str = "fitted"
) -> Fit:
    """One machine for both models' steps, and how well it predicts them."""
    known = step_works(target, draft, steps)
    hardware = fit_hardware(list(known.values()), name)
    unseen: list[Point] = []
    sizes = sorted({rows for _, rows, _ in known})
    for size in sizes if len(sizes) > 1 else []:
        others = [step for (_, rows, _), step in known.items() if rows != size]
        own = {at: step for at, step in known.items() if at[1] == size}
        unseen += predict(fit_hardware(others, name), own)
    return Fit(hardware, tuple(predict(hardware, known)), tuple(unseen))


def predict(
    hardware: Hardware, steps: Mapping[tuple[str, int, int], tuple[Work, float]]
) -> list[Point]:
    """Every measured step, and every speed-up that follows from measured steps."""
    found = [
        Point(*at, measured=seconds, predicted=step_time(work, hardware).seconds)
        for at, (work, seconds) in steps.items()
    ]
    measured = {(point.kind, point.rows, point.column): point.measured for point in found}
    predicted = {(point.kind, point.rows, point.column): point.predicted for point in found}
    for model, rows, tokens in steps:
        if (
            model == "target"
            and tokens > 1
            and {(model, rows, 1), ("draft", rows, 1)} <= set(steps)
        ):
            both = (_speed_up(times, rows, tokens - 1) for times in (measured, predicted))
            found.append(Point("speed-up", rows, tokens - 1, *both))
    return found


def _speed_up(times: Mapping[tuple[str, int, int], float], rows: int, k: int) -> float:
    """Per expected token (which measured and predicted share), of rows of one expert."""
    plain, verify = times["target", rows, 1], times["target", rows, k + 1]
    return plain / (k * times["draft", rows, 1] + verify)


def fit_hardware(steps: Sequence[tuple[Work, float]], name: str) -> Hardware:
    """The machine with the least squared relative error over (work, seconds).

    Bandwidth and FLOP/s by a grid of powers that closes in on its best point, once where they
    overlap and once where they add up; the overhead, in which times are linear, in closed form.
    Where no step is bound by FLOPs (or none by bytes), that rate is only known to be high enough.
    """
    _, machine = min(
        (_search(steps, name, overlaps) for overlaps in (True, False)), key=lambda found: found[0]
    )
    return machine


def _search(
    steps: Sequence[tuple[Work, float]], name: str, overlaps: bool
) -> tuple[float, Hardware]:
    best_loss, best = math.inf, (0.0, 0.0, 0.0)
    centre, span = ((_LOWEST + _HIGHEST) / 2,) * 2, (_HIGHEST - _LOWEST) / 2
    for _ in range(_ZOOMS):
        offsets = [span * (2 * i / (_POINTS - 1) - 1) for i in range(_POINTS)]
        for by, fl in itertools.product(offsets, offsets):
            at = (centre[0] + by, centre[1] + fl)
            machine = Hardware(name, 10.0 ** at[0], 10.0 ** at[1], overlaps=overlaps)
            loss, overhead = _overhead(steps, machine)
            if loss < best_loss:
                best_loss, best = loss, (*at, overhead)
        centre, span = best[:2], span / _ZOOM
    machine = Hardware(
        name, 10.0 ** best[0], 10.0 ** best[1], overhead_s=best[2], overlaps=overlaps
    )
    return best_loss, machine


def _overhead(steps: Sequence[tuple[Work, float]], machine: Hardware) -> tuple[float, float]:
    """Squared relative error and the overhead (seconds per layer, not negative) that is best."""
    missing = [1.0 - step_time(work, machine).seconds / seconds for work, seconds in steps]
    weights = [(work.layers + 1) / seconds for work, seconds in steps]
    overhead = sum(w * m for w, m in zip(weights, missing, strict=True))
    overhead = max(0.0, overhead / sum(w * w for w in weights))
    loss = sum((m - overhead * w) ** 2 for w, m in zip(weights, missing, strict=True))
    return loss, overhead


def error_summary(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Per kind: how many, the median and the largest of the absolute relative errors."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(point.kind for point in points):
        errors = [abs(point.error) for point in points if point.kind == kind]
        found[kind] = {
            "count": len(errors),
            "median": statistics.median(errors),
            "largest": max(errors),
        }
    return found
