"""Request traces replayed open-loop over HTTP: plain, frozen and online serving compared.

    make bench-traffic ARGS="--data ../shared/data"

A block is a window of a trace at one load; every variant serves it in turn, from a fresh start:

    plain    no drafts, no router, no training
    frozen   the initial drafts behind the router, no training
    online   the same drafts, trained on this very traffic on the same cores

``online`` starts each block from its state at the end of the one before, the first from that after
a lesson of the same traffic at a light load. The load is a fraction of the requests per second of
``plain`` with 16 always in flight. Arrivals are the trace's on a stretched time axis; a request's
prompt is real text whose rank by length among the block's is the rank of the trace's prompt; an
answer ends where the target ends it, or at the trace's length, scaled so that the 99th percentile
is a quarter of the target's context. Answers are greedy, and must be the same from every variant
but for bfloat16's last bits. Blocks lie in out/bench/online/traffic, one JSON each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import processes
from clients import Load, Outcome, Planned, one_by_one, replay
from expert_cache import SMALL_MODELS, TARGET, base_hashes
from harness import (
    Store,
    Timing,
    arguments,
    geometric_mean,
    machine,
    paired_ratio,
    rotation,
    say,
    show,
    write,
)

from online import rows
from online.rows import Question, interleaved, label, mark_of
from online.traces import (
    FILES,
    GENERATED,
    OUTPUT_TOKENS,
    Arrival,
    answer_tokens,
    at_rate,
    gap_cv,
    generated,
    output_scale,
    pair_by_rank,
    read_trace,
    window,
)
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.weights.history import read_all_decisions
from paceline.deploy import app
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.demo.prompts import TOPICS

PLAIN, FROZEN, ONLINE = VARIANTS = ("plain", "frozen", "online")
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_DECISIONS = ("published", "promoted", "rolled_back")
_PAIRS = ((FROZEN, PLAIN), (ONLINE, PLAIN), (ONLINE, FROZEN))
_AT_ONCE = 16  # target.max_num_seqs
_TRAINER_START_S = 120.0
_IDLE = 12  # requests that measure the latency of an idle server
_LIMIT_TIMES = 5.0  # its median
_SEED = 77
_POOL = 1500  # prompts of a topic at most
_PLACES = {"port", "state_dir"}  # of a config: they change no figure
Unit = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run.

    Attributes:
        loads: as fractions of the capacity.
        seconds: of the arrivals of a block.
        repeats: windows of each trace.
        warm_up: requests before the clock runs.
        probe: requests that measure the capacity.
        drain_s: time for answers after the last arrival.
        lesson_s: of traffic that ``online`` is trained on before the first block.
        lesson_load: of that time, as a fraction of the capacity.
    """

    loads: tuple[float, ...]
    seconds: float
    repeats: int
    warm_up: int
    probe: int
    drain_s: float
    lesson_s: float
    lesson_load: float = 0.1


FULL = Plan((0.3, 0.6, 0.9), 180.0, 3, 16, 192, 120.0, 600.0)
QUICK = Plan((0.3, 0.8), 40.0, 1, 8, 48, 40.0, 0.0)


@dataclass(frozen=True, slots=True)
class Block:
    """A window of a trace at a load."""

    trace: str
    load: float
    repeat: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Pool that blocks draw from, topics in turn."""

    questions: Sequence[Question]
    texts: Sequence[str]

    def part(self, count: int, start: int) -> list[int]:
        """Indices of ``count`` prompts from ``start`` on, modulo the pool's size."""
        return [(start + i) % len(self.questions) for i in range(count)]

    def repeated(self, count: int, start: int) -> int:
        """Number of prompts of such a part that came before."""
        return min(count, max(0, start + count - len(self.questions)))


