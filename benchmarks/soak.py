"""Mixed traffic for half an hour: does anything grow?

    make soak ARGS="--minutes 30"

Streams and whole answers, chats and completions, greedy, seeded and sampled, disconnecting clients,
bad requests, and drafts that train on it and are swapped. Every minute: memory (RSS and PSS), open
files and sockets of every process, their number and PSS together, running and waiting requests,
their KV blocks, bytes in Ray's object store. A series that rises over the last two thirds by more
than its tolerance grows. Exit status 1 if one does, a request fails, a process was restarted, a
block is held when no request is left, or nothing was sent or swapped.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import processes
import psutil
from clients import CHAT, Reply, ask, chat
from harness import arguments, machine, say, show, write, written
from scipy import stats
from serving import application, status

from paceline.deploy.demo.prompts import TOPICS, endless

_MIB = 2.0**20
_TRAINED_IN_S = 900.0
_CLIENTS = 3
# Kinds of requests, by frequency.
_KINDS = {"stream": 5, "whole": 3, "completions": 1, "disconnects": 1, "bad": 1}
_SHIFT_EVERY = 150  # requests of a client before it turns to other topics
_BAD: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"model": "paceline"}),
    (CHAT, {"model": "paceline", "messages": [{"role": "user", "content": "x"}], "mood": 1}),
    (CHAT, {"model": "unknown", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"model": "paceline", "prompt": [10**8]}),
    ("/v1/nothing", {}),
)
# Rise that is allowed over the judged time, per measure: the larger of a share and an amount.
TOLERANCES = {
    "rss": (0.05, 24 * _MIB),
    "pss": (0.05, 24 * _MIB),
    "files": (0.05, 6),
    "sockets": (0.05, 4),
    "threads": (0.05, 4),
    "processes": (0.05, 2),
    "object_store": (0.05, 16 * _MIB),
}


class Mixed:
    """A few clients, each sending one request after another with short rests between.

    The rests let drafts train. ``sent`` counts by kind, ``failures`` by error.
    """

    def __init__(self, url: str, seed: int = 5) -> None:
        self.sent: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._url, self._seed, self._stopped = url, seed, asyncio.Event()

    def stop(self) -> None:
        """End after the requests in flight."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            for number in range(_CLIENTS):
                group.create_task(self._client(random.Random(self._seed + number), number))

    async def _client(self, rng: random.Random, number: int) -> None:
        prompts = {topic: endless(topic, self._seed + number) for topic in TOPICS}
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            for count in itertools.count():
                if self._stopped.is_set():
                    return
                topic = TOPICS[(count // _SHIFT_EVERY + rng.randrange(2)) % len(TOPICS)]
                (kind,) = rng.choices(list(_KINDS), list(_KINDS.values()))
                self.sent[kind] += 1
                try:
                    await self._send(http, kind, next(prompts[topic]), rng)
                except Exception as error:  # whatever it is: half an hour must end in a report
                    self.failures[f"{kind}: {type(error).__name__}: {error}"[:200]] += 1
                await asyncio.sleep(rng.expovariate(2.0))

    async def _send(
        self, http: httpx.AsyncClient, kind: str, prompt: str, rng: random.Random
    ) -> None:
        """Send a request of a kind; raise if its answer is not as it must be."""
        how = rng.choice(("greedy", "seeded", "sampled"))
        sampling: dict[str, Any] = {"temperature": 0.0 if how == "greedy" else 0.9}
        if how == "seeded":
            sampling["seed"] = rng.randrange(2**31)
        body = chat(prompt, rng.choice((8, 32, 64)), store=rng.random() < 0.9, **sampling)
        if kind in ("stream", "whole"):
            reply = await ask(http, body | {"stream": kind == "stream"}, Reply())
            if reply.error is not None:
                raise ValueError(reply.error)
        elif kind == "completions":
            del body["messages"]
            prompts = {"prompt": [prompt, prompt[:20]]}
            answer = (await http.post("/v1/completions", json=body | prompts)).raise_for_status()
            if len(answer.json()["choices"]) != 2:
                raise ValueError("not as many choices as prompts")
        elif kind == "disconnects":
            await _disconnect(http, body, rng.randrange(1, 12))
        else:
            path, bad = rng.choice(_BAD)
            answer = await http.post(path, json=bad)
            if answer.status_code not in (400, 404):
                raise ValueError(f"HTTP {answer.status_code} to a bad request")


async def _disconnect(http: httpx.AsyncClient, body: dict[str, Any], lines: int) -> None:
    """Disconnect in the midst of a stream."""
    body = body | {"stream": True, "max_tokens": 400, "ignore_eos": True}
    async with http.stream("POST", CHAT, json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            lines -= 1
            if not lines:
                return
    raise ValueError("the stream ended before its client disconnected")


@dataclass(frozen=True, slots=True)
class Reading:
    """Resources of the application at ``at`` seconds.

    Attributes:
        series: every figure that must not grow by its name, ``role/pid measure`` of processes;
            sums show new processes that come and stay.
        running: requests.
        waiting: requests.
        blocks_held: KV blocks of requests, without those that the prefix cache only remembers.
        versions: sum of all weight versions.
    """

    at: float
    series: Mapping[str, float]
    running: int
    waiting: int
    blocks_held: int
    versions: int = 0

    @property
    def processes(self) -> set[str]:
        """``role/pid`` of every process."""
        return {name.removesuffix(" pss") for name in self.series if name.endswith(" pss")} - {
            "all"
        }


def series_of(usages: Mapping[str, Mapping[str, int]], object_store: int) -> dict[str, float]:
    """Figures by name, from those of every process."""
    found = {
        f"{name} {measure}": float(v) for name, own in usages.items() for measure, v in own.items()
    }
    return found | {
        "Ray's object_store": float(object_store),
        "all processes": float(len(usages)),
        "all pss": float(sum(own["pss"] for own in usages.values())),
    }


async def read(url: str, at: float) -> Reading:
    """Read the application at ``url``, whose processes are below this one."""
    facts = await asyncio.to_thread(status, url)
    target, versions = facts["target"], facts.get("weight_versions", {})
    ours = await asyncio.to_thread(lambda: list(processes.ours()))
    usages = {f"{role}/{p.pid}": found for role, p in ours if (found := usage_of(p)) is not None}
    return Reading(
        at,
        series_of(usages, await asyncio.to_thread(object_store_bytes)),
        running=target.get("running", -1),
        waiting=target.get("waiting", -1),
        blocks_held=blocks_held(target),
        versions=sum(count for count in versions.values() if isinstance(count, int)),
    )


def blocks_held(target: dict[str, Any]) -> int:
    """KV blocks of requests, from a target's status; -1 if it reports none."""
    if "kv_blocks_total" not in target:
        return -1
    return int(target["kv_blocks_total"] - target["kv_blocks_available"])


def usage_of(process: psutil.Process) -> dict[str, int] | None:
    """Bytes resident and proportional, open files, sockets, threads; None if it has ended."""
    try:
        memory = process.memory_full_info()
        files = list(Path(f"/proc/{process.pid}/fd").iterdir())
        sockets = sum("socket:" in os.path.realpath(file) for file in files)
        sizes = {"files": len(files), "sockets": sockets, "threads": process.num_threads()}
        return {"rss": memory.rss, "pss": memory.pss} | sizes
    except (psutil.Error, OSError):
        return None


def object_store_bytes() -> int:
    """Bytes in use in the object store of this node; Ray has no public call for it."""
    import ray
    from ray._private.internal_api import node_stats

    node = next(node for node in ray.nodes() if node["Alive"])
    reply = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"])
    return int(reply.store_stats.object_store_bytes_used)


@dataclass(frozen=True, slots=True)
class Growth:
    """Fitted rise of a series over the judged time, and the rise that is allowed."""

    first: float
    last: float
    rise: float
    allowed: float

    @property
    def grows(self) -> bool:
        """Whether it rises by more than is allowed."""
        return self.rise > self.allowed


def growth_of(
    times: Sequence[float], values: Sequence[float], tolerance: tuple[float, float]
) -> Growth:
    """Rise over the last two thirds of a series, by the median of all pairwise slopes.

    The first third is warm-up. The median (Theil and Sen) is not moved by single peaks, nor by a
    saw-tooth that does not climb.

    Raises:
        ValueError: fewer than three measurements.
    """
    if len(times) < 3 or len(times) != len(values):
        raise ValueError("a series needs three measurements, and a time for each")
    start, (share, amount) = len(times) // 3, tolerance
    slope = float(stats.theilslopes(values[start:], times[start:]).slope)
    allowed = max(share * float(np.median(values[start:])), amount)
    return Growth(values[0], values[-1], slope * (times[-1] - times[start]), allowed)


def growths_of(readings: Sequence[Reading]) -> dict[str, Growth]:
    """Growth of every series that all readings have."""
    frame = pd.DataFrame([dict(r.series) for r in readings], index=[r.at for r in readings])
    return {
        name: growth_of(list(own.index), list(own), TOLERANCES[name.rsplit(" ", 1)[-1]])
        for name, own in frame.dropna(axis=1).sort_index(axis=1).items()
    }


def faults_of(
    readings: Sequence[Reading],
    growths: Mapping[str, Growth],
    sent: Mapping[str, int],
    failures: Mapping[str, int],
) -> list[str]:
    """Reasons why the soak failed or says nothing; empty if there is none."""
    faults = [f"{name} grows" for name, growth in growths.items() if growth.grows]
    end = readings[-1]
    if end.versions <= readings[0].versions:
        faults.append("no draft was swapped: the version of none rose")
    if not any(sent.values()):
        faults.append("no request was sent")
    gone = sorted(readings[0].processes - end.processes)
    # Ray's own workers come and go.
    ours = [name for name in gone if name.split("/")[0] in processes.TITLES]
    faults += [f"{name} is gone or was restarted" for name in ours]
    if end.running or end.waiting:
        faults.append(f"{end.running} requests run and {end.waiting} wait after the end")
    if end.blocks_held:
        faults.append(f"{end.blocks_held} KV blocks are held after the end")
    return faults + [f"{count} x {what}" for what, count in failures.items()]


async def _poll(url: str, seconds: float, every_s: float, done: Callable[[Any], bool]) -> None:
    """Return when the status is ``done``, or after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not done(await asyncio.to_thread(status, url)):
        await asyncio.sleep(every_s)


def _is_trained(facts: dict[str, Any]) -> bool:
    """Whether every draft was trained once: a topic's first round loads its engine for good."""
    versions = facts.get("weight_versions", {"": 0})
    return all(isinstance(v, int) and v > 0 for v in versions.values())


def _is_drained(facts: dict[str, Any]) -> bool:
    target = facts["target"]
    return not (target.get("running", 1) or target.get("waiting", 1) or blocks_held(target))


async def soak(
    url: str, minutes: float, every_s: float, warm_up_s: float
) -> tuple[list[Reading], Mixed]:
    """Traffic all the time; readings after warm-up, the last one after the traffic."""
    mixed = Mixed(url)
    traffic = asyncio.create_task(mixed.run())
    try:
        await asyncio.sleep(warm_up_s)
        await _poll(url, _TRAINED_IN_S, 5.0, _is_trained)
        began = time.monotonic()
        readings = [await read(url, 0.0)]
        while (at := time.monotonic() - began) < minutes * 60.0 and not traffic.done():
            await asyncio.sleep(min(every_s, minutes * 60.0 - at + 0.01))
            last = await read(url, time.monotonic() - began)
            readings.append(last)
            say(
                f"{last.at:6.0f} s: {mixed.sent.total()} requests, {mixed.failures.total()} "
                f"failures, PSS {last.series['all pss'] / _MIB:.0f} MiB, versions {last.versions}"
            )
    finally:
        mixed.stop()
        await traffic
    await _poll(url, 30.0, 0.1, _is_drained)
    readings.append(await read(url, time.monotonic() - began))
    return readings, mixed


def main() -> int:
    """Run the soak; 1 if it failed."""
    parser = arguments(__doc__, "target", "out")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every-s", type=float, default=60.0, help="between two readings")
    parser.add_argument("--warm-up-s", type=float, default=120.0, help="before the first")
    parser.add_argument("--port", type=int, default=8018)
    options = parser.parse_args()
    every_s = min(options.every_s, options.minutes * 60.0 / 9.0)
    with application(options.target, options.port, {}) as running:
        amount = options.minutes, every_s, options.warm_up_s
        readings, mixed = asyncio.run(soak(running.base_url, *amount))
    growths = growths_of(readings)
    faults = faults_of(readings, growths, mixed.sent, mixed.failures)
    figures = {
        "machine": machine(),
        "settings": written(options),
        "requests": mixed.sent,
        "readings": list(map(asdict, readings)),
        "faults": faults,
    }
    write(options.out / "soak.json", figures)
    rows = [{"series": name, **asdict(g), "grows": g.grows} for name, g in growths.items()]
    show("From the first reading after warm-up to the last, memory in bytes", rows)
    say("\n".join(faults) if faults else "Nothing grows.")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
