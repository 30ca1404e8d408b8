"""What learning in idle time costs the clients, and how much of the idle time it uses.

    make bench-idle ARGS="--requests 200"

The embedded models over real HTTP under open-loop traffic with gaps (Poisson arrivals). Blocks with
trainers on and off (a pause of the trainer scheduler) take turns, a pair with the same requests,
so that each request's times are compared with its own. Idle are gaps of over 200 ms in which no
request is under way; what the trainer computes in them is read from the kernel's count of its CPU
time, every 5 ms, and so is how long it goes on after the arrival that ends a gap. The scheduler's
figures stand beside that. Exit status 1 where a request failed or was altered, a topic is not warm,
a draft failed or the trainer died: then the figures say nothing. Figures: out/bench/idle.json;
docs/performance.md says what they mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import ray
from clients import until
from idle_figures import OFF, ON, Target, compared, idleness, targets
from idle_gaps import CpuClock
from idle_load import Block, plan, run
from rich.console import Console
from rich.table import Table

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import TOPICS

_OUT = Path("out") / "bench" / "idle.json"
_ANSWER_S = 30.0
_SETTLE_S = 1.0
_RESTS = 0.1  # of a core
_WARM_UP_REQUESTS = 40


def asked(actor: Any, method: str) -> Any:
    """An actor's answer."""
    return ray.get(getattr(actor, method).remote(), timeout=_ANSWER_S)


async def warmed_up(running: RunningApp, options: argparse.Namespace) -> list[str]:
    """Traffic until each topic was decided on, for so many requests at least; those topics.

    A topic's first round loads its engine for good: that is not what idle time is used for later.
    And drafts that have learnt nothing yet learn so fast that the later block of a pair would be
    served with better ones.
    """
    decided: set[str] = set()
    deadline, turn = time.monotonic() + options.warm_up_s, 0
    while time.monotonic() < deadline and (
        decided < set(TOPICS) or turn * _WARM_UP_REQUESTS < options.warm_up_requests
    ):
        turn += 1
        planned = plan(_WARM_UP_REQUESTS, options.rate, options.max_tokens, -turn)
        await run(running.base_url, planned, -1, ON)
        history = ray.get(running.registry.history.remote(None), timeout=_ANSWER_S)
        decided |= {entry["topic"] for entry in history if entry["topic"] in TOPICS}
    return sorted(decided)


async def switched(running: RunningApp, clock: CpuClock, side: str) -> None:
    """Trainers on, or off and at rest."""
    asked(running.scheduler, "resume" if side == ON else "pause")
    if side == OFF:
        await until(lambda: clock.lately() < _RESTS, "the trainer's rest")
    await asyncio.sleep(_SETTLE_S)


async def measure(
    running: RunningApp, clock: CpuClock, options: argparse.Namespace, say: Callable[[str], None]
) -> tuple[list[Block], list[dict[str, Any]]]:
    """All blocks, and the scheduler's figures before and after each one with trainers."""
    blocks, boards = [], []
    for pair in range(options.pairs):
        seed = options.seed + pair
        planned = plan(options.requests, options.rate, options.max_tokens, seed, options.draft)
        for side in (ON, OFF) if pair % 2 == 0 else (OFF, ON):
            await switched(running, clock, side)
            before = asked(running.scheduler, "snapshot")
            blocks.append(await run(running.base_url, planned, pair, side))
            if side == ON:
                boards.append({"before": before, "after": asked(running.scheduler, "snapshot")})
            say(f"pair {pair + 1} of {options.pairs}, trainers {side}: {blocks[-1].span}")
    asked(running.scheduler, "resume")
    return blocks, boards


def board_figures(boards: list[dict[str, Any]]) -> dict[str, Any]:
    """What the scheduler counted while trainers were on; empty if it counts no idle time."""
    counted = [b for b in boards if isinstance(b["after"].get("idle_s"), dict)]
    if not counted:
        return {}
    idle_s = {
        use: sum(b["after"]["idle_s"][use] - b["before"]["idle_s"].get(use, 0.0) for b in counted)
        for use in counted[0]["after"]["idle_s"]
    }
    total = sum(idle_s.values())
    ended = {
        how: sum(
            b["after"]["leases_ended"][how] - b["before"]["leases_ended"][how] for b in counted
        )
        for how in counted[0]["after"]["leases_ended"]
    }
    return {
        "idle_s": idle_s,
        "used_share": idle_s.get("used", 0.0) / total if total else None,
        "leases_ended": ended,
    }


