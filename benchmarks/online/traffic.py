"""Request traces replayed open-loop over HTTP: plain, frozen and online serving compared.

    make bench-traffic ARGS="--data ../shared/data"

A block is a window of a trace at one load, which every variant's server serves in turn while the
others stand still:

    plain                no drafts, no router, no training
    frozen and suffixes  the initial drafts behind the router and suffixes of the request itself, no
                         training, an answer of each topic recorded
    all suffixes         the same, and suffixes of all answers of this very traffic
    online               the same, and the drafts learn from it, on the same cores

All begin with a lesson of the same traffic, ``online`` at a light load, in whose pauses it learns,
the others as fast as they can. The load is a fraction of the requests per second of ``plain`` with
16 always in flight. Arrivals are the trace's on a stretched time axis; a request's prompt is real
text whose rank by length among the block's is the rank of the trace's prompt; an answer ends where
the target ends it, or at the trace's length, scaled. Answers are greedy, and must be the same from
every variant but for bfloat16's last bits. Whole blocks lie in out/bench/online/traffic; a run that
goes on starts its servers anew, and gives the lesson again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
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
from held import end_leftovers, note
from models import config_of, find_models, model_hashes
from prompts import Prompt, interleaved, mark_of, source_of, training_prompts
from serving import Turns, status

from online import traces
from online.traces import Arrival
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.weights.history import read_all_decisions
from paceline.deploy.demo.prompts import TOPICS

PLAIN, FROZEN, SUFFIX, ONLINE = VARIANTS = (
    "plain",
    "frozen and suffixes",
    "all suffixes",
    "online",
)
# Not `store: false`, which would keep prompts out of the prefix cache too.
_NO_RECORDS = {"replay.enabled": False, "training.enabled": False}
# Keys of the configuration of `paceline serve` that a variant changes.
KEYS: dict[str, dict[str, Any]] = {
    PLAIN: {"router.enabled": False, "drafts.topics": [], **_NO_RECORDS},
    FROZEN: _NO_RECORDS,
    SUFFIX: {"training.enabled": False},
    ONLINE: {},
}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
_DECISIONS = ("published", "promoted", "rolled_back")
_PAIRS = ((FROZEN, PLAIN), (SUFFIX, PLAIN), (ONLINE, PLAIN), (ONLINE, FROZEN))
_LESSON_LOAD = 0.1  # of the capacity
_PLAN = ("loads", "seconds", "repeats", "probe", "drain_s", "lesson")
_AT_ONCE = 16  # target.max_num_seqs
_TRAINER_START_S = 120.0
_SEED = 77
_POOL = 1500  # prompts of a topic at most
_PLACES = {"port", "state_dir"}  # of a config: they change no figure
_WAKING = chat("Hello.", 8, temperature=0, stream=True, store=False)
Unit = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """A window of a trace at a load, a fraction of the capacity, for so many seconds."""

    trace: str
    load: float
    repeat: int
    seconds: float


def turns(block: Block, traces: Sequence[str], loads: Sequence[float]) -> list[str]:
    """The variants in the order in which they run a block.

    Every variant has every place equally often over four repeats of any trace and load.
    """
    place = loads.index(block.load) + list(traces).index(block.trace) + block.repeat
    return harness.rotation(VARIANTS, place)


def body(text: str, max_tokens: int, variant: str) -> dict[str, Any]:
    """A greedy chat request."""
    own = {"speculative": {"draft": "off"}} if variant == PLAIN else {}
    return chat(text, max_tokens, temperature=0, stream=True, **own)


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
    """Answers per second between the first ones and those after which the load fades out.

    Of either end ``at_once`` are left out: what is in flight has work in it that no end tells.

    Args:
        ended_s: ends of all answers, seconds.
        at_once: requests in flight.

    Raises:
        ValueError: there are not enough.
    """
    ends = sorted(ended_s)[at_once - 1 : -at_once]
    if len(ends) < 2:
        raise ValueError(f"{len(ended_s)} requests, {at_once} at once: no rate")
    return (len(ends) - 1) / (ends[-1] - ends[0])


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures of requests; latencies and speculation are of whole answers, None if there are none.

    ``first`` is the share of drafts whose first token was accepted: it does not depend on k.
    ``tokens_per_round`` counts all rounds, those without drafts too.
    """
    whole = pd.DataFrame([asdict(o) for o in outcomes if o.error is None], columns=_COLUMNS)
    sums = whole[_COUNTS].sum()
    rounds = sums.tokens - sums.accepted - sums.suffix_accepted
    found: dict[str, Any] = {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(whole),
        "tokens": int(sums.tokens),
        "tokens_per_round": sums.tokens / rounds if rounds else None,
        "first": sums.first_accepted / sums.rounds if sums.rounds else None,
        **{name: int(sums[name]) for name in _DRAFTED},
        "lag_s": float(max((o.lag_s for o in outcomes), default=0.0)),
    }
    for name in LATENCIES:
        known = whole[name].dropna().astype(float)
        for q in (50, 99):
            found[f"{name[:-2]}_p{q}_s"] = float(np.percentile(known, q)) if len(known) else None
    return found


