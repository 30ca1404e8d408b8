"""Paceline over HTTP against what a user would pick instead, on the same weights.

    make bench-peers ARGS="--quick"

The same weights, prompts (as token ids), lengths, threads and client for all; blocks of a few
prompts in turns, in which every other server is suspended. Speed is tokens per second while so
many requests are in flight. Blocks that are there are kept, unless a peer that failed in them
answers now.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from harness import (
    FILLS,
    Store,
    answer_lengths,
    build,
    digest,
    machine,
    rotation,
    say,
    show,
    while_all_run,
    write,
)
from harness import arguments as common_arguments
from models import file_hash, model_hashes
from prompts import Prompt, interleaved, measured_prompts, source_of, training_prompts
from tqdm import tqdm

from paceline.actors.engine.model_loader import load_tokenizer
from paceline.deploy import model_store
from paceline.deploy.demo.prompts import TOPICS
from peers import report
from peers.catalogue import PEERS, Peer, Setup
from peers.environments import PeerError, versions
from peers.fleet import Fleet
from peers.load import Reply, Work

_CONTEXT = 1024


@dataclass(frozen=True, slots=True)
class Cell:
    """Requests in flight, and temperature (0 is greedy)."""

    in_flight: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Block:
    """Prompts of one topic that every peer answers once; no other block has them."""

    number: int
    topic: str
    prompts: tuple[Prompt, ...]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common_arguments(__doc__, "quick", "data", "out")
    parser.add_argument("--target", default="smollm2", help="as target.path")
    parser.add_argument("--lesson", type=int, help="prompts per topic (200; quick: 64)")
    parser.add_argument("--draft", type=Path, help="draft model for the peers, as a folder")
    parser.add_argument("--peers", nargs="+", help="by name, or by words of names")
    parser.add_argument("--in-flight", type=int, nargs="+")
    parser.add_argument("--temperatures", type=float, nargs="+")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--blocks", type=int, default=1, help="per topic")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(argv)


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """All cells of a run, in order."""
    levels = options.in_flight or ((1, 8) if options.quick else (1, 4, 8, 16))
    temperatures = options.temperatures or ((0.0,) if options.quick else (0.0, 0.8))
    return [Cell(level, t) for level in levels for t in temperatures]


def blocks_of(
    prompts: Mapping[str, Sequence[Prompt]], cells: Sequence[Cell], per_topic: int
) -> dict[Cell, list[Block]]:
    """Blocks of every cell, the topics taking turns; no prompt is in two, so that no cache helps.

    Raises:
        ValueError: there are too few prompts.
    """
    needed = per_topic * sum(FILLS * cell.in_flight for cell in cells)
    if short := [topic for topic, own in prompts.items() if len(own) < needed]:
        raise ValueError(f"{', '.join(short)}: fewer than {needed} prompts")
    queues = {topic: iter(own) for topic, own in prompts.items()}
    return {
        cell: [
            Block(turn * len(queues) + at, topic, tuple(islice(queue, FILLS * cell.in_flight)))
            for turn in range(per_topic)
            for at, (topic, queue) in enumerate(queues.items())
        ]
        for cell in cells
    }


def measure(fleet: Fleet, peers: Sequence[Peer], cell: Cell, block: Block, tokens: int) -> Any:
    """Every peer's replies to one block, one peer after another."""
    prompts = [prompt.token_ids for prompt in block.prompts]
    lengths = answer_lengths(tokens, cell.in_flight, len(prompts))
    work = Work(prompts, lengths, cell.temperature, cell.in_flight)
    found: dict[str, Any] = {}
    able = [peer for peer in peers if cell.in_flight <= peer.most]
    fleet.keep([peer.name for peer in able])
    for peer in rotation(able, block.number):
        try:
            found[peer.name] = _figures(cell.in_flight, *fleet.run(peer.name, work))
        except PeerError as error:
            found[peer.name] = {"failed": str(error)}
    return {"topic": block.topic, "peers": found}


