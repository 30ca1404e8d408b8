"""Effect on clients when a part of a running application dies or hangs.

    make bench-faults ARGS="--quick"

One fault at a time, under load over HTTP, on two target replicas: requests sent, broken (their
connection ended; the client sent them again), lost (answered with an HTTP status of 400 or more, an
error or half a stream), changed (another answer than undisturbed), the longest wait of a request
for its next event, and the time until the part was back. Experts are processes only in a pool:
theirs is a second pass. Exit status 1 if a request was lost or changed, a connection broke though
the ingress lived, or a part did not come back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import processes
import psutil
from clients import Load, Reply, bodies, until
from harness import arguments, machine, parsed, say, show, write, written
from models import SMALL
from ray import serve
from serving import application, status

from paceline.deploy import app

_BACK_S = 300.0
_FRONT_DOOR = "ingress"  # a connection ends with the process that holds it


@dataclass(frozen=True, slots=True)
class Fault:
    """Signal to a process of every role, or to each: ``kill`` (SIGKILL), ``stop`` (SIGSTOP)."""

    roles: tuple[str, ...]
    how: str = "kill"
    each: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        victims = f"{'every ' if self.each else ''}{' + '.join(self.roles)}"
        return f"{self.how} {victims}" if self.roles else "none"

    def victims(self) -> dict[str, list[psutil.Process]]:
        """Processes that it hits now, by role: the oldest one, or each."""
        found = {role: processes.of(role) for role in self.roles}
        return found if self.each else {role: every[:1] for role, every in found.items()}


def faults_of(*names: str) -> tuple[Fault, ...]:
    """Faults of these names, as :attr:`Fault.name` writes them."""
    found = []
    for name in names:
        how, _, victims = name.partition(" ")
        roles = tuple(victims.removeprefix("every ").split(" + "))
        found.append(Fault(roles, how, each=victims.startswith("every ")))
    return tuple(found)


FAULTS = faults_of(
    *("kill target", "stop target", "kill router", "stop router", "kill trainer"),
    *("kill registry", "kill shard", "kill scheduler", "kill controller", "kill ingress"),
    *("kill registry + shard", "kill router + trainer", "kill target + router"),
    "kill target + controller",
)
POOL_FAULTS = faults_of("kill expert", "stop expert", "kill every expert", "kill expert + trainer")
QUICK = tuple(Fault((role,)) for role in ("target", "router", "registry", "controller", "ingress"))


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one fault; seconds are wall time, None if it did not come back."""

    fault: str
    sent: int
    broken: int
    lost: int
    changed: int
    longest_pause_s: float
    back_after_s: float | None


def is_back(role: str, victims: set[int], before: int, url: str) -> bool:
    """Whether a role has as many processes as before, without the victims, and they serve."""
    now = [process.pid for process in processes.of(role)]
    if victims & {*now} or len(now) < before:
        return False
    try:
        if role in ("target", "router", "ingress", "expert"):
            deployments = serve.status().applications[app.APPLICATION].deployments
            return all_run({n: d.replica_states for n, d in deployments.items()}, role, before)
        facts = status(url, timeout_s=5.0)
    except Exception:  # not back
        return False
    learners = {"registry": "weight_versions", "trainer": "trainer", "scheduler": "scheduler"}
    parts = [facts[learners[role]]] if role in learners else list(facts["shards"].values())
    return not any("error" in part for part in parts)


def all_run(states: Mapping[str, Mapping[Any, int]], role: str, count: int) -> bool:
    """Whether a role has so many replicas in all its deployments, all of which run.

    ``states`` is Serve deployment to replicas by state; every expert has a deployment of its own.
    """
    found: Counter[Any] = Counter()
    for name, replicas in states.items():
        if name == role or name.startswith(f"{role}-"):
            found.update(replicas)
    return dict(+found) == {"RUNNING": count}


