"""Cost of learning in idle time for the clients, and the share of idle time that it uses.

    make bench-idle ARGS="--pairs 4"

A server under open-loop traffic with gaps (Poisson arrivals). Blocks with trainers on and off (the
trainer scheduler paused) take turns, a pair with the same requests; intervals are over pairs. Idle
are gaps of over 200 ms without a request in flight; the trainer's use of them, and how long it
continues after the arrival that ends a gap, are read from its CPU clock every 5 ms. Exit status 1
if a request failed or changed, a topic is not warm, a draft failed or the trainer died.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import ray
from clients import Outcome, Planned, chat, replay, until
from harness import arguments, interval, machine, say, show, t_interval, write, written
from serving import application, status

from paceline.deploy.app import RunningApp
from paceline.deploy.demo.prompts import MAKERS, TOPICS

ON, OFF = "on", "off"
Span = tuple[float, float]  # seconds of time.monotonic

_TIMEOUT_S, _DRAIN_S, _SETTLE_S = 30.0, 120.0, 1.0
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


class CpuClock(threading.Thread):
    """Reads a process' CPU clock every few milliseconds, from the start on.

    A reading is one system call of some microseconds, for a process of any number of threads.
    """

    def __init__(self, pid: int, every_s: float = 0.005) -> None:
        super().__init__(daemon=True)
        self._readings: list[tuple[float, float]] = []
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
        self._every_s, self._ended = every_s, threading.Event()
        self.start()

    def run(self) -> None:
        """Read until the end of the process or the clock."""
        with contextlib.suppress(OSError):
            while not self._ended.wait(self._every_s):
                self._readings.append((time.monotonic(), time.clock_gettime(self._clock)))

    def lately(self) -> float:
        """CPU seconds per second over the last readings."""
        first, last = self._readings[-_LATELY:][0], self._readings[-1]
        return (last[1] - first[1]) / max(last[0] - first[0], 1e-9)

    def stop(self) -> CpuSeries:
        """End the thread; return the readings."""
        self._ended.set()
        self.join()
        return CpuSeries(*zip(*self._readings, strict=True))


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


def plan(count: int, rate: float, max_tokens: int, seed: int) -> list[Planned]:
    """Chat requests over all topics, every other one sampled with a seed, the others greedy."""
    rng, planned, due_s = random.Random(seed), [], 0.0
    for index in range(count):
        topic = TOPICS[rng.randrange(len(TOPICS))]
        sampling = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        body = chat(MAKERS[topic](rng), max_tokens, stream=True, **sampling)
        planned.append(Planned(due_s, topic, 0, body))
        due_s += rng.expovariate(rate)
    return planned


async def run(url: str, planned: Sequence[Planned], pair: int, side: str) -> pd.DataFrame:
    """Send every request when it is due; return a row per request when all have ended."""
    began, outcomes = await replay(url, planned, _DRAIN_S)
    return block_of(outcomes, pair, side, began)


def block_of(outcomes: Sequence[Outcome], pair: int, side: str, began: float) -> pd.DataFrame:
    """Requests under one setting, in the order of arrival, from their sending to the last event."""
    frame = pd.DataFrame([asdict(outcome) for outcome in outcomes])
    sent, ended = began + frame.due_s + frame.lag_s, began + frame.due_s + frame.e2e_s
    return frame.assign(pair=pair, side=side, sent=sent, ended=ended)


def compared(requests: pd.DataFrame, figure: str) -> dict[str, Any]:
    """Percentiles in milliseconds of every request that both sides of its pair answered.

    ``on``, ``off``, their ``ratio`` and ``difference``: means over pairs of blocks, with intervals.
    Requests of a block share the machine's pace, and are no units of their own.
    """
    whole = requests[requests.error.isna()].set_index(["pair", "side"], append=True)[figure]
    sides = whole.unstack("side").reindex(columns=[ON, OFF]).astype(float).dropna()
    found: dict[str, Any] = {"requests": len(sides)}
    for q in (50, 99) if len(sides) else ():
        pairs = _MS * sides.groupby(level="pair").quantile(q / 100.0)
        on, off = pairs[ON], pairs[OFF]
        figures = {ON: on, OFF: off, "ratio": on / off, "difference": on - off}
        found[f"p{q}"] = {name: asdict(t_interval(own)) for name, own in figures.items()}
    return found


def changed(requests: pd.DataFrame) -> int:
    """Answers that differ between the sides of a pair; all are greedy or seeded."""
    whole = requests[requests.error.isna()]
    return int((whole.groupby([whole.index, "pair"]).answer.nunique() > 1).sum())


def idleness(requests: pd.DataFrame, series: CpuSeries) -> dict[str, Any]:
    """Idle seconds of the blocks with trainers, and the trainer's use of them."""
    blocks = [own for _, own in requests[requests.side == ON].groupby("pair")]
    whole = [(float(own.sent.min()), float(own.ended.max())) for own in blocks]
    spans = [list(zip(own.sent, own.ended, strict=True)) for own in blocks]
    idle, quiet = ([gap for own in spans for gap in gaps(own, s)] for s in (_IDLE_S, 0.0))
    idle_s, serving_s = length(idle), length(whole) - length(quiet)
    stopped = [_MS * seconds for seconds in yields(series, idle)]
    return {
        "seconds": length(whole),
        "idle_s": idle_s,
        "gaps": len(idle),
        "used_share": series.spent(idle) / idle_s if idle_s else None,
        "yields": len(stopped),
        "yield_p99_ms": float(np.percentile(stopped, 99)) if stopped else None,
        "yield_max_ms": max(stopped, default=None),
        "trained_while_serving_share": (series.spent(whole) - series.spent(quiet)) / serving_s,
    }