def faults_of(
    blocks: list[Block], status: dict[str, Any], pid: int, decided: list[str]
) -> list[str]:
    """Why the figures say nothing, in words; empty where they do."""
    errors = [o.error for block in blocks for o in block.outcomes if o.error is not None]
    faults = [f"{len(errors)} requests failed, the first: {errors[0]}"] if errors else []
    if (count := altered(blocks)) > 0:
        faults.append(f"{count} answers differ between the sides of their pair")
    if lacking := sorted(set(TOPICS) - set(decided)):
        faults.append(f"not warm: nothing was decided on {', '.join(lacking)}")
    if failures := status["target"].get("draft_failures"):
        faults.append(f"drafts failed in {failures} rounds")
    if status["trainer"]["pid"] != pid:
        faults.append("the trainer died")
    return faults


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Start the server, run all blocks, and reckon."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)  # noqa: T201

    with tempfile.TemporaryDirectory() as state_dir:
        overrides = {
            "port": options.port,
            "state_dir": state_dir,
            "target.prefix_cache": False,  # each prompt comes twice, and must cost the same
            "training.max_occupancy": options.max_occupancy,
            "ray.dashboard": False,
        }
        with app.start(load_config(None, overrides)) as running:
            decided = asyncio.run(warmed_up(running, options))
            say(f"warm: {', '.join(decided) or 'no topic'} decided on")
            pid = asked(running.trainer, "status")["pid"]
            clock = CpuClock(pid)
            blocks, boards = asyncio.run(measure(running, clock, options, say))
            series = clock.stop()
            status = {
                "trainer": asked(running.trainer, "status"),
                "target": _target(running.base_url),
            }
    figures: dict[str, Any] = {
        "machine": machine.facts(),
        "settings": vars(options) | {"decided_before": decided},
        "tpot": compared(blocks, lambda o: o.tpot_s),
        "ttft": compared(blocks, lambda o: o.ttft_s),
        "lag_ms_max": 1e3 * max(o.lag_s for block in blocks for o in block.outcomes),
        "altered": altered(blocks),
        "acceptance_length": [[b.pair, b.side, acceptance_length(b)] for b in blocks],
        "idle": idleness(blocks, series),
        "board": board_figures(boards),
        "trainer": status["trainer"],
        "faults": faults_of(blocks, status, pid, decided),
    }
    return figures | {"targets": [asdict(target) for target in targets(figures)]}


def _target(url: str) -> dict[str, Any]:
    import httpx

    found: dict[str, Any] = httpx.get(f"{url}/v1/paceline/status", timeout=30).json()["target"]
    return found


def altered(blocks: list[Block]) -> int:
    """Answers that differ between the sides of a pair; all are greedy or seeded."""
    answers: dict[tuple[int, int], set[str]] = {}
    for block in blocks:
        for index, outcome in enumerate(block.outcomes):
            if outcome.error is None:
                answers.setdefault((block.pair, index), set()).add(outcome.answer)
    return sum(len(found) > 1 for found in answers.values())


def acceptance_length(block: Block) -> float | None:
    """Tokens per speculative round: blocks whose drafts differ much compare badly."""
    rounds = sum(o.rounds for o in block.outcomes)
    return 1.0 + sum(o.accepted for o in block.outcomes) / rounds if rounds else None


def table_of(figures: dict[str, Any]) -> Table:
    """Times of both sides with their intervals."""
    table = Table(title=f"Trainers on against off, {figures['tpot']['requests']} paired requests")
    for heading in ("", "on", "off", "on / off", "on - off, ms"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, words in (("tpot", "time per output token"), ("ttft", "time to first token")):
        for q in ("p50", "p99"):
            cells = figures[name].get(q)
            if cells:
                shown = [_interval(cells[key]) for key in (ON, OFF, "ratio", "difference")]
                table.add_row(f"{words}, {q}, ms", *shown)
    return table


def targets_of(figures: dict[str, Any]) -> Table:
    """What is to be reached."""
    table = Table(title="To reach")
    for heading in ("", "measured", "bound", ""):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in (Target(**facts) for facts in figures["targets"]):
        word = {True: "met", False: "[red]missed", None: "not measured"}[row.met]
        table.add_row(row.name, "" if row.value is None else f"{row.value:.3f}", row.bound, word)
    return table


def _interval(facts: dict[str, float | None]) -> str:
    value, low, high = facts["value"], facts["low"], facts["high"]
    if value is None or low is None or high is None:
        return "" if value is None else f"{value:.3g}"
    return f"{value:.3g} ({low:.3g} to {high:.3g})"


def main() -> int:
    """Measure, write and show."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000, help="per block")
    parser.add_argument("--pairs", type=int, default=2, help="of blocks, on and off")
    parser.add_argument("--rate", type=float, default=1.5, help="arrivals per second")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--warm-up-s", type=float, default=900.0, help="at most")
    parser.add_argument("--warm-up-requests", type=int, default=400, help="at least")
    parser.add_argument(
        "--draft", default="auto", help="off: plain decoding, whose speed no learning changes"
    )
    parser.add_argument("--max-occupancy", type=float, default=0.0, help="training.max_occupancy")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument("--strict", action="store_true", help="1 also where a target is missed")
    options = parser.parse_args()
    figures = measured(options)
    _OUT.parent.mkdir(parents=True, exist_ok=True)
    _OUT.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    console = Console()
    console.print(table_of(figures))
    console.print(targets_of(figures))
    # lists in these would be taken for markup
    console.print(f"Tokens per round: {figures['acceptance_length']}", markup=False)
    console.print(f"Idle: {figures['idle']}", markup=False)
    console.print(f"The scheduler's own: {figures['board'] or 'it counts nothing of the kind'}")
    console.print("\n".join(figures["faults"]) if figures["faults"] else "No request failed.")
    missed = any(target["met"] is False for target in figures["targets"])
    return int(bool(figures["faults"]) or (options.strict and missed))


if __name__ == "__main__":
    sys.exit(main())
