"""Real request traces, replayed open-loop over HTTP: plain, frozen and online serving compared.

    make bench-traffic ARGS="--quick"
    make bench-traffic ARGS="--data ../shared/data"

A block is a window of a trace at one load; every variant serves it in turn, from a fresh start:

    plain    no drafts, no router, no training
    frozen   the initial drafts behind the router, no training
    online   the same drafts, that learn from this very traffic on the same cores

``online`` starts each block from what it had learnt at the end of the one before, the first from
what it learnt in a lesson of the same traffic at a light load: a server has quiet hours before its
busy ones, and one that never has is never taught. The load is a fraction of the requests a second
that ``plain`` answers when it always has 16 at hand. Arrivals are the trace's on a stretched time
axis; a request's prompt is real text whose rank by length among the block's is the rank of the
trace's prompt; an answer ends where the target ends it, or at the trace's length, scaled so that
the 99th percentile is a quarter of the target's context. Answers are greedy, and must be the same
from every variant but for bfloat16's last bits.

Blocks lie in out/bench/online/traffic, one JSON each; what is there is not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from online.fragments import command_of, published_section, take_published
from online.store import Store
from online.traces import FILES
from online.traffic_plan import FULL, ONLINE, QUICK, Plan, turns
from online.traffic_report import report
from online.traffic_runs import Traffic


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short window, two loads")
    parser.add_argument("--data", help="folder of rows and traces; default: generated ones")
    parser.add_argument("--traces", nargs="+", choices=list(FILES), default=None)
    parser.add_argument("--seconds", type=float, help="of a block's arrivals; 180, with --quick 40")
    parser.add_argument("--repeats", type=int, help="windows of each trace; 3, with --quick 1")
    parser.add_argument("--lesson", type=float, help="seconds; 600, with --quick none")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="results go to online/ in it"
    )
    take_published(parser, "traffic", "blocks with every request's times")
    options = parser.parse_args(argv)
    options.traces = options.traces or (["azure conv"] if options.quick else list(FILES))
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """How much is run."""
    plan = QUICK if options.quick else FULL
    seconds = plan.seconds if options.seconds is None else options.seconds
    repeats = plan.repeats if options.repeats is None else options.repeats
    lesson_s = plan.lesson_s if options.lesson is None else options.lesson
    return replace(plan, seconds=seconds, repeats=repeats, lesson_s=lesson_s)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; write table and plot from all that is there."""
    options = parse(argv)
    if (kept := published_section("traffic", options.published)) is not None:
        print(f"{kept} is there: nothing is run", file=sys.stderr)  # noqa: T201
        return 0
    store = Store(options.out / "online" / "traffic")
    traffic = Traffic(options, plan_of(options), store)
    state = traffic.lesson()
    for number, block in enumerate(traffic.blocks()):
        order = turns(block, list(traffic.traces), traffic.plan.loads)
        for turn, variant in enumerate(order):
            after = traffic.run(number, block, turn, variant, state)
            state = after if variant == ONLINE else state
    capacities = {trace: traffic.capacity(trace) for trace in traffic.traces}
    command = command_of("bench-traffic", argv)
    taught = traffic.taught
    return report(
        traffic.units, capacities, traffic.common, options.out / "online", command, taught
    )


if __name__ == "__main__":
    sys.exit(main())
