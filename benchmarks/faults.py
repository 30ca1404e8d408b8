"""What clients see when a part of a running application dies or hangs.

    make bench-faults ARGS="--quick"

One fault at a time, under load over real HTTP, on two target replicas: how many requests were
sent, broken (their connection ended; the client sent them again), lost, altered (another answer
than undisturbed), the longest wait for the next event of a stream, and the time until the part
was back. Figures go to out/bench/faults.json; docs/failures.md says what they mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import machine
import processes
from clients import Reply, ask, bodies, until
from ray import serve
from rich.console import Console
from rich.table import Table

from paceline.deploy import app
from paceline.deploy.config import PacelineConfig, load_config

_OUT = Path("out") / "bench" / "faults.json"
_BACK_S = 300.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a process of every role: ``kill`` (SIGKILL) or ``stop`` (SIGSTOP)."""

    roles: tuple[str, ...]
    how: str = "kill"

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.how} {' + '.join(self.roles)}" if self.roles else "none"


FAULTS = (
    Fault(("target",)),
    Fault(("target",), "stop"),
    Fault(("router",)),
    Fault(("router",), "stop"),
    Fault(("expert",)),
    Fault(("expert",), "stop"),
    Fault(("trainer",)),
    Fault(("registry",)),
    Fault(("shard",)),
    Fault(("board",)),
    Fault(("controller",)),
    Fault(("registry", "shard")),
    Fault(("router", "trainer")),
    Fault(("target", "router")),
    Fault(("target", "controller")),
    Fault(("ingress",)),
    Fault(("proxy",)),
)
QUICK = tuple(Fault((role,)) for role in ("target", "router", "registry", "controller", "ingress"))


@dataclass(frozen=True, slots=True)
class Figures:
    """What one fault did; seconds are wall time, None where it was not seen."""

    fault: str
    sent: int
    broken: int
    lost: int
    altered: int
    longest_pause_s: float
    back_after_s: float | None


