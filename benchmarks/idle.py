"""Cost of learning in idle time for the clients, and the share of idle time that it uses.

    make bench-idle ARGS="--requests 200"

The small models over HTTP under open-loop traffic with gaps (Poisson arrivals). Blocks with
trainers on and off (the trainer scheduler paused) take turns, a pair with the same requests, so
that each request is compared with itself. Idle are gaps of over 200 ms without a request in flight;
the trainer's use of them, and how long it continues after the arrival that ends a gap, are read
from its CPU clock every 5 ms. Exit status 1 if a request failed or changed, a topic is not warm,
a draft failed or the trainer died.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ray
from clients import Outcome, Planned, replay, until
from expert_cache import SMALL_MODELS
from harness import arguments, bootstrap, interval, machine, say, show, write

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import MAKERS, TOPICS

ON, OFF = "on", "off"
Span = tuple[float, float]  # seconds of time.monotonic

_OUT = Path("out") / "bench" / "idle.json"
_TIMEOUT_S = 30.0
_DRAIN_S = 120.0
_SETTLE_S = 1.0
_WARM_UP_REQUESTS = 40
_IDLE_S = 0.2
_MS = 1e3
_BEFORE_S = 0.04  # before an arrival, in which the trainer must compute for a yield
_WINDOW_S = 0.015  # that tells computing from waiting for a permit
_COMPUTES, _RESTS, _AT_REST = 0.5, 0.2, 0.1  # CPU seconds per second
_GIVE_UP_S = 2.0
_LATELY = 100  # readings


class CpuSeries:
    """CPU seconds of a process over time, as the kernel counts them."""

    def __init__(self, times: Sequence[float], seconds: Sequence[float]) -> None:
        self.times = np.asarray(times, dtype=np.float64)
        self._seconds = np.asarray(seconds, dtype=np.float64)

    def spent(self, spans: Sequence[Span]) -> float:
        """CPU seconds within spans of time, between readings in proportion."""
        if not spans or not len(self.times):
            return 0.0
        begins, ends = np.interp(np.asarray(spans), self.times, self._seconds).T
        return float(np.sum(ends - begins))

    def share(self, begin: float, end: float) -> float:
        """CPU seconds per second of one span."""
        return self.spent([(begin, end)]) / (end - begin)


class CpuClock:
    """Thread that reads a process' CPU clock every few milliseconds, from the start on.

    A reading is one system call of some microseconds, for a process of any number of threads.
    """

    def __init__(self, pid: int, every_s: float = 0.005) -> None:
        self._times: list[float] = []
        self._seconds: list[float] = []
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                seconds = time.clock_gettime(self._clock)
            except OSError:  # the process has ended
                return
            self._times.append(time.monotonic())
            self._seconds.append(seconds)

    def lately(self) -> float:
        """CPU seconds per second over the last readings."""
        times, seconds = self._times[-_LATELY:], self._seconds[-_LATELY:]
        count = min(len(times), len(seconds))
        return (seconds[count - 1] - seconds[0]) / max(times[count - 1] - times[0], 1e-9)

    def stop(self) -> CpuSeries:
        """End the thread; return the readings."""
        self._ended.set()
        self._thread.join()
        return CpuSeries(self._times, self._seconds)


def gaps(busy: Sequence[Span], least_s: float) -> list[Span]:
    """Spans longer than ``least_s`` in which nothing was busy."""
    found, until = [], None
    for begin, end in sorted(busy):
        if until is not None and begin - until > least_s:
            found.append((until, begin))
        until = end if until is None else max(until, end)
    return found


def yields(series: CpuSeries, idle: Sequence[Span]) -> list[float]:
    """Seconds from the arrival that ends a gap until the trainer has stopped.

    Gaps at the end of which it did not compute are left out. More than two seconds count as two.
    """
    found = []
    for begin, arrival in idle:
        if series.share(max(begin, arrival - _BEFORE_S), arrival) <= _COMPUTES:
            continue
        first, last = np.searchsorted(series.times, [arrival, arrival + _GIVE_UP_S - _WINDOW_S])
        windows = (arrival, *series.times[first:last])
        rests = (at - arrival for at in windows if series.share(at, at + _WINDOW_S) < _RESTS)
        found.append(next(rests, _GIVE_UP_S))
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """Requests under one setting, in the order of arrival."""

    pair: int
    side: str
    began: float
    outcomes: tuple[Outcome, ...]

    @property
    def busy(self) -> list[tuple[float, float]]:
        """Span of each request, from its sending to its last event."""
        return [
            (self.began + o.due_s + o.lag_s, self.began + o.due_s + o.e2e_s) for o in self.outcomes
        ]

    @property
    def span(self) -> tuple[float, float]:
        """From the first sending to the last event."""
        return min(sent for sent, _ in self.busy), max(end for _, end in self.busy)


def plan(count: int, rate: float, max_tokens: int, seed: int) -> list[Planned]:
    """Chat requests over all topics, every other one sampled with a seed, the others greedy."""
    rng, planned, due_s = random.Random(seed), [], 0.0
    for index in range(count):
        topic = TOPICS[rng.randrange(len(TOPICS))]
        sampling = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        body = {
            "model": "paceline",
            "messages": [{"role": "user", "content": MAKERS[topic](rng)}],
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            **sampling,
        }
        planned.append(Planned(due_s, topic, 0, body))
        due_s += rng.expovariate(rate)
    return planned


async def run(url: str, planned: Sequence[Planned], pair: int, side: str) -> Block:
    """Send every request when it is due; return when all have ended."""
    began, outcomes = await replay(url, planned, _DRAIN_S)
    return Block(pair, side, began, tuple(outcomes))


@dataclass(frozen=True, slots=True)
class Target:
    """Figure with the bound that it must meet; None if it could not be measured."""

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

    def estimate(statistic: Callable[..., float]) -> dict[str, float | None]:
        return asdict(bootstrap(statistic, on, off, seed=seed))

    def at(q: int) -> dict[str, Any]:
        def of(values: Any) -> float:
            return float(_MS * np.percentile(values, q))

        return {
            ON: estimate(lambda a, _: of(a)),
            OFF: estimate(lambda _, b: of(b)),
            "ratio": estimate(lambda a, b: of(a) / of(b)),
            "difference": estimate(lambda a, b: of(a) - of(b)),
        }

    return {"requests": len(on), "p50": at(50), "p99": at(99)}


def idleness(blocks: Sequence[Block], series: CpuSeries) -> dict[str, Any]:
    """Idle seconds of the blocks with trainers, and the trainer's use of them."""
    own = [block for block in blocks if block.side == ON]
    idle = [gap for block in own for gap in gaps(block.busy, _IDLE_S)]
    all_s = sum(end - begin for begin, end in (block.span for block in own))
    quiet = [gap for block in own for gap in gaps(block.busy, 0.0)]
    idle_s, used_s = length(idle), series.spent(idle)
    serving_s = all_s - length(quiet)
    beside_s = series.spent([block.span for block in own]) - series.spent(quiet)
    stopped = [_MS * s for s in yields(series, idle)]
    return {
        "seconds": all_s,
        "idle_s": idle_s,
        "gaps": len(idle),
        "used_s": used_s,
        "used_share": used_s / idle_s if idle_s else None,
        "yield_ms": spread(stopped),
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
    """Targets, by the figures of :func:`compared` and :func:`idleness`."""
    tpot, ttft, idle = figures["tpot"], figures["ttft"], figures["idle"]

    def at(table: dict[str, Any], *keys: str) -> float | None:
        for key in keys:
            table = table.get(key) or {}
        return table.get("value") if isinstance(table, dict) else table

    def target(name: str, value: float | None, bound: float, *, least: bool = False) -> Target:
        met = None if value is None else (value >= bound if least else value <= bound)
        return Target(name, value, f"{'>=' if least else '<='} {bound:g}", met)

    return [
        target("time per output token, p50, on / off", at(tpot, "p50", "ratio"), 1.05),
        target("time per output token, p99, on / off", at(tpot, "p99", "ratio"), 1.15),
        target("time to first token, p99, on - off, ms", at(ttft, "p99", "difference"), 20.0),
        target("share of idle time used", idle["used_share"], 0.8, least=True),
        target("yield, p99, ms", idle["yield_ms"]["p99"], 50.0),
    ]


def call(actor: Any, method: str) -> Any:
    """Call an actor's method and return its result."""
    return ray.get(getattr(actor, method).remote(), timeout=_TIMEOUT_S)


async def warmed_up(running: RunningApp, options: argparse.Namespace) -> list[str]:
    """Send traffic until the gate has decided on each topic; return those topics.

    A topic's first round loads its engine for good. And new drafts learn so fast that the later
    block of a pair would be served with better ones.
    """
    decided: set[str] = set()
    deadline, turn = time.monotonic() + options.warm_up_s, 0
    while time.monotonic() < deadline and (
        decided < set(TOPICS) or turn * _WARM_UP_REQUESTS < options.warm_up_requests
    ):
        turn += 1
        planned = plan(_WARM_UP_REQUESTS, options.rate, options.max_tokens, -turn)
        await run(running.base_url, planned, -1, ON)
        history = ray.get(running.registry.history.remote(None), timeout=_TIMEOUT_S)
        decided |= {entry["topic"] for entry in history if entry["topic"] in TOPICS}
    return sorted(decided)


async def switched(running: RunningApp, clock: CpuClock, side: str) -> None:
    """Trainers on, or off and at rest."""
    call(running.scheduler, "resume" if side == ON else "pause")
    if side == OFF:
        await until(lambda: clock.lately() < _AT_REST, "the trainer's rest")
    await asyncio.sleep(_SETTLE_S)


async def measure(running: RunningApp, clock: CpuClock, options: argparse.Namespace) -> list[Block]:
    """Run all blocks."""
    blocks = []
    for pair in range(options.pairs):
        seed = options.seed + pair
        planned = plan(options.requests, options.rate, options.max_tokens, seed)
        for side in (ON, OFF) if pair % 2 == 0 else (OFF, ON):
            await switched(running, clock, side)
            blocks.append(await run(running.base_url, planned, pair, side))
            say(f"pair {pair + 1} of {options.pairs}, trainers {side}: {blocks[-1].span}")
    call(running.scheduler, "resume")
    return blocks


def faults_of(
    blocks: list[Block], status: dict[str, Any], pid: int, decided: list[str]
) -> list[str]:
    """Reasons why the figures say nothing; empty if there is none."""
    errors = [o.error for block in blocks for o in block.outcomes if o.error is not None]
    faults = [f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else []
    if (count := changed(blocks)) > 0:
        faults.append(f"{count} answers differ between the sides of their pair")
    if lacking := sorted(set(TOPICS) - set(decided)):
        faults.append(f"not warm: nothing was decided on {', '.join(lacking)}")
    if failures := status["target"].get("draft_failures"):
        faults.append(f"drafts failed in {failures} rounds")
    if status["trainer"]["pid"] != pid:
        faults.append("the trainer died")
    return faults


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, run all blocks, and compute the figures."""
    with tempfile.TemporaryDirectory() as state_dir:
        overrides = {
            **SMALL_MODELS,
            "port": options.port,
            "state_dir": state_dir,
            "target.prefix_cache": False,  # each prompt comes twice, and must cost the same
            "training.max_occupancy": options.max_occupancy,
            "ray.dashboard": False,
        }
        with app.start(load_config(None, overrides)) as running:
            decided = asyncio.run(warmed_up(running, options))
            say(f"warm: {', '.join(decided) or 'no topic'} decided on")
            pid = call(running.trainer, "status").pid
            clock = CpuClock(pid)
            blocks = asyncio.run(measure(running, clock, options))
            series = clock.stop()
            status = {
                "trainer": asdict(call(running.trainer, "status")),
                "target": httpx.get(f"{running.base_url}/v1/paceline/status", timeout=30).json()[
                    "target"
                ],
            }
    figures: dict[str, Any] = {
        "machine": machine(),
        "settings": vars(options) | {"decided_before": decided},
        "tpot": compared(blocks, lambda o: o.tpot_s),
        "ttft": compared(blocks, lambda o: o.ttft_s),
        "lag_ms_max": 1e3 * max(o.lag_s for block in blocks for o in block.outcomes),
        "changed": changed(blocks),
        "idle": idleness(blocks, series),
        "trainer": status["trainer"],
        "faults": faults_of(blocks, status, pid, decided),
    }
    return figures | {"targets": [asdict(target) for target in targets(figures)]}


def changed(blocks: list[Block]) -> int:
    """Answers that differ between the sides of a pair; all are greedy or seeded."""
    answers: dict[tuple[int, int], set[str]] = {}
    for block in blocks:
        for index, outcome in enumerate(block.outcomes):
            if outcome.error is None:
                answers.setdefault((block.pair, index), set()).add(outcome.answer)
    return sum(len(found) > 1 for found in answers.values())


def main() -> int:
    """Measure, write and show."""
    parser = arguments(__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="per block")
    parser.add_argument("--pairs", type=int, default=2, help="of blocks, on and off")
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals per second")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--warm-up-s", type=float, default=900.0, help="at most")
    parser.add_argument("--warm-up-requests", type=int, default=400, help="at least")
    parser.add_argument("--max-occupancy", type=float, default=0.0, help="training.max_occupancy")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument("--strict", action="store_true", help="1 also if a target is missed")
    options = parser.parse_args()
    figures = measured(options)
    write(_OUT, figures)
    rows = [
        {"": f"{words}, {q}, ms"}
        | {key: interval(found) for key, found in figures[name][q].items()}
        for name, words in (("tpot", "time per output token"), ("ttft", "time to first token"))
        for q in ("p50", "p99")
        if q in figures[name]
    ]
    show(f"Trainers on against off, {figures['tpot']['requests']} paired requests", rows)
    show("Targets", figures["targets"])
    say(f"Idle: {figures['idle']}")
    say("\n".join(figures["faults"]) if figures["faults"] else "No request failed.")
    missed = any(target["met"] is False for target in figures["targets"])
    return int(bool(figures["faults"]) or (options.strict and missed))


if __name__ == "__main__":
    sys.exit(main())
