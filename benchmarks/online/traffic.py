"""Request traces replayed open-loop over HTTP: plain, frozen and online serving compared.

    make bench-traffic ARGS="--data ../shared/data"

A block is a window of a trace at one load; every variant serves it in turn, from a fresh start:

    plain    no drafts, no router, no training
    frozen   the initial drafts behind the router, no training, no recorded answers
    suffix   the same, and suffix drafts from the answers of this very traffic
    online   the same, and the drafts learn from it, on the same cores

``online`` starts each block from its state at the end of the one before, the first from that after
a lesson of the same traffic at a light load. The load is a fraction of the requests per second of
``plain`` with 16 always in flight. Arrivals are the trace's on a stretched time axis; a request's
prompt is real text whose rank by length among the block's is the rank of the trace's prompt; an
answer ends where the target ends it, or at the trace's length, scaled. Answers are greedy, and must
be the same from every variant but for bfloat16's last bits. Blocks lie in out/bench/online/traffic.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pandas as pd
import processes
from clients import Load, Outcome, Planned, chat, replay, until
from models import config_of, find_models, model_hashes
from prompts import Prompt, interleaved, mark_of, source_of, training_prompts
from serving import application, status

from online import traces
from online.traces import Arrival
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.weights.history import read_all_decisions
from paceline.deploy.demo.prompts import TOPICS

PLAIN, FROZEN, SUFFIX, ONLINE = VARIANTS = ("plain", "frozen", "suffix", "online")
_STORING = (SUFFIX, ONLINE)
# Keys of the configuration of `paceline serve` that a variant changes.
KEYS: dict[str, dict[str, Any]] = {
    PLAIN: {"router.enabled": False, "training.enabled": False, "drafts.topics": []},
    FROZEN: {"training.enabled": False},
    SUFFIX: {"training.enabled": False},
    ONLINE: {"replay.persist": True},  # a block continues with the records of the one before
}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_DECISIONS = ("published", "promoted", "rolled_back")
_PAIRS = ((FROZEN, PLAIN), (SUFFIX, PLAIN), (ONLINE, PLAIN), (ONLINE, FROZEN))
LESSON, _LESSON_LOAD = -1, 0.1  # number of its repeat, fraction of the capacity
_PLAN = ("loads", "seconds", "repeats", "warm_up", "probe", "drain_s", "lesson")
_AT_ONCE = 16  # target.max_num_seqs
_TRAINER_START_S = 120.0
_SEED = 77
_POOL = 1500  # prompts of a topic at most
_PLACES = {"port", "state_dir"}  # of a config: they change no figure
Unit = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A window of a trace at a load, a fraction of the capacity, for so many seconds."""

    trace: str
    load: float
    repeat: int
    seconds: float


def turns(block: Block, traces: Sequence[str], loads: Sequence[float]) -> list[str]:
    """The variants in the order in which they run a block; a lesson is ``online``'s alone.

    Every variant has every place equally often over four repeats of any trace and load.
    """
    if block.repeat == LESSON:
        return [ONLINE]
    place = loads.index(block.load) + list(traces).index(block.trace) + block.repeat
    return harness.rotation(VARIANTS, place)


def body(text: str, max_tokens: int, variant: str) -> dict[str, Any]:
    """A greedy chat request; what learns from it stores its record."""
    own = {"speculative": {"draft": "off"}} if variant == PLAIN else {}
    return chat(text, max_tokens, temperature=0, stream=True, store=variant in _STORING, **own)


def planned(
    arrivals: Sequence[Arrival], tokens: Sequence[int], prompts: Sequence[Prompt], variant: str
) -> list[Planned]:
    """Requests of a block, from as many prompts: due times, prompts and lengths of answers."""
    lengths = [len(prompt.token_ids) for prompt in prompts]
    paired = traces.pair_by_rank([arrival.input_tokens for arrival in arrivals], lengths)
    requests = []
    for arrival, most, at in zip(arrivals, tokens, paired, strict=True):
        sent = body(prompts[at].text, most, variant)
        requests.append(Planned(arrival.at_s, prompts[at].topic, lengths[at], sent))
    return requests


