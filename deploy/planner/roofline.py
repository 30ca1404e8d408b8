"""Roofline of a forward: bytes, FLOPs and seconds on a machine, and a fit to measured steps."""

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
from paceline.deploy.planner.models import ModelShape

_GB, _TERA, _MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True, slots=True)
class Hardware:
    """Accelerators of one kind that share every layer.

    Attributes:
        name: for display.
        bandwidth: bytes/s of one accelerator's memory.
        flops: FLOP/s of one accelerator, dense, in the models' dtype.
        memory_bytes: of one accelerator; None: unknown.
        interconnect: bytes/s between accelerators, one direction.
        overhead_s: seconds per layer besides bytes and FLOPs (kernel starts and tails); embedding,
            head and sampling count as one more layer.
        reduce_latency_s: seconds of an empty all-reduce.
        tensor_parallel: accelerators that share every layer.
        overlaps: arithmetic overlaps with memory reads, as on a GPU; on CPUs the two were measured
            to add up.
    """

    name: str
    bandwidth: float
    flops: float
    memory_bytes: float | None = None
    interconnect: float | None = None
    overhead_s: float = 0.0
    reduce_latency_s: float = 0.0
    tensor_parallel: int = 1
    overlaps: bool = True

    def __post_init__(self) -> None:
        """Validate.

        Raises:
            ConfigError: for a rate or a memory that is not positive and finite, a time that is
                negative or not finite, or several accelerators without a link between them.
        """
        rates = self.bandwidth, self.flops, self.memory_bytes, self.interconnect
        if not all(rate is None or 0.0 < rate < math.inf for rate in rates):
            raise ConfigError(
                f"{self.name}: memory, its bandwidth, FLOP/s and the interconnect's bandwidth must "
                "be positive and finite"
            )
        if not (0.0 <= self.overhead_s < math.inf and 0.0 <= self.reduce_latency_s < math.inf):
            raise ConfigError(f"{self.name}: overheads must be finite and not negative")
        if self.tensor_parallel < 1:
            raise ConfigError("tensor parallel degree must be at least 1")
        if self.tensor_parallel > 1 and self.interconnect is None:
            raise ConfigError(
                f"{self.name}: tensor parallelism needs the interconnect's bandwidth "
                "(--interconnect-gbs)"
            )


def _gpu(name: str, gbs: float, tflops: float, memory_gb: float, link_gbs: float) -> Hardware:
    """A GPU by its data sheet; both overheads are assumptions (CUDA graphs, small messages)."""
    return Hardware(
        name,
        bandwidth=gbs * _GB,
        flops=tflops * _TERA,
        memory_bytes=memory_gb * _GB,
        interconnect=link_gbs * _GB,
        overhead_s=10.0 * _MICRO,
        reduce_latency_s=8.0 * _MICRO,
    )


# Data sheets: memory bandwidth, dense bf16 tensor FLOP/s, memory, link per direction (half of
# the advertised figure of NVLink and PCIe). "cpu" is what docs/performance.md fits to two cores.
PRESETS = {
    "h100": _gpu("H100 SXM", 3350.0, 989.0, 80.0, 450.0),
    "h200": _gpu("H200 SXM", 4800.0, 989.0, 141.0, 450.0),
    "a100": _gpu("A100 SXM 80GB", 2039.0, 312.0, 80.0, 300.0),
    "l40s": _gpu("L40S", 864.0, 362.0, 48.0, 32.0),
    "cpu": Hardware("2 CPU cores", bandwidth=25.0 * _GB, flops=0.3 * _TERA, overlaps=False),
}


_LOGIT_BYTES = 4  # sampling works in float32


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per number: weights, KV cache, activations."""

    weight: float = 2.0
    kv: float = 2.0
    activation: float = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes and FLOPs of a forward, summed over all accelerators.

    Attributes:
        weight_bytes: weights read, each once; of a mixture, the experts expected to be hit.
        kv_bytes: keys and values read and written.
        activation_bytes: activations between kernels, written and read, and logits.
        product_flops: of the matrix products with weights.
        attention_flops: of scores and weighted values.
        layers: decoder layers.
        kv_heads: largest number of shards of the KV cache.
        reduced_bytes: of one all-reduce; a layer has two.
    """

    weight_bytes: float
    kv_bytes: float
    activation_bytes: float
    product_flops: float
    attention_flops: float
    layers: int
    kv_heads: int
    reduced_bytes: float

    @property
    def bytes_moved(self) -> float:
        """Bytes read and written."""
        return self.weight_bytes + self.kv_bytes + self.activation_bytes

    @property
    def flops(self) -> float:
        """FLOPs of products and attention."""
        return self.product_flops + self.attention_flops