def turns(block: Block, traces: Sequence[str], loads: Sequence[float]) -> list[str]:
    """The variants in the order in which they run a block.

    Every variant is first, second and third equally often over three repeats of any trace and load,
    over three traces, and over three loads.
    """
    return rotation(
        VARIANTS, loads.index(block.load) + list(traces).index(block.trace) + block.repeat
    )


def body(text: str, max_tokens: int, variant: str) -> dict[str, Any]:
    """A greedy chat request; only ``online`` stores its record."""
    return {
        "model": "paceline",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "return_token_ids": True,
        "store": variant == ONLINE,
        **({"speculative": {"draft": "off"}} if variant == PLAIN else {}),
    }


def planned(
    arrivals: Sequence[Arrival], scale: float, prompts: Prompts, start: int, variant: str
) -> list[Planned]:
    """Requests of a block: due times, prompts and lengths of answers."""
    part = prompts.part(len(arrivals), start)
    lengths = [len(prompts.questions[i].token_ids) for i in part]
    paired = pair_by_rank([arrival.input_tokens for arrival in arrivals], lengths)
    tokens = answer_tokens(arrivals, scale, OUTPUT_TOKENS)
    requests = []
    for arrival, most, at in zip(arrivals, tokens, paired, strict=True):
        question, text = prompts.questions[part[at]], prompts.texts[part[at]]
        sent = body(text, most, variant)
        requests.append(Planned(arrival.at_s, question.topic, lengths[at], sent))
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


@dataclass(frozen=True, slots=True)
class Limits:
    """Latency limits of goodput: seconds to the first token, and per token after it."""

    ttft_s: float
    tpot_s: float

    def met(self, outcome: Outcome) -> bool:
        """Whether an answer is whole and within the limits."""
        if outcome.error is not None or outcome.ttft_s is None:
            return False
        return outcome.ttft_s <= self.ttft_s and (outcome.tpot_s or 0.0) <= self.tpot_s


def limits_from(idle: Sequence[Outcome], times: float) -> Limits:
    """Multiples of an idle server's median latencies.

    Raises:
        ValueError: no answer has two tokens.
    """
    whole = [o for o in idle if o.error is None and o.ttft_s is not None and o.tpot_s is not None]
    if not whole:
        raise ValueError("no answer of an idle server to measure by")
    first, after = np.median([[o.ttft_s, o.tpot_s] for o in whole], axis=0)
    return Limits(float(times * first), float(times * after))


def percentiles(values: Sequence[float | None]) -> dict[str, float | None]:
    """p50, p99 and mean of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return {"p50": None, "p99": None, "mean": None}
    p50, p99 = np.percentile(known, [50, 99])
    return {"p50": float(p50), "p99": float(p99), "mean": float(np.mean(known))}


def acceptance(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Speculation of all rounds together; None if nothing was drafted.

    ``first`` is the share of rounds whose first token was accepted: it does not depend on k.
    """
    names = ("rounds", "drafted", "accepted", "first_accepted")
    rounds, drafted, accepted, first = (sum(getattr(o, n) for o in outcomes) for n in names)
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1.0 + accepted / rounds if rounds else None,
        "first": first / rounds if rounds else None,
        "drafted": drafted,
    }


def summary(outcomes: Sequence[Outcome], limits: Limits) -> dict[str, Any]:
    """Figures of a block; latencies are of whole answers.

    ``goodput`` is in requests and ``tokens_per_s`` in tokens per second of the block, which ends
    with its last answer.
    """
    whole = [o for o in outcomes if o.error is None]
    seconds = max((o.due_s + o.e2e_s for o in whole), default=0.0) or 1.0
    good = sum(map(limits.met, outcomes))
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(whole),
        "seconds": seconds,
        "tokens_per_s": sum(o.tokens for o in whole) / seconds,
        "goodput": good / seconds,
        "within_limits": good / max(len(outcomes), 1),
        **{n: percentiles([getattr(o, n) for o in whole]) for n in (*LATENCIES, "pause_s")},
        "lag_s": percentiles([o.lag_s for o in outcomes]),
        "acceptance": acceptance(whole),
        "by_topic": {t: acceptance([o for o in whole if o.topic == t]) for t in TOPICS},
    }