def busy_rate(ended_s: Sequence[float], at_once: int) -> float:
    """Answers per second until the last request was sent and the load fades out.

    ``ended_s`` are seconds after the first request was sent, with ``at_once`` in flight.

    Raises:
        ValueError: all were sent at once.
    """
    count = len(ended_s) - at_once
    if count < 1:
        raise ValueError(f"{len(ended_s)} requests, {at_once} at once: no rate")
    return count / sorted(ended_s)[count - 1]


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of a block; latencies and speculation are of whole answers, None if there are none.

    ``tokens_per_s`` is per second of the block, which ends with its last answer; ``first`` is the
    share of rounds whose first token was accepted: it does not depend on k.
    """
    whole = pd.DataFrame([asdict(o) for o in outcomes if o.error is None], columns=_COLUMNS)
    seconds = float((whole.due_s + whole.e2e_s).max()) if len(whole) else 1.0
    sums = whole[["tokens", "rounds", "drafted", "accepted", "first_accepted"]].sum()
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(whole),
        "lasted_s": seconds,
        "tokens_per_s": float(sums.tokens) / seconds,
        "mean_acceptance_length": 1.0 + sums.accepted / sums.rounds if sums.rounds else None,
        "first": sums.first_accepted / sums.rounds if sums.rounds else None,
        "drafted": int(sums.drafted),
        "lag_s": float(max((o.lag_s for o in outcomes), default=0.0)),
    }
    for name in LATENCIES:
        known = whole[name].dropna().astype(float)
        for q in (50, 99):
            found[f"{name[:-2]}_p{q}_s"] = float(np.percentile(known, q)) if len(known) else None
    return found


_COLUMNS = list(Outcome.__slots__)
_FIGURES = [f"{name[:-2]}_p{q}_s" for name in LATENCIES for q in (50, 99)]


async def closed_loop(url: str, requests: Sequence[Planned]) -> list[float]:
    """End of every answer, seconds; as many are in flight as the target decodes at once."""
    began = time.monotonic()
    replies = await Load(url, [request.body for request in requests], _AT_ONCE).run()
    if failed := [reply.error for reply in replies if reply.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    return [reply.last_at - began for reply in replies if reply.last_at is not None]


def is_started(facts: Mapping[str, Any]) -> bool:
    """Whether the trainer of a status has loaded its models, or needs none yet."""
    trainer = facts.get("trainer") or {}
    return trainer.get("micro_steps", 0) > 0 or trainer.get("state") == "no new records"


def decisions_of(state_dir: Path) -> Counter[str]:
    """Number of decisions on weights by outcome."""
    return Counter(str(decision.get("outcome")) for decision in read_all_decisions(state_dir))


class Traffic:
    """Blocks of traffic over real applications, with all that they share.

    Raises:
        DataError: the folder lacks a topic's rows.
    """

    def __init__(self, options: argparse.Namespace, store: harness.Store) -> None:
        self.options, self.store = options, store
        self.traces: dict[str, list[Arrival]] = {traces.GENERATED: traces.generated(20_000, _SEED)}
        if options.data is not None and (Path(options.data) / "traces").is_dir():
            folder = Path(options.data) / "traces"
            self.traces = {
                name: traces.read_trace(folder / traces.FILES[name]) for name in options.traces
            }
        self.units: list[Unit] = []  # blocks that were run or found
        models = find_models(options.target)
        tokenizer = load_tokenizer(models[0])
        pools = [training_prompts(options.data, t, tokenizer, _POOL) for t in TOPICS]
        self.prompts = interleaved(pools)
        self.common = {
            "models": model_hashes(*models),
            "prompts": [source_of(options.data), mark_of(self.prompts)],
            "traces": list(self.traces),  # a block's prompts are those after the blocks before it
            "plan": {name: getattr(options, name) for name in _PLAN},
            "config": config_facts(options),
        }

    def blocks(self) -> list[Block]:
        """A lesson if one is wanted; then loads in turn within a repeat, so that none has the early
        ones alone."""
        own, first = self.options, next(iter(self.traces))
        lesson = [Block(first, _LESSON_LOAD, LESSON, own.lesson)] if own.lesson else []
        return lesson + [
            Block(trace, load, repeat, own.seconds)
            for repeat in range(own.repeats)
            for trace in self.traces
            for load in own.loads
        ]

    def capacity(self, trace: str) -> float:
        """Requests per second of a busy plain server."""
        settings = self.common | {"trace": trace}
        found = self.store.unit(f"capacity-{trace}", settings, lambda: self._probe(trace))
        return float(found["requests_per_s"])

    def _probe(self, trace: str) -> dict[str, Any]:
        arrivals = traces.window(self.traces[trace], self.options.probe)
        requests = self._planned(trace, arrivals, 0, PLAIN)
        with application(
            self.options.target, self.options.port, keys_of(self.options, PLAIN)
        ) as running:
            asyncio.run(closed_loop(running.base_url, requests[: self.options.warm_up]))
            ended_s = asyncio.run(closed_loop(running.base_url, requests))
        return {"requests_per_s": busy_rate(ended_s, _AT_ONCE), "machine": harness.machine()}

    def _planned(
        self, trace: str, arrivals: Sequence[Arrival], start: int, variant: str
    ) -> list[Planned]:
        """Requests of these arrivals, with the prompts from ``start`` on, modulo the pool."""
        tokens = traces.answer_tokens(arrivals, self.traces[trace], traces.OUTPUT_TOKENS)
        part = [self.prompts[(start + i) % len(self.prompts)] for i in range(len(arrivals))]
        return planned(arrivals, tokens, part, variant)

    def run(
        self, number: int, block: Block, turn: int, variant: str, before: Path | None
    ) -> Path | None:
        """Serve a block by one variant, unless its unit is there.

        Args:
            number: of the block; its prompts are those after the blocks before it.
            block: see Block.
            turn: number of variants that had the block before this one.
            variant: one of ``VARIANTS``.
            before: folder of the state that ``online`` starts from; None starts anew.

        Returns:
            The folder of ``online``'s state after it, None for the others.
        """
        start = sum(map(self._count, self.blocks()[:number]))
        settings = self.common | {
            "block": asdict(block),
            "variant": variant,
            "turn": turn,
            "requests_per_s": self._rate(block),
            "first_prompt": start,
            "begins_from": before.name if before is not None else None,
        }
        name = f"block-{block.trace}-{block.load:g}-{block.repeat}-{variant}"
        state = self.store.path(name, settings, ".state") if variant == ONLINE else None
        result = self.store.find(name, settings)
        if result is None:
            if state is not None:
                _copy(before, state)
            result = self.store.put(name, settings, self._serve(start, block, variant, state))
            harness.say(f"{name}: {result['requests']} requests, {result['failed']} failed")
            if again := result["prompts_repeated"]:
                harness.say(f"{again} PROMPTS NOT FOR THE FIRST TIME: the pool is too small")
            if state is not None and before is not None:
                shutil.rmtree(before)
        if block.repeat != LESSON:
            self.units.append({**asdict(block), "variant": variant, "turn": turn, **result})
        return state

    def _rate(self, block: Block) -> float:
        """Requests per second."""
        return block.load * self.capacity(block.trace)

    def _count(self, block: Block) -> int:
        """Requests of a block."""
        wanted = max(20, round(self._rate(block) * block.seconds))
        return min(wanted, len(self.traces[block.trace]))

    def _serve(self, start: int, block: Block, variant: str, state: Path | None) -> dict[str, Any]:
        """Serve a block's requests; ``state`` is the folder of a variant that keeps its state."""
        trace, count = self.traces[block.trace], self._count(block)
        arrivals = traces.at_rate(
            traces.window(trace, count, max(block.repeat, 0)), self._rate(block)
        )
        requests = self._planned(block.trace, arrivals, start, variant)
        before = Counter[str]() if state is None else decisions_of(state)
        own, keys = self.options, keys_of(self.options, variant)
        with application(own.target, own.port, keys, state) as running:
            url = running.base_url
            warm_up = [replace(p, body=p.body | {"store": False}) for p in requests]
            asyncio.run(closed_loop(url, warm_up[: own.warm_up]))
            if variant == ONLINE:
                wait = until(lambda: is_started(status(url)), "the trainer", _TRAINER_START_S)
                asyncio.run(wait)
            facts, used = harness.machine(), processes.seconds()
            _, outcomes = asyncio.run(replay(url, requests, own.drain_s))
            used_s, last = processes.since(used), status(url)
        after = Counter[str]() if state is None else decisions_of(state)
        return summary(outcomes) | {
            "prompts_repeated": min(count, max(0, start + count - len(self.prompts))),
            "decisions": dict(after - before),
            "draft_failures": last["target"].get("draft_failures") or 0,
            "cpu_s": sum(used_s.values()),
            "trainer_cpu_s": used_s.get("trainer", 0.0),
            "machine": facts,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }


def keys_of(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Keys of a variant's configuration."""
    # no prompt is to be cheaper for having come before
    return {"target.dtype": options.dtype, "target.prefix_cache": False} | KEYS[variant]


def config_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Every variant's config without its places, for keys."""
    return {
        variant: config_of(options.target, keys_of(options, variant)).model_dump(
            mode="json", exclude=_PLACES
        )
        for variant in VARIANTS
    }


def _copy(before: Path | None, state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)  # a killed block's
    if before is None:
        state.mkdir(parents=True)
    elif not before.is_dir():
        raise FileNotFoundError(f"{before}: the state is gone; remove all of online's blocks")
    else:
        shutil.copytree(before, state)


def rows_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row per trace, load and variant; repeats are averaged, latencies geometrically."""
    names = ("requests", "failed", "prompts_repeated")
    means = ("tokens_per_s", "mean_acceptance_length", "first", "cpu_s", "trainer_cpu_s")
    rows = []
    for (trace, load, variant), own in pd.DataFrame(units).groupby(["trace", "load", "variant"]):
        row: dict[str, Any] = {"trace": trace, "load": load, "variant": variant}
        for name in _FIGURES:
            known = own[name].dropna()
            row[name] = (
                harness.geometric_mean(list(known)) if len(known) and known.min() > 0 else None
            )
        for name in means:
            known = own[name].dropna().astype(float)
            row[name] = float(known.mean()) if len(known) else None
        row |= {name: int(own[name].sum()) for name in names}
        rows.append(row | {n: sum(d.get(n, 0) for d in own.decisions) for n in _DECISIONS})
    return sorted(rows, key=lambda row: (row["trace"], row["load"], VARIANTS.index(row["variant"])))


def speeds_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """How many times as fast as another variant one served the same requests, by load.

    Geometric means of the ratio of latencies: over the requests of a block, then over the blocks
    of a trace, then over traces. Intervals are over blocks, of which traces are fixed strata:
    requests of a block share the machine's pace at that time.
    """
    block = ["trace", "repeat"]
    frame = pd.DataFrame(
        [unit["load"], unit["variant"], unit["trace"], unit["repeat"], number]
        + [outcome[name] if outcome["error"] is None else None for name in LATENCIES]
        for unit in units
        for number, outcome in enumerate(unit["outcomes"])
    )
    frame.columns = pd.Index(["load", "variant", *block, "number", *LATENCIES])
    found = []
    for load, own in frame.groupby("load"):
        for figure in LATENCIES:
            by_request = own.pivot(index=[*block, "number"], columns="variant", values=figure)
            logs = np.log(by_request.astype(float).where(lambda seconds: seconds > 0.0))
            for variant, other in _PAIRS:
                row = {"load": load, "figure": figure, "variant": variant, "against": other}
                both = logs.reindex(columns=[variant, other]).dropna()
                if len(both):
                    means = np.exp(both.groupby(level=block).mean())
                    timings = [
                        harness.Timing(name, number, trace, 1, float(seconds))
                        for name in (variant, other)
                        for number, ((trace, _), seconds) in enumerate(means[name].items())
                    ]
                    row |= asdict(harness.paired_ratio(timings, variant, other))
                    row["requests"] = len(both)
                found.append(row)
    return found


def answers_that_differ(units: Sequence[Unit]) -> dict[str, dict[str, int]]:
    """Per variant: answers compared with plain's in the same block, and those that differ."""

    def answers_of(unit: Unit) -> list[str | None]:
        return [o["answer"] if o["error"] is None else None for o in unit["outcomes"]]

    def block_of(unit: Unit) -> tuple[Any, ...]:
        return unit["trace"], unit["load"], unit["repeat"]

    plain = {block_of(u): answers_of(u) for u in units if u["variant"] == PLAIN}
    found = {v: {"compared": 0, "differ": 0} for v in VARIANTS[1:]}
    for unit in units:
        if unit["variant"] != PLAIN and block_of(unit) in plain:
            pairs = zip(answers_of(unit), plain[block_of(unit)], strict=True)
            both = [pair for pair in pairs if None not in pair]
            found[unit["variant"]]["compared"] += len(both)
            found[unit["variant"]]["differ"] += sum(own != other for own, other in both)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.arguments(__doc__, "quick", "target", "data", "dtype", "out", target="smollm2")
    add = parser.add_argument
    add("--traces", nargs="+", choices=list(traces.FILES), default=list(traces.FILES))
    add("--loads", type=float, nargs="+", default=[0.3, 0.6, 0.9], help="of the capacity")
    add("--seconds", type=float, default=180.0, help="of a block's arrivals")
    add("--repeats", type=int, default=3, help="windows of each trace")
    add("--warm-up", type=int, default=16, help="requests before the clock runs")
    add("--probe", type=int, default=192, help="requests that measure the capacity")
    add("--drain-s", type=float, default=120.0, help="for answers after the last arrival")
    add("--lesson", type=float, default=600.0, help="seconds at a tenth of the capacity")
    add("--port", type=int, default=8019)
    quick = {"traces": ["azure conv"], "loads": [0.3, 0.8], "seconds": 40.0, "repeats": 1}
    quick |= {"warm_up": 8, "probe": 48, "drain_s": 40.0, "lesson": 0.0}
    return harness.parsed(parser, argv, **quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; write and print all figures; 1 if a draft failed."""
    options = parse(argv)
    traffic = Traffic(options, harness.Store(options.out / "online" / "traffic"))
    state = None
    for number, block in enumerate(traffic.blocks()):
        for turn, variant in enumerate(turns(block, list(traffic.traces), options.loads)):
            after = traffic.run(number, block, turn, variant, state)
            state = after if variant == ONLINE else state
    units = traffic.units
    rows, speeds, differ = rows_of(units), speeds_of(units), answers_that_differ(units)
    failures = sum(unit["draft_failures"] for unit in units)
    figures = {
        "settings": dict(traffic.common),
        "machine": units[0]["machine"],
        "load_averages": [unit["machine"]["load_average"] for unit in units],
        "requests_per_s": {trace: traffic.capacity(trace) for trace in traffic.traces},
        "rows": rows,
        "times_as_fast": speeds,
        "answers": differ,
        "draft_failures": failures,
    }
    harness.write(options.out / "traffic.json", figures)
    harness.show("Open-loop traffic", rows)
    harness.show("Times as fast as another variant, at the same requests", speeds)
    harness.say(f"answers unlike plain's: {differ}; draft failures: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