def _figures(
    in_flight: int, replies: Sequence[Reply], spent: Mapping[str, float]
) -> dict[str, Any]:
    """Figures of a block: tokens and seconds while all were in flight, and per later request.

    Raises:
        PeerError: every answer came in one event.
    """
    later = replies[in_flight:]  # of one length
    tpot_s = [round(own, 6) for reply in later if (own := reply.tpot_s) is not None]
    if not tpot_s:
        raise PeerError("every answer came in one event: no time per token")
    tokens, seconds = while_all_run([(reply.events, reply.tokens) for reply in replies], in_flight)
    waits = np.concatenate([np.diff(reply.events) for reply in later])
    return {
        "tokens": tokens,
        "seconds": seconds,
        "ttft_s": [round(reply.ttft_s, 5) for reply in later],
        "tpot_s": tpot_s,
        "longest_waits_s": np.sort(waits)[::-1][: max(len(waits) // 50, 1)].round(5).tolist(),
        "waits": len(waits),
        "processor_s": {role: used for role, used in spent.items() if used},
        "whole_answers": sum(reply.tokens for reply in replies) / later[0].tokens,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write; 1 if any of Paceline's own could not be measured."""
    options = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    target = model_store.fetch(options.target, say, "--target")
    cells = cells_of(options)
    tokens = options.max_tokens
    tokenizer = load_tokenizer(target)
    prompts = {topic: measured_prompts(options.data, topic, tokenizer) for topic in TOPICS}
    plan = blocks_of(prompts, cells, options.blocks)
    peers = [peer for peer in PEERS if _is_wanted(peer, options)]
    out = options.out / "peers"
    work = (out / "work").absolute()
    work.mkdir(parents=True, exist_ok=True)
    slots = max(cell.in_flight for cell in cells)
    lesson = options.lesson or (64 if options.quick else 200)
    pools = [training_prompts(options.data, topic, tokenizer, lesson) for topic in TOPICS]
    taught = [prompt.token_ids for prompt in interleaved(pools)]
    setup = Setup(target, options.threads, slots, _CONTEXT, options.draft, work, taught)
    store = Store(out / "units")
    models = [target, *([] if options.draft is None else [options.draft])]
    own = Path(__file__).parent
    sources = [own.parent / "harness.py", *sorted(own.rglob("*.py"))]
    shared = {
        **build(),
        "study": digest({str(number): file_hash(path) for number, path in enumerate(sources)}),
        "models": digest(model_hashes(*models)),
        "target": target.name,
        "threads": options.threads,
        "slots": slots,
        "tokens": tokens,
        "peers": [peer.name for peer in peers],
        "lesson": lesson,
        "draft": None if options.draft is None else str(options.draft),
    }
    before, fleet = machine(), Fleet(peers, setup)
    units: dict[Cell, list[Any]] = {}
    try:
        for cell in tqdm(cells, desc="cells"):
            for block in tqdm(plan[cell], desc=str(cell), leave=False):
                ids = digest({"ids": [p.token_ids for p in block.prompts]})
                settings = shared | asdict(cell) | {"block": block.number, "prompts": ids}
                unit = store.find("peers", settings)
                if unit is None or any(_is_back(fleet, p) for p in report.failures([[unit]])):
                    found = measure(fleet, peers, cell, block, tokens)
                    unit = store.put("peers", settings, found)
                units.setdefault(cell, []).append(unit | {"block": block.number})
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):  # a second one must not leave servers
            signal.signal(number, signal.SIG_IGN)
        fleet.stop()
    figures = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "settings": shared
        | {"quick": options.quick, "blocks": options.blocks, "context": _CONTEXT}
        | {"data": source_of(options.data)},
        "cells": [asdict(cell) | report.summary(own, peers) for cell, own in units.items()],
        "servers": {
            name: asdict(server.facts)
            for name, server in fleet.servers.items()
            if server.facts.start_s
        },
        "failed": report.failures(units.values()),
        "versions": _versions(peers),
    }
    write(options.out / "peers.json", figures)
    for cell in figures["cells"]:
        title = f"{cell['in_flight']} in flight, temperature {cell['temperature']:g}"
        show(title, report.rows(cell))
        show(f"{title}: processor time per answer, ms", report.processor_rows(cell))
    if wanted := report.bars(figures["cells"]):
        show("Wanted", wanted)
    print(report.markdown(figures), flush=True)  # noqa: T201
    for name, cause in figures["failed"].items():
        say(f"not measured: {name}: {cause}")
    return int(any(peer.ours and peer.name in figures["failed"] for peer in peers))


def _is_back(fleet: Fleet, name: str) -> bool:
    """Whether a peer that failed when a block was kept answers now."""
    try:
        fleet.run(name, Work([[1]], [1], 0.0, 1))
    except PeerError:
        return False
    return True


def _is_wanted(peer: Peer, options: argparse.Namespace) -> bool:
    if options.peers is not None:
        exact = {each.name for each in PEERS}.intersection(options.peers)
        words = [word.lower() for word in options.peers if word not in exact]
        return peer.name in exact or any(word in peer.name.lower() for word in words)
    return peer.main or not options.quick


def _versions(peers: Sequence[Peer]) -> dict[str, Mapping[str, str]]:
    environments = {p.environment for p in peers if p.environment is not None}
    return {each.name: versions(each) for each in environments}


if __name__ == "__main__":
    raise SystemExit(main())
