"""What trainers cost the clients and how much of the idle time they use: figures over blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from idle_gaps import CpuSeries, Span, gaps, starts, yields
from idle_load import Block
from online.figures import Interval, bootstrap
from online.open_loop import Outcome

ON, OFF = "on", "off"
IDLE_S = 0.2
_MS = 1e3
_LONGEST = 20  # yields that are shown one by one


@dataclass(frozen=True, slots=True)
class Target:
    """A figure that is to be reached, and whether it is; None where it could not be measured."""

    name: str
    value: float | None
    bound: str
    met: bool | None


def pairs(
    blocks: Sequence[Block], figure: Callable[[Outcome], float | None]
) -> tuple[list[float], list[float]]:
    """A figure of every request that both sides answered: (with trainers, without)."""
    found: list[tuple[float, float]] = []
    for pair in sorted({block.pair for block in blocks}):
        sides = {block.side: block.outcomes for block in blocks if block.pair == pair}
        if sides.keys() != {ON, OFF}:
            continue
        for on, off in zip(sides[ON], sides[OFF], strict=True):
            values = figure(on), figure(off)
            if on.error is None and off.error is None and None not in values:
                found.append(values)  # type: ignore[arg-type]
    return [on for on, _ in found], [off for _, off in found]


def compared(
    blocks: Sequence[Block], figure: Callable[[Outcome], float | None], seed: int = 0
) -> dict[str, Any]:
    """Percentiles of both sides in milliseconds, their ratio and difference, with intervals."""
    on, off = pairs(blocks, figure)
    if not on:
        return {"requests": 0}

    def interval(statistic: Callable[..., float]) -> dict[str, float | None]:
        found: Interval = bootstrap(statistic, on, off, seed=seed)
        return asdict(found)

    result: dict[str, Any] = {"requests": len(on)}
    for name, q in (("p50", 50), ("p99", 99)):
        result[name] = {
            ON: interval(lambda a, _, q=q: _MS * float(np.percentile(a, q))),
            OFF: interval(lambda _, b, q=q: _MS * float(np.percentile(b, q))),
            "ratio": interval(
                lambda a, b, q=q: float(np.percentile(a, q)) / float(np.percentile(b, q))
            ),
            "difference": interval(
                lambda a, b, q=q: _MS * (float(np.percentile(a, q)) - float(np.percentile(b, q)))
            ),
        }
    return result


def idleness(blocks: Sequence[Block], series: CpuSeries) -> dict[str, Any]:
    """Idle seconds of the blocks with trainers, and what the trainer made of them."""
    own = [block for block in blocks if block.side == ON]
    idle = [gap for block in own for gap in gaps(block.busy, IDLE_S)]
    all_s = sum(end - begin for begin, end in (block.span for block in own))
    quiet = [gap for block in own for gap in gaps(block.busy, 0.0)]
    idle_s, used_s = length(idle), series.spent(idle)
    serving_s = all_s - length(quiet)
    beside_s = series.spent([block.span for block in own]) - series.spent(quiet)
    begun = [_MS * s for s in starts(series, idle) if s is not None]
    stopped = [_MS * s for s in yields(series, idle)]
    return {
        "seconds": all_s,
        "idle_s": idle_s,
        "gaps": len(idle),
        "used_s": used_s,
        "used_share": used_s / idle_s if idle_s else None,
        "gaps_unused": len(idle) - len(begun),
        "start_ms": spread(begun),
        "yield_ms": spread(stopped) | {"longest": sorted(stopped)[-_LONGEST:]},
        "serving_s": serving_s,
        "trained_while_serving_share": beside_s / serving_s if serving_s else None,
    }


def length(spans: Sequence[Span]) -> float:
    """Of all spans together."""
    return sum(end - begin for begin, end in spans)


def spread(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, median, 99th percentile and largest."""
    if not values:
        return {"count": 0, "p50": None, "p99": None, "max": None}
    p50, p99 = np.percentile(values, [50, 99])
    return {"count": len(values), "p50": float(p50), "p99": float(p99), "max": float(max(values))}


def targets(figures: dict[str, Any]) -> list[Target]:
    """What is to be reached, by the figures of :func:`compared` and :func:`idleness`."""
    tpot, ttft, idle = figures["tpot"], figures["ttft"], figures["idle"]

    def at(table: dict[str, Any], *keys: str) -> float | None:
        for key in keys:
            table = table.get(key) or {}
        return table.get("value") if isinstance(table, dict) else table

    def judged(name: str, value: float | None, bound: float, *, least: bool = False) -> Target:
        met = None if value is None else (value >= bound if least else value <= bound)
        return Target(name, value, f"{'>=' if least else '<='} {bound:g}", met)

    return [
        judged("time per output token, p50, on / off", at(tpot, "p50", "ratio"), 1.05),
        judged("time per output token, p99, on / off", at(tpot, "p99", "ratio"), 1.15),
        judged("time to first token, p99, on - off, ms", at(ttft, "p99", "difference"), 20.0),
        judged("share of idle time used", idle["used_share"], 0.8, least=True),
        judged("yield, p99, ms", idle["yield_ms"]["p99"], 50.0),
    ]