class Client:
    """Sends requests, some at a time, and sends again those whose connection breaks."""

    def __init__(self, url: str, requests: list[dict[str, Any]], at_once: int) -> None:
        """Prepare to send ``requests`` to the server at ``url``."""
        self.seen: list[Reply] = []
        self.broken = 0
        self._url = url
        self._requests = requests
        self._gate = asyncio.Semaphore(at_once)

    @property
    def begun(self) -> int:
        """Attempts of which something has come."""
        return sum(reply.begun for reply in self.seen)

    async def run(self) -> list[Reply]:
        """The answers, in order; one with an error where none came in time."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=_BACK_S, limits=limits) as http:
            return await asyncio.gather(*(self._one(http, body) for body in self._requests))

    async def _one(self, http: httpx.AsyncClient, body: dict[str, Any]) -> Reply:
        async with self._gate:
            deadline = time.monotonic() + _BACK_S
            while True:
                reply = Reply()
                self.seen.append(reply)
                await ask(http, body, reply)
                if reply.error is None or time.monotonic() > deadline:
                    return reply
                self.broken += 1
                await asyncio.sleep(0.2)


def is_back(role: str, victim: int, before: int, url: str) -> bool:
    """Whether a role has as many processes as before, without the victim, and they serve."""
    now = [process.pid for process in processes.of(role)]
    if victim in now or len(now) < before:
        return False
    try:
        if role in ("target", "router", "ingress"):
            facts = serve.status().applications[app.APPLICATION].deployments[role]
            return dict(facts.replica_states) == {"RUNNING": before}
        status = httpx.get(f"{url}/v1/paceline/status", timeout=5).json()
    except Exception:  # not back: whatever it says
        return False
    learners = {"registry": "weight_versions", "trainer": "trainer", "board": "board"}
    parts = [status[learners[role]]] if role in learners else list(status["shards"].values())
    return not any("error" in part for part in parts)


async def measure(url: str, fault: Fault, requests: list[dict[str, Any]], at_once: int) -> Any:
    """Run the requests with the fault in their midst; answers, client and seconds until back."""
    client = Client(url, requests, at_once)
    before = {role: len(processes.of(role)) for role in fault.roles}
    answers = asyncio.create_task(client.run())
    await until(lambda: client.begun >= at_once // 2, "the first tokens", _BACK_S)
    victims = {role: processes.of(role)[0] for role in fault.roles}
    for victim in victims.values():
        victim.kill() if fault.how == "kill" else victim.suspend()
    began = time.monotonic()

    def back() -> bool:
        return all(is_back(r, victims[r].pid, before[r], url) for r in fault.roles)

    try:
        await until(back, f"{fault.name}: the parts to be back", _BACK_S)
        back_after: float | None = time.monotonic() - began
    except TimeoutError:
        back_after = None
    for victim in victims.values():
        if victim.is_running() and fault.how == "stop":
            victim.resume()
    return await answers, client, back_after


def figures_of(
    fault: Fault, found: list[Reply], client: Client, back_s: float | None, expected: list[Reply]
) -> Figures:
    """Compare with the undisturbed answers."""
    answered = [(f, e) for f, e in zip(found, expected, strict=True) if f.error is None]
    pauses = [pause for reply in client.seen for pause in reply.pauses_s]
    return Figures(
        fault=fault.name,
        sent=len(found),
        broken=client.broken,
        lost=len(found) - len(answered),
        altered=sum(f.answer != e.answer for f, e in answered),
        longest_pause_s=round(max(pauses), 2),
        back_after_s=None if back_s is None else round(back_s, 1),
    )


def table_of(rows: list[Figures], title: str) -> Table:
    """For the terminal."""
    table = Table(title=title, title_justify="left")
    headings = ("fault", "sent", "broken", "lost", "altered", "longest pause s", "back after s")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "fault" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    return table


async def run(url: str, faults: tuple[Fault, ...], count: int, tokens: int) -> list[Figures]:
    """All faults in turn; each begins when the parts of the one before are back."""
    at_once = min(count, 32)
    requests = bodies(count, tokens)
    quiet = Client(url, requests, at_once)
    expected = await quiet.run()
    rows = [figures_of(Fault(()), expected, quiet, None, expected)]
    for fault in faults:
        if not all(map(processes.of, fault.roles)):  # experts are processes only in a pool
            continue
        found, client, back_s = await measure(url, fault, requests, at_once)
        rows.append(figures_of(fault, found, client, back_s, expected))
        print(rows[-1], file=sys.stderr, flush=True)  # noqa: T201
    return rows


def config_of(options: argparse.Namespace, state_dir: str) -> PacelineConfig:
    """Two target replicas of one thread each."""
    return load_config(
        None,
        {
            "port": options.port,
            "state_dir": state_dir,
            "target.dtype": options.dtype,
            "target.num_threads": 1,
            "target.num_replicas": 2,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )


def main() -> int:
    """Run the faults; exit status 1 where a request was lost or altered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="five faults, short answers")
    parser.add_argument("--dtype", default="float32", help="of the target")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("--requests", type=int, default=None, help="per fault")
    options = parser.parse_args()
    count = options.requests or (24 if options.quick else 64)
    faults, tokens = (QUICK, 48) if options.quick else (FAULTS, 96)
    with (
        tempfile.TemporaryDirectory() as state_dir,
        app.start(config_of(options, state_dir)) as running,
    ):
        rows = asyncio.run(run(running.base_url, faults, count, tokens))
    figures = {
        "machine": machine.facts(),
        "settings": {"dtype": options.dtype, "requests": count, "max_tokens": tokens},
        "faults": [asdict(row) for row in rows],
    }
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    Console().print(table_of(rows, f"{count} requests per fault, {options.dtype}"))
    return int(any(row.lost or row.altered for row in rows))


if __name__ == "__main__":
    sys.exit(main())
