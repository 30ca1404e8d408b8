"""What drafts bring and cost with several requests in flight, the controller choosing how many.

    PYTHONPATH=benchmarks python -m online.in_flight --quick --data FOLDER

Three engines in one process: plain decoding, the first drafts, and drafts that have learnt. Blocks
of requests with a trace's lengths go to each in turn, so many at a time. Seconds are the
processor's. Figures go to out/bench/online/in_flight.json, a table beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
import torch
from expert_cache import DRAFT, TARGET
from rich.console import Console
from transformers.utils import logging

from online.bench import Bench, Sizes
from online.figures import bootstrap
from online.fragments import command_of
from online.learning import Learning
from online.rows import HUB, Question, interleaved, label
from online.serving import Serving
from online.store import Store
from online.tables import interval, table
from online.traces import (
    FILES,
    GENERATED,
    Arrival,
    answer_tokens,
    generated,
    output_scale,
    pair_by_rank,
    read_trace,
    window,
)
from online.traffic_plan import ONLINE, OUTPUT_ROOM, PLAIN, VARIANTS
from online.world import Learner
from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.router.policy import GENERAL
from paceline.actors.training.deepspeed_setup import forbid_compiling, prepare_environment
from paceline.deploy.demo.prompts import TOPICS

_ROWS = 16
_TRACE = "azure conv"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        in_flight: requests at once.
        blocks: of requests, per number of them.
        least: requests of a block; ten times those in flight where that is more.
        lessons: requests of each topic that ``online`` has learnt from.
    """

    in_flight: tuple[int, ...] = (1, 2, 4, 8, _ROWS)
    blocks: int = 6
    least: int = 40
    lessons: int = 240

    def size(self, in_flight: int) -> int:
        """Requests of a block."""
        return max(self.least, 10 * in_flight)


QUICK = Plan((2, _ROWS), 3, 12, 48)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request: its prompt, and how long its answer may be."""

    question: Question
    max_tokens: int


@dataclass(slots=True)
class Driven:
    """What a block took: processor seconds, rounds that drafted, answers by request."""

    seconds: float
    rounds: int
    answers: dict[str, list[int]]

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.answers.values()))

    @property
    def ms_per_token(self) -> float:
        """Of the processor."""
        return 1e3 * self.seconds / self.tokens


def block_of(pool: Sequence[Question], arrivals: Sequence[Arrival], scale: float) -> list[Wanted]:
    """As many requests as arrivals, in their order: prompts by rank of length, answers as long.

    Args:
        pool: as many prompts.
        arrivals: of the trace.
        scale: of answers, see :func:`online.traces.output_scale`.
    """
    lengths = [len(question.token_ids) for question in pool]
    paired = pair_by_rank([arrival.input_tokens for arrival in arrivals], lengths)
    tokens = answer_tokens(arrivals, scale, OUTPUT_ROOM)
    return [Wanted(pool[at], most) for at, most in zip(paired, tokens, strict=True)]


def drive(engine: Engine, wanted: Sequence[Wanted], in_flight: int, plain: bool) -> Driven:
    """Answer a block greedily, so many requests at a time.

    Args:
        engine: idle.
        wanted: the block.
        in_flight: requests at once.
        plain: nobody drafts; else the expert of a prompt's topic does.

    Raises:
        RuntimeError: where a draft failed.
    """
    waiting = deque(wanted)
    done = Driven(0.0, 0, {one.question.key: [] for one in wanted})
    began = time.process_time()
    while waiting or engine.has_work:
        while waiting and engine.num_running + engine.num_waiting < in_flight:
            one = waiting.popleft()
            draft = "off" if plain else one.question.topic
            sampling = SamplingParams(one.max_tokens, temperature=0.0)
            name, prompt = one.question.key, one.question.token_ids
            engine.add(
                GenerationRequest(name, prompt, sampling, topic=one.question.topic, draft=draft)
            )
        for output in engine.step():
            done.answers[output.request_id] += output.chunk.token_ids
            if output.chunk.speculative is not None:
                done.rounds += output.chunk.speculative.num_spec_steps
    done.seconds = time.process_time() - began
    if engine.draft_failures:
        raise RuntimeError(f"drafts failed in {engine.draft_failures} rounds")
    return done


def make_engine(threads: int) -> Engine:
    """With a draft per topic, as a server starts it; the controller chooses."""
    settings = TargetSettings(
        str(TARGET),
        drafts=dict.fromkeys((*TOPICS, GENERAL), str(DRAFT)),
        num_threads=threads,
        max_num_seqs=_ROWS,
        prefix_cache=False,  # a prompt comes back for every variant
        seed=1,
        warm_up=True,
    )
    return build_engine(settings)[0]


def teach(bench: Bench, engine: Engine, lessons: int) -> dict[str, Any]:
    """Have every topic's expert learn from so many requests, as a stream's does.

    Returns:
        What :meth:`online.world.Learner.facts` says, without the decisions.
    """
    with tempfile.TemporaryDirectory() as folder:
        learner = Learner(Path(folder), TOPICS, Learning(), engine.updates.put)
        for served in zip(*(bench.frozen(topic, lessons) for topic in TOPICS), strict=True):
            for one in served:
                learner.take(one.record)
        while engine.has_work:  # every version is still to be loaded, and in nobody's time
            engine.step()
        return {name: fact for name, fact in learner.facts().items() if name != "decisions"}


def measure(
    engines: Mapping[str, Engine], blocks: Sequence[Sequence[Wanted]], in_flight: int
) -> dict[str, Any]:
    """The blocks by every variant, whose order moves on from one to the next."""
    driven: dict[str, list[Driven]] = {variant: [] for variant in engines}
    names = list(engines)
    for number, block in enumerate(blocks):
        turn = number % len(names)
        for variant in names[turn:] + names[:turn]:
            driven[variant].append(
                drive(engines[variant], block, in_flight, plain=variant == PLAIN)
            )
    return {variant: _row(runs, driven[PLAIN]) for variant, runs in driven.items()}


def _row(runs: Sequence[Driven], plain: Sequence[Driven]) -> dict[str, Any]:
    """A variant's figures; ``speed`` is against plain decoding of the same blocks."""
    ratios = [p.ms_per_token / r.ms_per_token for r, p in zip(runs, plain, strict=True)]
    tokens = sum(run.tokens for run in runs)
    return {
        "ms_per_token": 1e3 * sum(run.seconds for run in runs) / tokens,
        "speed": asdict(bootstrap(lambda sample: float(sample.mean()), ratios)),
        "ratios": ratios,
        "rounds_per_100_tokens": 100 * sum(run.rounds for run in runs) / tokens,
        "differ": sum(
            answer != p.answers[key]
            for run, p in zip(runs, plain, strict=True)
            for key, answer in run.answers.items()
        ),
        "compared": sum(len(run.answers) for run in runs),
    }


