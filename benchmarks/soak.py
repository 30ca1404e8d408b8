"""Mixed traffic for half an hour: does anything grow?

    make soak ARGS="--minutes 30"

Streams and whole answers, chats and completions, greedy, seeded and sampled, clients that go away,
bad requests, and drafts that train on it and are swapped. Every minute: memory (RSS and PSS), open
files and sockets of every process, how many there are and their PSS together, requests that run or
wait in the engine, blocks of keys and values that they hold, bytes in Ray's object store. A series
that rises over the last two thirds by more than its tolerance grows. Exit status 1 where one does,
a request fails, a process has been restarted, or a block is held when no request is left. Figures:
out/bench/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import machine
from growth import Tolerance, Verdict, judge
from mixed import Mixed
from readings import Reading, blocks_held, read
from rich.console import Console
from rich.table import Table

from paceline.deploy import app
from paceline.deploy.config.config import load_config

_OUT = Path("out") / "bench" / "soak.json"
_MIB = 2.0**20
_TAUGHT_IN_S = 900.0
# What may rise over the judged time, per series: a share of its level, or so much.
TOLERANCES = {
    "rss": Tolerance(0.05, 24 * _MIB),
    "pss": Tolerance(0.05, 24 * _MIB),
    "files": Tolerance(0.05, 6),
    "sockets": Tolerance(0.05, 4),
    "threads": Tolerance(0.05, 4),
    "processes": Tolerance(0.05, 2),
    "object_store": Tolerance(0.05, 16 * _MIB),
}


def series_of(readings: list[Reading]) -> dict[str, list[float]]:
    """One series per process and measure, named ``role/pid measure``; those there all the time."""
    names = set.intersection(*(set(reading.values()) for reading in readings))
    every = [reading.values() for reading in readings]
    return {name: [values[name] for values in every] for name in sorted(names)}


def verdicts_of(readings: list[Reading]) -> dict[str, Verdict]:
    """Every series judged."""
    times = [reading.at for reading in readings]
    return {
        name: judge(times, values, TOLERANCES[name.rsplit(" ", 1)[-1]])
        for name, values in series_of(readings).items()
    }


def faults_of(readings: list[Reading], verdicts: dict[str, Verdict], mixed: Mixed) -> list[str]:
    """Why the soak failed, in words; empty where it did not."""
    faults = [f"{name} grows" for name, verdict in verdicts.items() if verdict.grows]
    first, last = ({p.name for p in r.processes if p.ours} for r in (readings[0], readings[-1]))
    faults += [f"{name} is gone or was restarted" for name in sorted(first - last)]
    end = readings[-1]
    if end.running or end.waiting:
        faults.append(f"{end.running} requests run and {end.waiting} wait after the end")
    if end.blocks_held:
        faults.append(f"{end.blocks_held} blocks of keys and values are held after the end")
    faults += [f"{count} x {what}" for what, count in mixed.failures.items()]
    return faults


async def drained(url: str) -> None:
    """Return when the engine has nothing to do; after a while anyhow, the reading shows it."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for _ in range(300):
            target = (await http.get("/v1/paceline/status")).json()["target"]
            busy = target.get("running", 1) or target.get("waiting", 1)
            if not busy and not blocks_held(target):
                return
            await asyncio.sleep(0.1)


async def all_taught(url: str, seconds: float) -> None:
    """Return when every draft has been trained once, or after so long.

    A topic's first round loads its engine for good: before that a trainer grows as it should.
    """
    deadline = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while time.monotonic() < deadline:
            status = (await http.get("/v1/paceline/status")).json()
            versions = status.get("weight_versions", {"": 0})
            if all(isinstance(v, int) and v > 0 for v in versions.values()):
                return
            await asyncio.sleep(5.0)


async def soak(url: str, minutes: float, every_s: float, warm_up_s: float) -> tuple[Any, Any]:
    """Traffic all the time; readings once all is warm, the last one after the traffic."""
    mixed = Mixed(url)
    traffic = asyncio.create_task(mixed.run())
    try:
        await asyncio.sleep(warm_up_s)
        await all_taught(url, _TAUGHT_IN_S)
        began = time.monotonic()
        readings = [await read(url, 0.0)]
        while (at := time.monotonic() - began) < minutes * 60.0:
            await asyncio.sleep(min(every_s, minutes * 60.0 - at + 0.01))
            readings.append(await read(url, time.monotonic() - began))
            print(_line(readings[-1], mixed), file=sys.stderr, flush=True)  # noqa: T201
            if traffic.done():
                break
    finally:
        await mixed.stop()
        await traffic
    await drained(url)
    readings.append(await read(url, time.monotonic() - began))
    return readings, mixed


def _line(reading: Reading, mixed: Mixed) -> str:
    return (
        f"{reading.at:6.0f} s: {mixed.sent.total()} requests, {mixed.failures.total()} failures, "
        f"PSS {reading.pss / _MIB:.0f} MiB, object store {reading.object_store / _MIB:.0f} MiB, "
        f"versions {reading.versions}"
    )


def table_of(verdicts: dict[str, Verdict]) -> Table:
    """Every series of our own processes, memory in MiB."""
    table = Table(title="From the first reading after warm-up to the last", title_justify="left")
    for heading in ("series", "first", "last", "rise", "allowed", ""):
        table.add_column(heading, justify="left" if heading == "series" else "right")
    for name, verdict in verdicts.items():
        measure = name.rsplit(" ", 1)[-1]
        unit = _MIB if measure in ("rss", "pss", "object_store") else 1.0
        figures = (verdict.first, verdict.last, verdict.rise, verdict.allowed)
        cells = [f"{figure / unit:.1f}" for figure in figures]
        table.add_row(name, *cells, "[red]grows" if verdict.grows else "")
    return table


def main() -> int:
    """Run the soak and say what grows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="between two readings")
    parser.add_argument("--warm-up-s", type=float, default=120.0, help="before the first")
    parser.add_argument("--port", type=int, default=8018)
    options = parser.parse_args()
    every_s = min(options.every_s, options.minutes * 60.0 / 9.0)
    with tempfile.TemporaryDirectory() as state_dir:
        overrides = {"port": options.port, "state_dir": state_dir, "ray.dashboard": False}
        with app.start(load_config(None, overrides)) as running:
            readings, mixed = asyncio.run(
                soak(running.base_url, options.minutes, every_s, options.warm_up_s)
            )
    verdicts = verdicts_of(readings)
    faults = faults_of(readings, verdicts, mixed)
    _write(options.minutes, readings, mixed, faults)
    console = Console()
    console.print(table_of(verdicts))
    console.print(f"Requests: {dict(mixed.sent)}; weight versions: {readings[-1].versions}")
    console.print("\n".join(faults) if faults else "Nothing grows.")
    return int(bool(faults))


def _write(minutes: float, readings: list[Reading], mixed: Mixed, faults: list[str]) -> None:
    figures = {
        "machine": machine.facts(),
        "minutes": minutes,
        "requests": Counter(mixed.sent),
        "readings": [reading.facts() for reading in readings],
        "faults": faults,
    }
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