def config_of(options: argparse.Namespace, variant: str, state_dir: Path) -> PacelineConfig:
    """One target replica with the defaults of ``paceline serve``, changed for the variant."""
    changes: dict[str, dict[str, Any]] = {
        PLAIN: {"router.enabled": False, "training.enabled": False, "drafts.topics": []},
        FROZEN: {"training.enabled": False},
        ONLINE: {"replay.persist": True},  # a block continues with the records of the one before
    }
    common = {
        **SMALL_MODELS,
        "port": options.port,
        "state_dir": str(state_dir),
        "target.dtype": options.dtype,
        "target.prefix_cache": False,  # no prompt is to be cheaper for having come before
        "ray.dashboard": False,
    }
    return load_config(None, common | changes[variant])


def config_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Every variant's config without its places, for keys."""
    return {
        variant: config_of(options, variant, Path("/")).model_dump(mode="json", exclude=_PLACES)
        for variant in VARIANTS
    }


async def closed_loop(url: str, requests: Sequence[Planned]) -> list[float]:
    """End of every answer, seconds; as many are in flight as the target decodes at once."""
    began = time.monotonic()
    replies = await Load(url, [request.body for request in requests], _AT_ONCE).run()
    if failed := [reply.error for reply in replies if reply.error is not None]:
        raise RuntimeError(f"{len(failed)} requests failed, the first: {failed[0]}")
    return [reply.last_at - began for reply in replies if reply.last_at is not None]


def status(url: str) -> dict[str, Any]:
    """The server's status."""
    return dict(httpx.get(f"{url}/v1/paceline/status", timeout=60).json())


def await_trainer(url: str) -> None:
    """Wait until the trainer has started.

    Raises:
        RuntimeError: it has not in two minutes.
    """
    deadline = time.monotonic() + _TRAINER_START_S
    while not is_started(status(url).get("trainer") or {}):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no trainer after {_TRAINER_START_S:.0f} s")
        time.sleep(0.5)


def is_started(trainer: Mapping[str, Any]) -> bool:
    """Whether a trainer (its part of the status) has loaded its models, or needs none yet."""
    return trainer.get("micro_steps", 0) > 0 or trainer.get("state") == "no new records"


def outcomes_of(state_dir: Path) -> Counter[str]:
    """Number of decisions on weights by outcome."""
    return Counter(str(decision.get("outcome")) for decision in read_all_decisions(state_dir))