def section(figures: Mapping[str, Any], command: str) -> str:
    """The table, and how it was made."""
    plan, facts, taught = figures["plan"], figures["machine"], figures["taught"]
    lines = [
        [
            in_flight,
            variant,
            f"{row['ms_per_token']:.2f}",
            interval(row["speed"], 2),
            f"{row['rounds_per_100_tokens']:.0f}",
            f"{row['differ']} of {row['compared']}",
        ]
        for in_flight, rows in figures["in_flight"].items()
        for variant, row in rows.items()
    ]
    heading = ("in flight", "drafts", "processor ms a token", "speed against plain (95 %)")
    heading += ("drafting rounds per 100 tokens", "answers that differ")
    return (
        f"Command: `{command}`\n\nEngines alone, no HTTP: greedy, prompts of the four topics, "
        f"lengths of {figures['trace']}, {plan['blocks']} blocks of {plan['least']} requests, or "
        "of ten times those in flight, every block by all three in turn; the interval is over "
        f"blocks. Learning drafts have had {plan['lessons']} requests of each topic "
        f"({taught['seconds']:.0f} s of training, {taught['published']} versions). "
        f"{facts['cpu']}, {figures['threads']} "
        f"thread(s).\n\n{table(heading, lines)}\n"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer requests and numbers of them")
    parser.add_argument("--data", help="folder of rows, or hf; default: generated prompts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=Path("out/bench"), help="results go to online/ in it"
    )
    return parser.parse_args(argv)


def blocks_of(
    pool: Sequence[Question], arrivals: Sequence[Arrival], plan: Plan
) -> dict[int, list[list[Wanted]]]:
    """Blocks by number of requests in flight; no prompt comes in two of a number's blocks.

    Raises:
        ValueError: where there are too few prompts.
    """
    scale, found = output_scale(arrivals, OUTPUT_ROOM), {}
    for in_flight in plan.in_flight:
        size = plan.size(in_flight)
        if plan.blocks * size > len(pool):
            raise ValueError(f"{plan.blocks} blocks of {size} requests from {len(pool)} prompts")
        found[in_flight] = [
            block_of(pool[n * size : (n + 1) * size], window(arrivals, size, n), scale)
            for n in range(plan.blocks)
        ]
    return found


def trace_of(data: str | None) -> tuple[str, list[Arrival]]:
    """The conversations of a folder; without one made-up ones."""
    if data in (None, HUB):
        return GENERATED, generated(10_000, seed=0)
    return _TRACE, read_trace(Path(str(data)) / "traces" / FILES[_TRACE])


def run(options: argparse.Namespace, plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Teach, then measure."""
    sizes = Sizes(stream=plan.lessons)
    store = Store(options.out / "online")
    bench = Bench(store, options.data, sizes, Serving(), threads=options.threads, say=say)
    pool = interleaved([bench.questions(topic).train[plan.lessons :] for topic in TOPICS])
    name, arrivals = trace_of(options.data)
    blocks = blocks_of(pool, arrivals, plan)
    engines = {variant: make_engine(options.threads) for variant in VARIANTS}
    taught = teach(bench, engines[ONLINE], plan.lessons)
    gc.freeze()
    measured = {}
    for in_flight, parts in blocks.items():
        say(f"{in_flight} in flight")
        measured[str(in_flight)] = measure(engines, parts, in_flight)
    return {
        "machine": machine.facts(),
        "plan": asdict(plan),
        "threads": options.threads,
        "source": label(options.data),
        "trace": name,
        "taught": taught,
        "in_flight": measured,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 1 where an answer differed."""
    options, console = parse(argv), Console()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    prepare_environment()
    forbid_compiling()
    figures = run(options, QUICK if options.quick else Plan(), console.print)
    path = options.out / "online" / "in_flight.json"
    path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    text = section(figures, command_of("bench-in-flight", argv))
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print(text, markup=False, soft_wrap=True)
    rows = [row for parts in figures["in_flight"].values() for row in parts.values()]
    return int(any(row["differ"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