_COLUMNS = list(Outcome.__slots__)
_DRAFTED = ["drafted", "accepted", "suffix_drafted", "suffix_accepted"]
_COUNTS = ["tokens", "rounds", "first_accepted", *_DRAFTED]
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
    """Blocks of traffic over real servers, with all that they share.

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
        models = find_models(options.target)
        tokenizer = load_tokenizer(models[0])
        pools = [training_prompts(options.data, t, tokenizer, _POOL) for t in TOPICS]
        self.prompts = interleaved(pools)
        self.common = {
            **harness.build(),
            "models": model_hashes(*models),
            "prompts": [source_of(options.data), mark_of(self.prompts)],
            "traces": list(self.traces),  # a block's prompts are those after the blocks before it
            "plan": {name: getattr(options, name) for name in _PLAN},
            "config": config_facts(options),
        }
        self._servers: dict[str, Turns] = {}
        self._taught: set[str] = set()
        self._work = store.folder / "servers"
        self._work.mkdir(exist_ok=True)
        end_leftovers(self._noted)

    @property
    def _noted(self) -> Path:
        return self._work / "processes.json"

    def blocks(self) -> list[Block]:
        """Loads in turn within a repeat, so that none has the early ones alone."""
        own = self.options
        return [
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
        # The pool's last, and none that is kept: no prompt is to be cheaper for having come before.
        requests = self._planned(trace, arrivals, -len(arrivals), PLAIN)
        first = [replace(p, body=p.body | {"store": False}) for p in requests[:_AT_ONCE]]
        with self._server(PLAIN).turn() as url:
            asyncio.run(closed_loop(url, first))
            ended_s = asyncio.run(closed_loop(url, requests))
        return {"requests_per_s": busy_rate(ended_s, _AT_ONCE), "machine": harness.machine()}

    def _planned(
        self, trace: str, arrivals: Sequence[Arrival], start: int, variant: str
    ) -> list[Planned]:
        """Requests of these arrivals, with the prompts from ``start`` on, modulo the pool."""
        tokens = traces.answer_tokens(arrivals, self.traces[trace], traces.OUTPUT_TOKENS)
        part = [self.prompts[(start + i) % len(self.prompts)] for i in range(len(arrivals))]
        return planned(arrivals, tokens, part, variant)

    def _server(self, variant: str) -> Turns:
        """A variant's server, which stands still."""
        if variant not in self._servers:
            harness.say(f"starting {variant}")
            own = self.options
            folder = self._work / variant
            server = self._servers[variant] = Turns(own.target, keys_of(own, variant), folder)
            self._note()
            server.start()
            self._note()  # with what it has started itself
        return self._servers[variant]

    def _note(self) -> None:
        note(self._noted, [each.held for each in self._servers.values()])

    def _teach(self, server: Turns, variant: str) -> None:
        lesson = self._lesson()
        arrivals = self._arrivals(lesson)
        requests = self._planned(lesson.trace, arrivals, 0, variant)
        harness.say(f"{variant}: a lesson of {len(requests)} requests")
        with server.turn() as url:
            if variant == ONLINE:
                wait = until(lambda: is_started(status(url)), "the trainer", _TRAINER_START_S)
                asyncio.run(wait)
                asyncio.run(replay(url, requests, self.options.drain_s))
            else:
                asyncio.run(closed_loop(url, requests))

    def _lesson(self) -> Block:
        return Block(next(iter(self.traces)), _LESSON_LOAD, 0, self.options.lesson)

    def needed(self, blocks: Sequence[Block]) -> int:
        """Prompts that the lesson and these blocks need, the pool's first."""
        lesson = [self._lesson()] if self.options.lesson else []
        return sum(map(self._count, [*lesson, *blocks]))

    def run(self, block: Block, start: int) -> list[Unit]:
        """Serve a block by every variant, unless it is there: pairs must be of one time.

        Args:
            block: see Block.
            start: number of its first prompt.

        Returns:
            A unit per variant.
        """
        order = turns(block, list(self.traces), self.options.loads)
        settings = self.common | {
            "block": asdict(block),
            "variants": order,
            "requests_per_s": self._rate(block),
            "first_prompt": start,
        }
        name = f"block-{block.trace}-{block.load:g}-{block.repeat}"
        found = self.store.unit(
            name, settings, lambda: {own: self._serve(start, block, own) for own in order}
        )
        return [
            {**asdict(block), "variant": variant, "turn": turn, **found[variant]}
            for turn, variant in enumerate(order)
        ]

    def _rate(self, block: Block) -> float:
        """Requests per second."""
        return block.load * self.capacity(block.trace)

    def _count(self, block: Block) -> int:
        """Requests of a block."""
        wanted = max(20, round(self._rate(block) * block.seconds))
        return min(wanted, len(self.traces[block.trace]))

    def _arrivals(self, block: Block) -> list[Arrival]:
        window = traces.window(self.traces[block.trace], self._count(block), block.repeat)
        return traces.at_rate(window, self._rate(block))

    def _serve(self, start: int, block: Block, variant: str) -> dict[str, Any]:
        """Serve a block's requests by a variant's server."""
        requests = self._planned(block.trace, self._arrivals(block), start, variant)
        server = self._server(variant)
        # Not with the start: the lesson's rate hangs on plain's capacity.
        if variant not in self._taught and self.options.lesson:
            self._teach(server, variant)
        self._taught.add(variant)
        before = decisions_of(server.state_dir)
        with server.turn() as url:
            # a short answer: what was suspended finds its pages and timers again
            asyncio.run(Load(url, [_WAKING]).run())
            facts, used = harness.machine(), processes.seconds()
            _, outcomes = asyncio.run(replay(url, requests, self.options.drain_s))
            used_s, last = processes.since(used), status(url)
        return {
            "decisions": dict(decisions_of(server.state_dir) - before),
            "draft_failures": last["target"].get("draft_failures") or 0,
            "cpu_s": sum(used_s.values()),
            "trainer_cpu_s": used_s.get("trainer", 0.0),
            "machine": facts,
            "outcomes": [asdict(outcome) for outcome in outcomes],
        }

    def end(self) -> None:
        """End all servers."""
        for server in self._servers.values():
            server.end()
        self._noted.unlink(missing_ok=True)