class Traffic:
    """Blocks of traffic over real applications, with all that they share.

    Raises:
        paceline.deploy.recipes.data.DataError: the folder lacks a topic's rows.
    """

    def __init__(self, options: argparse.Namespace, plan: Plan, store: Store) -> None:
        self.options, self.plan, self.store = options, plan, store
        self.traces: dict[str, list[Arrival]] = {GENERATED: generated(20_000, _SEED)}
        if options.data is not None and (Path(options.data) / "traces").is_dir():
            folder = Path(options.data) / "traces"
            self.traces = {name: read_trace(folder / FILES[name]) for name in options.traces}
        self.units: list[dict[str, Any]] = []  # blocks that were run or found
        tokenizer = load_tokenizer(TARGET)
        pools = [rows.load(options.data, t, tokenizer, train=_POOL, test=1).train for t in TOPICS]
        questions = interleaved(pools)
        decoded = [tokenizer.decode(q.token_ids, skip_special_tokens=True) for q in questions]
        self.prompts = Prompts(questions, decoded)
        self.common = {
            "models": base_hashes(),
            "prompts": label(options.data),
            "traces": list(self.traces),  # a block's prompts are those after the blocks before it
            "pool": mark_of(questions),
            "dtype": options.dtype,
            "plan": asdict(plan),
            "config": config_facts(options),
        }

    def blocks(self) -> list[Block]:
        """Loads in turn within a repeat, so that no load has the early ones alone."""
        return [
            Block(trace, load, repeat)
            for repeat in range(self.plan.repeats)
            for trace in self.traces
            for load in self.plan.loads
        ]

    def lesson(self) -> Path | None:
        """Train ``online`` on the first trace if the plan says so; its state's folder."""
        count = self._lesson_count()
        if not count:
            return None
        block = Block(next(iter(self.traces)), self.plan.lesson_load, 0)
        settings = self.common | {"block": asdict(block), "requests": count}
        state = self.store.path("lesson", settings, ".state")
        if self.store.find("lesson", settings) is None or not state.is_dir():
            _copy(None, state)
            self.store.put("lesson", settings, self._serve(0, count, block, ONLINE, state))
        return state

    def _lesson_count(self) -> int:
        """Requests of the lesson."""
        if not self.plan.lesson_s:
            return 0
        trace = next(iter(self.traces))
        rate = self.plan.lesson_load * float(self.capacity(trace)["requests_per_s"])
        return min(max(20, round(rate * self.plan.lesson_s)), len(self.traces[trace]))

    def capacity(self, trace: str) -> dict[str, Any]:
        """Requests per second of a busy plain server, and latencies of an idle one."""
        name = f"capacity-{trace.replace(' ', '-')}"
        return self.store.unit(name, self.common | {"trace": trace}, lambda: self._probe(trace))

    def _probe(self, trace: str) -> dict[str, Any]:
        arrivals = window(self.traces[trace], self.plan.probe)
        scale = output_scale(self.traces[trace], OUTPUT_TOKENS)
        requests = planned(arrivals, scale, self.prompts, 0, PLAIN)
        with (
            tempfile.TemporaryDirectory() as folder,
            app.start(config_of(self.options, PLAIN, Path(folder))) as running,
        ):
            url = running.base_url
            asyncio.run(closed_loop(url, requests[: self.plan.warm_up]))
            idle = asyncio.run(one_by_one(url, requests[:_IDLE]))
            ended_s = asyncio.run(closed_loop(url, requests))
        return {
            "requests_per_s": busy_rate(ended_s, _AT_ONCE),
            "requests": len(requests),
            "limits": asdict(limits_from(idle, _LIMIT_TIMES)),
            "machine": machine(),
        }

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
        start = self._lesson_count() + sum(map(self._count, self.blocks()[:number]))
        settings = self.common | {
            "block": asdict(block),
            "variant": variant,
            "turn": turn,
            "requests_per_s": self._rate(block),
            "first_prompt": start,
            "begins_from": before.name if before is not None else None,
        }
        name = f"block-{block.trace.replace(' ', '-')}-{block.load:g}-{block.repeat}-{variant}"
        state = self.store.path(name, settings, ".state")
        result = self.store.find(name, settings)
        if result is None:
            if variant == ONLINE:
                _copy(before, state)
            folder = tempfile.TemporaryDirectory() if variant != ONLINE else nullcontext(str(state))
            with folder as state_dir:
                result = self._serve(start, self._count(block), block, variant, Path(state_dir))
            result = self.store.put(name, settings, result)
            facts, again = result["summary"], result["prompts_repeated"]
            say(f"{name}: {facts['requests']} requests, {facts['failed']} failed")
            if again:
                say(f"{again} PROMPTS NOT FOR THE FIRST TIME: the pool is too small")
            if variant == ONLINE and before is not None and number:  # the lesson's is kept
                shutil.rmtree(before)
        self.units.append({"settings": settings, "result": result})
        return state if variant == ONLINE else None

    def _rate(self, block: Block) -> float:
        """Requests per second."""
        return block.load * float(self.capacity(block.trace)["requests_per_s"])

    def _count(self, block: Block) -> int:
        """Requests of a block."""
        wanted = max(20, round(self._rate(block) * self.plan.seconds))
        return min(wanted, len(self.traces[block.trace]))

    def _serve(
        self, start: int, count: int, block: Block, variant: str, state_dir: Path
    ) -> dict[str, Any]:
        trace, plan = self.traces[block.trace], self.plan
        arrivals = at_rate(window(trace, count, block.repeat), self._rate(block))
        scale = output_scale(trace, OUTPUT_TOKENS)
        requests = planned(arrivals, scale, self.prompts, start, variant)
        before = outcomes_of(state_dir)
        with app.start(config_of(self.options, variant, state_dir)) as running:
            url = running.base_url
            warm_up = [replace(p, body=p.body | {"store": False}) for p in requests]
            asyncio.run(closed_loop(url, warm_up[: plan.warm_up]))
            if variant == ONLINE:
                await_trainer(url)
            facts, used = machine(), processes.seconds()
            _, outcomes = asyncio.run(replay(url, requests, plan.drain_s))
            used_s = processes.since(used)
            last = status(url)
        limits = Limits(**self.capacity(block.trace)["limits"])
        return {
            "summary": summary(outcomes, limits),
            "gap_cv": gap_cv(arrivals),
            "output_scale": scale,
            "prompts_repeated": self.prompts.repeated(count, start),
            "decisions": dict(outcomes_of(state_dir) - before),
            "weight_versions": last.get("weight_versions", {}),
            "draft_failures": last["target"].get("draft_failures"),
            "cpu_s": used_s,
            "machine": facts,
            "outcomes": [asdict(outcome) for outcome in outcomes],
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
    grouped: dict[tuple[str, float, int], list[Unit]] = {}
    for unit in units:
        block, variant = unit["settings"]["block"], unit["settings"]["variant"]
        key = block["trace"], block["load"], VARIANTS.index(variant)
        grouped.setdefault(key, []).append(unit["result"])
    rows = []
    for (trace, load, variant), results in sorted(grouped.items()):
        found = [result["summary"] for result in results]
        row: dict[str, Any] = {"trace": trace, "load": load, "variant": VARIANTS[variant]}
        for name in LATENCIES:
            for point in ("p50", "p99"):
                values = [s[name][point] for s in found if s[name][point] is not None]
                positive = bool(values) and min(values) > 0.0
                row[f"{name[:-2]}_{point}_s"] = geometric_mean(values) if positive else None
        for name in ("goodput", "within_limits", "tokens_per_s"):
            row[name] = float(np.mean([s[name] for s in found]))
        row |= {name: sum(s[name] for s in found) for name in ("requests", "failed")}
        for name in ("mean_acceptance_length", "first"):
            values = [s["acceptance"][name] for s in found if s["acceptance"][name] is not None]
            row[name] = float(np.mean(values)) if values else None
        row |= {n: sum(r["decisions"].get(n, 0) for r in results) for n in _DECISIONS}
        row["cpu_s"] = float(np.mean([sum(r["cpu_s"].values()) for r in results]))
        row["trainer_cpu_s"] = float(np.mean([r["cpu_s"].get("trainer", 0.0) for r in results]))
        row["prompts_repeated"] = sum(result["prompts_repeated"] for result in results)
        rows.append(row)
    return rows


def ratios_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """Latency of a variant over another's, by load, over blocks; traces are fixed strata."""
    found = []
    for load in sorted({unit["settings"]["block"]["load"] for unit in units}):
        own = [unit for unit in units if unit["settings"]["block"]["load"] == load]
        for name in LATENCIES:
            for point in ("p50", "p99"):
                timings = _timings(own, name, point)
                for variant, other in _PAIRS:
                    blocks = [
                        {t.block for t in timings if t.variant == v} for v in (variant, other)
                    ]
                    both = [t for t in timings if t.block in set.intersection(*blocks)]
                    row = {"load": load, "figure": f"{name[:-2]} {point}", "variant": variant}
                    row |= {"against": other}
                    if both:  # a latency of one token is the inverse of a rate
                        row |= asdict(paired_ratio(both, other, variant))
                    found.append(row)
    return found


def _timings(units: Sequence[Unit], name: str, point: str) -> list[Timing]:
    blocks: dict[tuple[str, int], int] = {}
    timings = []
    for unit in units:
        settings = unit["settings"]
        block, value = settings["block"], unit["result"]["summary"][name][point]
        number = blocks.setdefault((block["trace"], block["repeat"]), len(blocks))
        if value is not None and value > 0.0:
            timings.append(Timing(settings["variant"], number, block["trace"], 1, value))
    return timings


def answers_that_differ(units: Sequence[Unit]) -> dict[str, dict[str, int]]:
    """Per variant: answers compared with plain's in the same block, and those that differ."""

    def block_of(unit: Unit) -> str:
        return json.dumps(unit["settings"]["block"], sort_keys=True)

    def answers_of(unit: Unit) -> list[str | None]:
        return [o["answer"] if o["error"] is None else None for o in unit["result"]["outcomes"]]

    plain = {block_of(u): answers_of(u) for u in units if u["settings"]["variant"] == PLAIN}
    found = {v: {"compared": 0, "differ": 0} for v in (FROZEN, ONLINE)}
    for unit in units:
        variant, block = unit["settings"]["variant"], block_of(unit)
        if variant != PLAIN and block in plain:
            pairs = [p for p in zip(answers_of(unit), plain[block], strict=True) if None not in p]
            found[variant]["compared"] += len(pairs)
            found[variant]["differ"] += sum(own != other for own, other in pairs)
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments(__doc__, "quick", "data", "dtype", "out")
    parser.add_argument("--traces", nargs="+", choices=list(FILES), default=None)
    parser.add_argument("--seconds", type=float, help="of a block's arrivals; 180, with --quick 40")
    parser.add_argument("--repeats", type=int, help="windows of each trace; 3, with --quick 1")
    parser.add_argument("--lesson", type=float, help="seconds; 600, with --quick none")
    parser.add_argument("--port", type=int, default=8019)
    parser.add_argument("--published", type=Path, help="ignored: blocks are too large to publish")
    options = parser.parse_args(argv)
    options.traces = options.traces or (["azure conv"] if options.quick else list(FILES))
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """Plan of these options."""
    plan = QUICK if options.quick else FULL
    given = {"seconds": options.seconds, "repeats": options.repeats, "lesson_s": options.lesson}
    return replace(plan, **{name: value for name, value in given.items() if value is not None})


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; write and print all figures; 1 if a draft failed."""
    options = parse(argv)
    traffic = Traffic(options, plan_of(options), Store(options.out / "online" / "traffic"))
    state = traffic.lesson()
    for number, block in enumerate(traffic.blocks()):
        order = turns(block, list(traffic.traces), traffic.plan.loads)
        for turn, variant in enumerate(order):
            after = traffic.run(number, block, turn, variant, state)
            state = after if variant == ONLINE else state
    units = traffic.units
    rows, ratios, differ = rows_of(units), ratios_of(units), answers_that_differ(units)
    failures = sum(unit["result"]["draft_failures"] or 0 for unit in units)
    figures = {
        "settings": dict(traffic.common),
        "machine": units[0]["result"]["machine"],
        "load_averages": [unit["result"]["machine"]["load_average"] for unit in units],
        "capacity": {trace: traffic.capacity(trace) for trace in traffic.traces},
        "rows": rows,
        "ratios": ratios,
        "answers": differ,
        "draft_failures": failures,
    }
    write(options.out / "online" / "traffic.json", figures)
    show("Open-loop traffic", rows)
    show("Latency over that of another variant", ratios)
    say(f"answers unlike plain's: {differ}; draft failures: {failures}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
