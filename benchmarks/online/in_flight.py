"""Gain and cost of drafts with several requests in flight, the controller choosing k.

    make bench-in-flight ARGS="--quick --data FOLDER"

Three engines in one process: plain decoding, the initial drafts, and trained drafts. Blocks of
requests with a trace's lengths go to each in turn. Seconds are the processor's.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decoding import MIXED, Block, Cell, Served, run_cell, summary
from harness import Store, arguments, interval, machine, say, show, write
from prompts import Prompt

from online.bench import Bench, Sizes, prepare
from online.learner import Learner, Learning
from online.rows import HUB, Question, interleaved, label
from online.serving import Serving
from online.traces import (
    FILES,
    GENERATED,
    OUTPUT_TOKENS,
    Arrival,
    answer_tokens,
    generated,
    output_scale,
    pair_by_rank,
    read_trace,
    window,
)
from online.traffic import FROZEN, ONLINE, PLAIN, VARIANTS
from paceline.actors.engine.engine import Engine
from paceline.actors.router.policy import GENERAL
from paceline.deploy.demo.prompts import TOPICS

_ROWS = 16
_TRACE = "azure conv"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        in_flight: requests at once.
        blocks: of requests, per number of them.
        least: requests of a block; ten times those in flight if that is more.
        lessons: requests of each topic that ``online`` is trained on.
    """

    in_flight: tuple[int, ...] = (1, 2, 4, 8, _ROWS)
    blocks: int = 6
    least: int = 40
    lessons: int = 240


QUICK = Plan((2, _ROWS), 3, 12, 48)


def blocks_of(
    pool: Sequence[Question], arrivals: Sequence[Arrival], plan: Plan
) -> dict[int, list[Block]]:
    """Blocks by number of requests in flight; no prompt comes in two of a number's blocks.

    Prompts are paired with requests by rank of length; answers have the trace's scaled lengths.

    Raises:
        ValueError: there are too few prompts.
    """
    scale, found = output_scale(arrivals, OUTPUT_TOKENS), {}
    for in_flight in plan.in_flight:
        size = max(plan.least, 10 * in_flight)
        if plan.blocks * size > len(pool):
            raise ValueError(f"{plan.blocks} blocks of {size} requests from {len(pool)} prompts")
        found[in_flight] = []
        for number in range(plan.blocks):
            own, part = range(number * size, (number + 1) * size), window(arrivals, size, number)
            lengths = [len(pool[i].token_ids) for i in own]
            paired = pair_by_rank([arrival.input_tokens for arrival in part], lengths)
            tokens = answer_tokens(part, scale, OUTPUT_TOKENS)
            prompts = tuple(
                Prompt(own[at], pool[own[at]].topic, pool[own[at]].token_ids, most)
                for at, most in zip(paired, tokens, strict=True)
            )
            found[in_flight].append(Block(number + 1, MIXED, prompts))
    return found


def train(bench: Bench, engine: Engine, lessons: int) -> dict[str, Any]:
    """Train every topic's expert on so many requests and load it; cost of training."""
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Path(folder), TOPICS, Learning(), engine.updates.put)
        for answers in zip(*(bench.frozen(topic, lessons) for topic in TOPICS), strict=True):
            for answer in answers:
                learner.add(answer.record)
        while engine.has_work:  # versions that are still to be loaded
            engine.step()
        return {name: fact for name, fact in learner.facts().items() if name != "decisions"}


def measure(engines: dict[str, Engine], blocks: Sequence[Block], in_flight: int) -> dict[str, Any]:
    """Figures of the blocks by every variant, their order turning from block to block.

    Raises:
        RuntimeError: a draft failed.
    """
    variants = [
        Served(
            name,
            engine,
            None,
            (lambda _: "off") if name == PLAIN else (lambda prompt: prompt.topic),
            time.process_time,
        )
        for name, engine in engines.items()
    ]
    cell = Cell(in_flight, 0.0, mixed=True)
    outcome = run_cell(cell, variants, blocks, OUTPUT_TOKENS)
    if failures := sum(engine.draft_failures for engine in engines.values()):
        raise RuntimeError(f"drafts failed in {failures} rounds")
    return summary(cell, outcome, [(FROZEN, PLAIN), (ONLINE, PLAIN)], PLAIN)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, measure and write; 1 if an answer differed."""
    parser = arguments(__doc__, "quick", "data", "threads", "out")
    options = parser.parse_args(argv)
    prepare(options.threads)
    plan, out = QUICK if options.quick else Plan(), options.out / "online"
    sizes = Sizes(stream=plan.lessons)
    bench = Bench(Store(out), options.data, sizes, Serving(), threads=options.threads)
    pool = interleaved([bench.questions(topic).train[plan.lessons :] for topic in TOPICS])
    trace, arrivals = GENERATED, generated(10_000, seed=0)
    if options.data not in (None, HUB):
        trace, arrivals = _TRACE, read_trace(Path(options.data) / "traces" / FILES[_TRACE])
    blocks = blocks_of(pool, arrivals, plan)
    settings: dict[str, Any] = {"num_speculative_tokens": None, "prefix_cache": False}
    settings |= {"seed": 1, "warm_up": True}
    engines = {name: bench.engine((*TOPICS, GENERAL), rows=_ROWS, **settings) for name in VARIANTS}
    trained = train(bench, engines[ONLINE], plan.lessons)
    gc.freeze()
    measured = {str(n): measure(engines, parts, n) for n, parts in blocks.items()}
    figures = {
        "machine": machine(),
        "plan": asdict(plan),
        "threads": options.threads,
        "source": label(options.data),
        "trace": trace,
        "trained": trained,
        "in_flight": measured,
    }
    write(out / "in_flight.json", figures)
    names = ("tokens_per_s", "mean_acceptance_length", "answers_that_differ")
    rows = [
        {"in flight": number, "drafts": name, **{key: facts[key] for key in names}}
        | {"speed over plain": interval(cell["ratios"].get(f"{name} / {PLAIN}", {}))}
        for number, cell in measured.items()
        for name, facts in cell["variants"].items()
    ]
    show(f"Engines alone, tokens per processor second, lengths of {trace}", rows)
    differ = sum(row["answers_that_differ"] for row in rows)
    say(f"training: {trained}; answers that differ: {differ}")
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