def keys_of(options: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Keys of a variant's configuration."""
    return {"target.dtype": options.dtype} | KEYS[variant]


def config_facts(options: argparse.Namespace) -> dict[str, Any]:
    """Every variant's config without its places, for keys."""
    return {
        variant: config_of(options.target, keys_of(options, variant)).model_dump(
            mode="json", exclude=_PLACES
        )
        for variant in VARIANTS
    }


def rows_of(units: Sequence[Unit]) -> list[dict[str, Any]]:
    """One row per trace, load and variant, over the requests of all blocks.

    Every percentile has a second column: how many times plain's it is.
    """
    rows = []
    for (trace, load), here in pd.DataFrame(units).groupby(["trace", "load"]):
        found = {}
        for variant in VARIANTS:
            own = here[here.variant == variant]
            if own.empty:
                continue
            outcomes = [Outcome(**outcome) for block in own.outcomes for outcome in block]
            found[variant] = {"trace": trace, "load": load, "variant": variant, **summary(outcomes)}
            found[variant] |= {n: float(own[n].sum()) for n in ("cpu_s", "trainer_cpu_s")}
            found[variant] |= {n: sum(d.get(n, 0) for d in own.decisions) for n in _DECISIONS}
        for row in found.values():
            for name in _FIGURES:
                plain = found.get(PLAIN, {}).get(name)
                if plain and row[name] is not None:
                    row[f"{name[:-2]}_times_plain"] = row[name] / plain
        rows += found.values()
    return rows


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
    add("--seconds", type=float, default=30.0, help="of a block's arrivals")
    add("--repeats", type=int, default=8, help="windows of each trace")
    add("--probe", type=int, default=192, help="requests that measure the capacity")
    add("--drain-s", type=float, default=120.0, help="for answers after the last arrival")
    add("--lesson", type=float, default=600.0, help="seconds at a tenth of the capacity")
    quick = {"traces": ["azure conv"], "loads": [0.3, 0.9], "seconds": 20.0, "repeats": 2}
    quick |= {"probe": 48, "drain_s": 40.0, "lesson": 60.0}
    return harness.parsed(parser, argv, **quick)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing; write and print all figures; 1 if a draft failed."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    traffic = Traffic(options, harness.Store(options.out / "online" / "traffic"))
    units: list[Unit] = []
    try:
        blocks = traffic.blocks()
        there = len(traffic.prompts) - options.probe
        repeated = max(0, traffic.needed(blocks) - there)
        if repeated:
            harness.say(f"{repeated} PROMPTS NOT FOR THE FIRST TIME: the pool is too small")
        for number, block in enumerate(blocks):
            units += traffic.run(block, traffic.needed(blocks[:number]))
    finally:
        traffic.end()
    rows, speeds, differ = rows_of(units), speeds_of(units), answers_that_differ(units)
    failures = max(unit["draft_failures"] for unit in units)
    figures = {
        "settings": dict(traffic.common),
        "machine": units[0]["machine"],
        "load_averages": [unit["machine"]["load_average"] for unit in units],
        "requests_per_s": {trace: traffic.capacity(trace) for trace in traffic.traces},
        "prompts_repeated": repeated,
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
