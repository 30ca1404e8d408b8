"""The passes of traffic over real applications, each kept when it is done."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import processes
from expert_cache import TARGET, base_hashes

from online.latency import Limits, limits_from, summary
from online.open_loop import Planned, one_by_one, replay
from online.rows import interleaved, label, load, mark_of
from online.store import Store
from online.traces import (
    FILES,
    GENERATED,
    Arrival,
    at_rate,
    gap_cv,
    generated,
    output_scale,
    read_trace,
    window,
)
from online.traffic_plan import (
    FROZEN,
    ONLINE,
    OUTPUT_ROOM,
    PLAIN,
    VARIANTS,
    Block,
    Plan,
    Prompts,
    busy_rate,
    planned,
)
from online.traffic_server import AT_ONCE, await_trainer, closed, status
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.weights.history import read_all_decisions
from paceline.deploy import app
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.demo.prompts import TOPICS

_IDLE = 12  # requests that tell what an idle server needs
_LIMIT_TIMES = 5.0  # its median: slower is late
_SEED = 77
_POOL = 1500  # prompts of a topic at most
_PLACES = {"port", "state_dir"}  # of a config: they change no figure


def config_of(options: argparse.Namespace, variant: str, state_dir: Path) -> PacelineConfig:
    """One target replica with the defaults of ``paceline serve``, less what a variant lacks."""
    lacks = {
        PLAIN: {"router.enabled": False, "training.enabled": False, "drafts.topics": []},
        FROZEN: {"training.enabled": False},
        ONLINE: {"replay.persist": True},  # a block goes on with the records of the one before
    }
    return load_config(
        None,
        {
            "port": options.port,
            "state_dir": str(state_dir),
            "target.dtype": options.dtype,
            "target.prefix_cache": False,  # no prompt is to be cheaper for having come before
            "ray.dashboard": False,
        }
        | lacks[variant],
    )


def config_facts(options: argparse.Namespace) -> dict[str, Any]:
    """What of every variant's config decides a result: all but where things lie."""
    nowhere = Path("/")
    return {
        variant: config_of(options, variant, nowhere).model_dump(mode="json", exclude=_PLACES)
        for variant in VARIANTS
    }