def length(spans: Sequence[Span]) -> float:
    """Of all spans together."""
    return sum(end - begin for begin, end in spans)


def goals(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per figure with its bound; ``met`` is None of what could not be measured."""

    def of(name: str, q: str, kind: str) -> float | None:
        found = figures[name].get(q)
        return None if found is None else found[kind]["value"]

    idle = figures["idle"]
    rows = [
        ("time per output token, p50, on / off", of("tpot", "p50", "ratio"), 1.05),
        ("time per output token, p99, on / off", of("tpot", "p99", "ratio"), 1.15),
        ("time to first token, p99, on - off, ms", of("ttft", "p99", "difference"), 20.0),
        ("share of idle time not used", idle["used_share"] and 1.0 - idle["used_share"], 0.2),
        ("yield, p99, ms", idle["yield_p99_ms"], 50.0),
    ]
    return [
        {"figure": name, "value": value, "at most": bound}
        | {"met": None if value is None else value <= bound}
        for name, value, bound in rows
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
        decided |= decided_topics(history)
    return sorted(decided)


def decided_topics(history: Iterable[Mapping[str, Any]]) -> set[str]:
    """Topics that the gate has decided on; the registry notes drift without any round."""
    gated = {entry["topic"] for entry in history if entry["outcome"] in ("published", "rejected")}
    return gated & set(TOPICS)


async def measure(
    running: RunningApp, clock: CpuClock, options: argparse.Namespace
) -> pd.DataFrame:
    """Run all blocks."""
    blocks = []
    for pair in range(options.pairs):
        seed = options.seed + pair
        planned = plan(options.requests, options.rate, options.max_tokens, seed)
        for side in (ON, OFF) if pair % 2 == 0 else (OFF, ON):
            call(running.scheduler, "resume" if side == ON else "pause")
            if side == OFF:
                await until(lambda: clock.lately() < _AT_REST, "the trainer's rest")
            await asyncio.sleep(_SETTLE_S)
            blocks.append(await run(running.base_url, planned, pair, side))
            say(f"pair {pair + 1} of {options.pairs}, trainers {side}")
    call(running.scheduler, "resume")
    return pd.concat(blocks)


def faults_of(
    requests: pd.DataFrame, failures: int, decided: Sequence[str], *, lives: bool
) -> list[str]:
    """Reasons why the figures say nothing; empty if there is none."""
    errors = list(requests.error.dropna())
    faults = [f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else []
    if (count := changed(requests)) > 0:
        faults.append(f"{count} answers differ between the sides of their pair")
    if lacking := sorted(set(TOPICS) - set(decided)):
        faults.append(f"not warm: nothing was decided on {', '.join(lacking)}")
    if failures:
        faults.append(f"drafts failed in {failures} rounds")
    if not lives:
        faults.append("the trainer died")
    return faults


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, run all blocks, and compute the figures."""
    keys = {
        "target.prefix_cache": False,  # each prompt comes twice, and must cost the same
        "training.max_occupancy": options.max_occupancy,
    }
    with application(options.target, options.port, keys) as running:
        decided = asyncio.run(warmed_up(running, options))
        say(f"warm: {', '.join(decided) or 'no topic'} decided on")
        pid = call(running.trainer, "status").pid
        clock = CpuClock(pid)
        requests = asyncio.run(measure(running, clock, options))
        series, trainer = clock.stop(), call(running.trainer, "status")
        failures = status(running.base_url)["target"].get("draft_failures", 0)
    figures: dict[str, Any] = {
        "machine": machine(),
        "settings": written(options) | {"decided_before": decided},
        "tpot": compared(requests, "tpot_s"),
        "ttft": compared(requests, "ttft_s"),
        "lag_ms_max": _MS * float(requests.lag_s.max()),
        "idle": idleness(requests, series),
        "trainer": asdict(trainer),
        "faults": faults_of(requests, failures, decided, lives=trainer.pid == pid),
    }
    return figures | {"goals": goals(figures)}


def main() -> int:
    """Measure, write and show."""
    parser = arguments(__doc__, "target", "out")
    parser.add_argument("--requests", type=int, default=200, help="per block")
    parser.add_argument("--pairs", type=int, default=10, help="of blocks, on and off")
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals per second")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--warm-up-s", type=float, default=900.0, help="at most")
    parser.add_argument("--warm-up-requests", type=int, default=400, help="at least")
    parser.add_argument("--max-occupancy", type=float, default=0.0, help="training.max_occupancy")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--port", type=int, default=8019)
    options = parser.parse_args()
    figures = measured(options)
    write(options.out / "idle.json", figures)
    rows = [
        {"": f"{words}, {q}, ms"}
        | {key: interval(found) for key, found in figures[name][q].items()}
        for name, words in (("tpot", "time per output token"), ("ttft", "time to first token"))
        for q in ("p50", "p99")
        if q in figures[name]
    ]
    show(f"Trainers on against off, {figures['tpot']['requests']} paired requests", rows)
    show("Goals", figures["goals"])
    say(f"Idle: {figures['idle']}")
    say("\n".join(figures["faults"]) if figures["faults"] else "No request failed.")
    return int(bool(figures["faults"]))


if __name__ == "__main__":
    sys.exit(main())