async def measure(
    url: str, fault: Fault, requests: list[dict[str, Any]], at_once: int
) -> tuple[list[Reply], Load, float | None]:
    """Run the requests with the fault in their midst; answers, client and seconds until back."""
    load = Load(url, requests, at_once, retry_s=_BACK_S)
    before = {role: len(processes.of(role)) for role in fault.roles}
    answers = asyncio.create_task(load.run())
    await until(lambda: load.begun >= at_once // 2, "the first tokens", _BACK_S)
    victims = fault.victims()
    pids = {role: {victim.pid for victim in found} for role, found in victims.items()}
    every = [victim for found in victims.values() for victim in found]
    for victim in every:
        victim.kill() if fault.how == "kill" else victim.suspend()
    began = time.monotonic()

    def back() -> bool:
        return all(is_back(role, pids[role], before[role], url) for role in fault.roles)

    try:
        await until(back, f"{fault.name}: the parts to be back", _BACK_S)
        back_after: float | None = time.monotonic() - began
    except TimeoutError:
        back_after = None
    for victim in every:
        if victim.is_running() and fault.how == "stop":
            victim.resume()
    return await answers, load, back_after


def figures_of(
    fault: Fault, found: list[Reply], load: Load, back_s: float | None, quiet: list[Reply]
) -> Figures:
    """Compare with the undisturbed answers."""
    answered = [(f, e) for f, e in zip(found, quiet, strict=True) if f.error is None]
    return Figures(
        fault=fault.name,
        sent=len(found),
        broken=load.broken,
        lost=len(found) - len(answered),
        changed=sum(f.answer != e.answer for f, e in answered),
        longest_pause_s=round(load.longest_pause_s, 2),
        back_after_s=None if back_s is None else round(back_s, 1),
    )


def failures_of(fault: Fault, figures: Figures) -> list[str]:
    """Effects that the fault must not have; empty if there is none."""
    failures = [
        f"{figures.fault}: {count} {what}"
        for what, count in (("lost", figures.lost), ("changed", figures.changed))
        if count
    ]
    if figures.broken and _FRONT_DOOR not in fault.roles:
        failures.append(f"{figures.fault}: {figures.broken} broken, though the ingress lived")
    if fault.roles and figures.back_after_s is None:
        failures.append(f"{figures.fault}: not back in {_BACK_S:.0f} s")
    return failures


async def run(
    url: str, faults: Sequence[Fault], count: int, tokens: int
) -> tuple[list[Figures], list[str]]:
    """All faults in turn, each when the one before is over: figures and failures."""
    at_once = min(count, 32)
    requests = bodies(count, tokens)
    load = Load(url, requests, at_once, retry_s=_BACK_S)
    quiet = await load.run()
    rows = [figures_of(Fault(()), quiet, load, None, quiet)]
    failures = failures_of(Fault(()), rows[0])
    for fault in faults:
        if not all(map(processes.of, fault.roles)):
            failures.append(f"{fault.name}: skipped, there is no such process")
            say(failures[-1])
            continue
        found, load, back_s = await measure(url, fault, requests, at_once)
        rows.append(figures_of(fault, found, load, back_s, quiet))
        failures += failures_of(fault, rows[-1])
        say(rows[-1])
    return rows, failures


def keys_of(dtype: str, *, pool: bool) -> dict[str, Any]:
    """Two target replicas of one thread each; in a pool, two experts that draft in every round."""
    drafts = {
        "drafts.placement": "pool",
        "drafts.topics": ["sql"],
        "drafts.num_speculative_tokens": 4,
    }
    return {
        "target.dtype": dtype,
        "target.num_threads": 1,
        "target.num_replicas": 2,
        "router.placement": "deployment",  # a process that can be killed alone
        "ray.num_cpus": 2,
    } | (drafts if pool else {})


def passes_of(quick: bool) -> list[tuple[str, tuple[Fault, ...]]]:
    """(placement of the drafts, faults) of every pass; print those that a quick run skips."""
    if not quick:
        return [("colocated", FAULTS), ("pool", POOL_FAULTS)]
    left_out = [fault.name for fault in (*FAULTS, *POOL_FAULTS) if fault not in QUICK]
    say(f"skipped by --quick: {', '.join(left_out)}")
    return [("colocated", QUICK)]


def main() -> int:
    """Run the faults; 1 if there is a failure."""
    parser = arguments(__doc__, "quick", "dtype", "out", dtype="float32")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--requests", type=int, default=64, help="per fault")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    options = parsed(parser, None, requests=24, max_tokens=48)
    count, tokens = options.requests, options.max_tokens
    found: dict[str, list[Figures]] = {}
    failures: list[str] = []
    for placement, faults in passes_of(options.quick):
        keys = keys_of(options.dtype, pool=placement == "pool")
        with application(SMALL, options.port, keys) as running:
            found[placement], wrong = asyncio.run(run(running.base_url, faults, count, tokens))
        failures += wrong
    figures = {
        "machine": machine(),
        "settings": written(options),
        "faults": {placement: [asdict(row) for row in rows] for placement, rows in found.items()},
        "failures": failures,
    }
    write(options.out / "faults.json", figures)
    for placement, rows in found.items():
        show(f"{count} requests per fault, {options.dtype}, drafts {placement}", map(asdict, rows))
    say("\n".join(failures) if failures else "Nothing is lost, changed or left dead.")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