class Traffic:
    """Everything that the blocks share: traces, prompts, the capacity, results."""

    def __init__(self, options: argparse.Namespace, plan: Plan, store: Store) -> None:
        """Read traces and prompts.

        Raises:
            paceline.deploy.recipes.data.DataError: the folder lacks a topic's rows.
        """
        self.options, self.plan, self.store = options, plan, store
        self.traces = _traces(options)
        self.units: list[dict[str, Any]] = []  # blocks that were run or found
        self.taught: dict[str, Any] | None = None  # what the lesson came to
        tokenizer = load_tokenizer(TARGET)
        pools = [load(options.data, t, tokenizer, train=_POOL, test=1).train for t in TOPICS]
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
        """Have ``online`` learn from the first trace's traffic, unless it has; its state's folder.

        None where the plan has no lesson.
        """
        count = self._lesson_count()
        if not count:
            return None
        trace = next(iter(self.traces))
        block = Block(trace, self.plan.lesson_load, 0)
        facts = self.capacity(trace)
        settings = self.common | {"block": asdict(block), "requests": count}
        name = f"lesson-{trace.replace(' ', '-')}"
        state = self.store.path(name, settings, ".state")
        found = self.store.find(name, settings)
        if found is None or not state.is_dir():  # it is nothing without what was learnt
            _copy(None, state)
            found = self.store.put(
                name, settings, self._serve(0, count, block, ONLINE, state, facts)
            )
            _say(name, found)
        self.taught = found
        return state

    def _lesson_count(self) -> int:
        """Requests of the lesson."""
        if not self.plan.lesson_s:
            return 0
        trace = next(iter(self.traces))
        rate = self.plan.lesson_load * float(self.capacity(trace)["requests_per_s"])
        return min(max(20, round(rate * self.plan.lesson_s)), len(self.traces[trace]))

    def capacity(self, trace: str) -> dict[str, Any]:
        """Requests a second of a busy plain server, and latencies of an idle one."""
        return self.store.unit(
            f"capacity-{trace.replace(' ', '-')}",
            self.common | {"trace": trace},
            lambda: self._probe(trace),
        )

    def _probe(self, trace: str) -> dict[str, Any]:
        arrivals = window(self.traces[trace], self.plan.probe)
        scale = output_scale(self.traces[trace], OUTPUT_ROOM)
        requests = planned(arrivals, scale, self.prompts, 0, PLAIN)
        with (
            tempfile.TemporaryDirectory() as folder,
            app.start(config_of(self.options, PLAIN, Path(folder))) as running,
        ):
            url = running.base_url
            asyncio.run(closed(url, requests[: self.plan.warm_up]))
            quiet = asyncio.run(one_by_one(url, requests[:_IDLE]))
            ended_s = asyncio.run(closed(url, requests))
        return {
            "requests_per_s": busy_rate(ended_s, AT_ONCE),
            "requests": len(requests),
            "limits": asdict(limits_from(quiet, _LIMIT_TIMES)),
            "machine": machine.facts(),
        }

    def run(
        self, number: int, block: Block, turn: int, variant: str, before: Path | None
    ) -> Path | None:
        """One variant's pass over a block, unless it is there.

        Args:
            number: of the block; its prompts are those after the blocks before it.
            block: see Block.
            turn: how many variants had the block before this one.
            variant: one of ``VARIANTS``.
            before: folder of the state that ``online`` starts from; None starts anew.

        Returns:
            the folder of ``online``'s state after it, None for the others.
        """
        facts, rate = self.capacity(block.trace), self._rate(block)
        start = self._lesson_count() + sum(map(self._count, self.blocks()[:number]))
        settings = self.common | {
            "block": asdict(block),
            "variant": variant,
            "turn": turn,
            "requests_per_s": rate,
            "first_prompt": start,
            "begins_from": before.name if before is not None else None,
        }
        name = f"block-{block.name}-{variant}"
        state = self.store.path(name, settings, ".state")
        result = self.store.find(name, settings)
        if result is None:
            if variant == ONLINE:
                _copy(before, state)
            folder = tempfile.TemporaryDirectory() if variant != ONLINE else nullcontext(str(state))
            with folder as state_dir:
                count = self._count(block)
                result = self._serve(start, count, block, variant, Path(state_dir), facts)
            result = self.store.put(name, settings, result)
            _say(name, result)
            if variant == ONLINE and before is not None and number:  # the lesson's is kept
                shutil.rmtree(before)  # the next block needs this one's alone
        self.units.append({"settings": settings, "result": result})
        return state if variant == ONLINE else None

    def _rate(self, block: Block) -> float:
        """Requests a second."""
        return block.load * float(self.capacity(block.trace)["requests_per_s"])

    def _count(self, block: Block) -> int:
        """Requests."""
        wanted = max(20, round(self._rate(block) * self.plan.seconds))
        return min(wanted, len(self.traces[block.trace]))

    def _serve(
        self,
        start: int,
        count: int,
        block: Block,
        variant: str,
        state_dir: Path,
        facts: Mapping[str, Any],
    ) -> dict[str, Any]:
        trace, plan = self.traces[block.trace], self.plan
        arrivals = at_rate(window(trace, count, block.repeat), self._rate(block))
        scale = output_scale(trace, OUTPUT_ROOM)
        requests = planned(arrivals, scale, self.prompts, start, variant)
        before = outcomes_of(state_dir)
        with app.start(config_of(self.options, variant, state_dir)) as running:
            url = running.base_url
            warm_up = [Planned(p.due_s, p.topic, 0, p.body | {"store": False}) for p in requests]
            asyncio.run(closed(url, warm_up[: plan.warm_up]))
            if variant == ONLINE:
                await_trainer(url)
            busy = machine.facts()["load_average"]
            used = processes.seconds()
            outcomes = asyncio.run(replay(url, requests, plan.drain_s))
            used = processes.since(used)
            last = status(url)
        limits = Limits(**facts["limits"])
        return {
            "summary": summary(outcomes, limits),
            "limits": asdict(limits),
            "gap_cv": gap_cv(arrivals),
            "output_scale": scale,
            "prompts_repeated": self.prompts.repeated(count, start),
            "decisions": dict(outcomes_of(state_dir) - before),
            "weight_versions": last.get("weight_versions", {}),
            "trainer": last.get("trainer"),
            "draft_failures": last["target"].get("draft_failures"),
            "cpu_s": used,
            "machine": machine.facts() | {"load_average_before": busy},
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }


def _traces(options: argparse.Namespace) -> dict[str, list[Arrival]]:
    if options.data is None or not (Path(options.data) / "traces").is_dir():
        return {GENERATED: generated(20_000, _SEED)}
    folder = Path(options.data) / "traces"
    return {name: read_trace(folder / FILES[name]) for name in options.traces}


def outcomes_of(state_dir: Path) -> Counter[str]:
    """How often every decision on weights was taken so far: a number alone tells no outcome."""
    return Counter(str(decision.get("outcome")) for decision in read_all_decisions(state_dir))


def _copy(before: Path | None, state: Path) -> None:
    shutil.rmtree(state, ignore_errors=True)  # a killed block's
    if before is None:
        state.mkdir(parents=True)
    elif not before.is_dir():
        raise FileNotFoundError(f"{before}: what was learnt is gone; remove all of online's blocks")
    else:
        shutil.copytree(before, state)


def _say(name: str, result: Mapping[str, Any]) -> None:
    facts, again = result["summary"], result["prompts_repeated"]
    first, length = facts["ttft_s"], facts["acceptance"]["mean_acceptance_length"]
    print(  # noqa: T201
        f"{name}: {facts['requests']} requests, {facts['failed']} failed, TTFT p50 {first['p50']}, "
        f"p99 {first['p99']}, {facts['tokens_per_s']:.0f} tokens/s, acceptance length {length}"
        + (f"; {again} PROMPTS NOT FOR THE FIRST TIME: the pool is too small" if again else ""),
        file=sys.stderr,
        flush=True,
    )