def distinct_experts(count: int, per_token: int, tokens: int) -> float:
    """Expected number of distinct experts of a layer for ``tokens`` uniformly routed tokens."""
    return count * (1.0 - (1.0 - per_token / count) ** tokens)


def step_work(
    shape: ModelShape, precision: Precision, rows: int, tokens: int, context: int, copies: int = 1
) -> Work:
    """The work of a forward over ``rows`` requests with ``tokens`` new tokens each.

    Args:
        shape: the model.
        precision: bytes per number.
        rows: requests; each reads its keys and values once for all its new tokens.
        tokens: new tokens per request.
        context: cached positions per request.
        copies: models of this shape that share the rows.
    """
    new = rows * tokens
    positions = shape.cached_positions(context)
    kv_of_layer = 2 * shape.kv_heads * shape.head_dim
    reads = rows * positions * kv_of_layer
    writes = new * shape.kv_values_per_token
    # A new token attends to the cache, itself, and on average half of the other new tokens.
    attended = new * (positions + shape.layers * (tokens + 1) / 2.0)
    return Work(
        weight_bytes=precision.weight * copies * _weights_read(shape, -(-new // copies)),
        kv_bytes=precision.kv * (reads + writes),
        activation_bytes=new * _activation_bytes(shape, precision),
        product_flops=2.0 * shape.active_parameters * new,
        attention_flops=4.0 * shape.heads * shape.head_dim * attended,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        reduced_bytes=precision.activation * new * shape.hidden,
    )


def _weights_read(shape: ModelShape, new: int) -> float:
    """Weights that ``new`` tokens read, rows of the embedding included."""
    read = float(shape.common_parameters + new * shape.hidden)
    if shape.experts:
        hit = distinct_experts(shape.experts.count, shape.experts.per_token, new)
        read += shape.experts.layers * hit * shape.expert_parameters
    return read


def _activation_bytes(shape: ModelShape, precision: Precision) -> float:
    """Activation bytes of one token: every kernel writes them, the next one reads them."""
    attention = 2 * shape.head_dim * (shape.heads + shape.kv_heads)  # q, k, v and the result
    dense = shape.layers - shape.sparse_layers
    fed = dense * shape.intermediate
    if shape.experts:
        width = shape.experts.per_token * shape.experts.intermediate
        fed += shape.experts.layers * (width + shape.experts.shared_intermediate)
    residual = 4 * shape.hidden  # two norms and two residual sums
    numbers = shape.layers * (attention + residual) + 3 * fed  # gate, up and their product
    return 2.0 * precision.activation * numbers + 2.0 * _LOGIT_BYTES * shape.vocab


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a forward by cause."""

    products_s: float
    attention_s: float
    reduce_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.products_s + self.attention_s + self.reduce_s + self.overhead_s


def step_time(work: Work, hardware: Hardware) -> StepTime:
    """Seconds of a forward: a roofline for products with weights, and one for attention.

    The two alternate in every layer: bytes of one do not overlap with FLOPs of the other.
    """
    shares = hardware.tensor_parallel
    moved = (work.weight_bytes + work.activation_bytes) / shares
    cache = work.kv_bytes / min(shares, work.kv_heads)  # heads are repeated, not split
    reduce_s = 0.0
    if shares > 1 and hardware.interconnect:
        carried = 2.0 * (shares - 1) / shares * work.reduced_bytes  # of a ring
        reduce_s = 2 * work.layers * (carried / hardware.interconnect + hardware.reduce_latency_s)
    return StepTime(
        products_s=_bound(moved, work.product_flops / shares, hardware),
        attention_s=_bound(cache, work.attention_flops / shares, hardware),
        reduce_s=reduce_s,
        overhead_s=(work.layers + 1) * hardware.overhead_s,
    )


def _bound(moved: float, flops: float, hardware: Hardware) -> float:
    """Seconds of bytes and FLOPs: the maximum if they overlap, else the sum."""
    parts = (moved / hardware.bandwidth, flops / hardware.flops)
    return max(parts) if hardware.overlaps else sum(parts)


Table = Mapping[tuple[int, int], float]
_LOWEST, _HIGHEST = 8.0, 16.0  # range of bandwidth and FLOP/s, powers of ten
_POINTS, _ZOOMS, _ZOOM = 17, 9, 3.0


@dataclass(frozen=True, slots=True)
class StepTable:
    """Measured step times, seconds.

    Attributes:
        context: cached positions per row.
        precision: bytes per number.
        target: by (rows, new tokens per row).
        draft: of one draft step by (rows, experts that share the rows).
    """

    context: int
    precision: Precision
    target: Table
    draft: Table


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement and its prediction.

    Attributes:
        kind: ``target`` and ``draft`` are steps in seconds, ``speed-up`` is of a round.
        rows: requests.
        column: new tokens, experts, or k.
        measured: value.
        predicted: by the fitted machine.
    """

    kind: str
    rows: int
    column: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error: 0.1 is ten per cent too high."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Fit:
    """A machine fitted to measured steps, and its errors.

    Attributes:
        hardware: fitted to all steps.
        points: every step, and the speed-ups computed from them.
        unseen: cross-validation: each batch size predicted by a machine fitted to the others;
            empty if only one was measured.
    """

    hardware: Hardware
    points: tuple[Point, ...]
    unseen: tuple[Point, ...]


def read_steps(path: Path) -> StepTable:
    """Read a table of ``benchmarks/steps.py``.

    ``{"context": C, "precision": {"weight", "kv", "activation"}, "target": {"rows,tokens":
    seconds}, "draft": {"rows,experts": seconds}}``; other entries are ignored.

    Raises:
        ConfigError: the file is missing or no step table.
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
    """Work and measured seconds by (model, rows, column)."""
    found = {}
    for (rows, tokens), seconds in steps.target.items():
        work = step_work(target, steps.precision, rows, tokens, steps.context)
        found["target", rows, tokens] = (work, seconds)
    for (rows, experts), seconds in steps.draft.items():
        copies = min(rows, experts)  # the other experts are idle
        work = step_work(draft, steps.precision, rows, 1, steps.context, copies)
        found["draft", rows, experts] = (work, seconds)
    return found


def fit_models(
    target: ModelShape, draft: ModelShape, steps: StepTable, name: str = "fitted"
) -> Fit:
    """Fit one machine to both models' steps."""
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
    """Predict every measured step, and every speed-up computed from measured steps."""
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
    """Speed-up per expected token, of rows of one expert."""
    plain, verify = times["target", rows, 1], times["target", rows, k + 1]
    return plain / (k * times["draft", rows, 1] + verify)


def fit_hardware(steps: Sequence[tuple[Work, float]], name: str) -> Hardware:
    """Fit a machine to (work, seconds) by least squares of the relative error.

    Bandwidth and FLOP/s come from a grid search that zooms in on its best point, with and without
    overlap; the overhead is linear and has a closed form. If no step is bound by FLOPs (or none by
    bytes), that rate is a lower bound.
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
    """Squared relative error, and the best non-negative overhead, seconds per layer."""
    missing = [1.0 - step_time(work, machine).seconds / seconds for work, seconds in steps]
    weights = [(work.layers + 1) / seconds for work, seconds in steps]
    overhead = sum(w * m for w, m in zip(weights, missing, strict=True))
    overhead = max(0.0, overhead / sum(w * w for w in weights))
    loss = sum((m - overhead * w) ** 2 for w, m in zip(weights, missing, strict=True))
    return loss, overhead


def error_summary(points: Sequence[Point]) -> dict[str, dict[str, float]]:
    """Count, median and largest absolute relative error per kind."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(point.kind for point in points):
        errors = [abs(point.error) for point in points if point.kind == kind]
        found[kind] = {
            "count": len(errors),
            "median": statistics.median(errors),
            "largest": max(errors),
        }
    return found
