"""What the defaults cost: the same requests with drafts, with records, with both, and with neither.

    make bench-defaults ARGS="--quick --data FOLDER"

One server with the first draft, without training, over HTTP on loopback: two servers would differ
by more than what is sought. Each block of prompts runs five ways in a rotating order:
`speculative.draft: off` is without drafts, `store: false` without records, and with neither, or
where the request names its draft, the router has nothing to do. After each run the server rests
until it has handed its records over, and then they are purged: the next run of a prompt must find
nothing in suffixes. Speed is tokens per second while so many requests are in flight. Ratios are
means of log-ratios of blocks with 95 % t intervals; processor time, that of the rest included, is
per answer of whole length.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import httpx
import processes
from clients import Load, chat
from harness import (
    FILLS,
    Timing,
    answer_lengths,
    arguments,
    machine,
    paired_ratio,
    parsed,
    rotation,
    say,
    show,
    while_all_run,
    write,
    written,
)
from models import find_models
from prompts import Prompt, interleaved, measured_prompts, source_of
from serving import application

from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.general import GENERAL
from paceline.deploy.demo.prompts import TOPICS

NEITHER = "neither"
WAYS: dict[str, dict[str, Any]] = {
    NEITHER: {"store": False, "speculative": {"draft": "off"}},
    "records": {"speculative": {"draft": "off"}},
    "drafts": {"store": False},
    "both": {},
    "both, draft named": {"speculative": {"draft": GENERAL}},
}
_LEAST = 5  # prompts of a block
_REST_S = 0.5
_SHOWN = ("target", "ingress", "client")  # roles of processes


def run(
    url: str, prompts: Sequence[Prompt], lengths: Sequence[int], in_flight: int, **fields: Any
) -> tuple[int, float, dict[str, float]]:
    """Tokens and seconds while all were in flight; processor seconds by role until all is at rest.

    Raises:
        RuntimeError: a request failed.
    """
    common = {"stream": True, "ignore_eos": True} | fields
    used = processes.seconds()
    asked = [chat(p.text, length, **common) for p, length in zip(prompts, lengths, strict=True)]
    replies = asyncio.run(Load(url, asked, in_flight).run())
    if errors := [reply.error for reply in replies if reply.error is not None]:
        raise RuntimeError(errors[0])
    time.sleep(_REST_S)
    spent = processes.since(used)
    httpx.post(f"{url}/v1/paceline/replay/purge", json={"all": True}, timeout=60).raise_for_status()
    answers = [(reply.token_times, len(reply.token_ids)) for reply in replies]
    return *while_all_run(answers, in_flight), spent


def block_size(in_flight: int) -> int:
    """Prompts of a block."""
    return max(FILLS * in_flight, _LEAST)


def measure(
    url: str, prompts: Iterator[Prompt], in_flight: int, options: argparse.Namespace
) -> list[tuple[Timing, dict[str, float]]]:
    """All blocks of so many requests in flight; an earlier one warms the server up.

    With each the processor milliseconds of an answer of whole length by role.
    """
    found = []
    for block in range(-1, options.blocks):
        own = list(islice(prompts, block_size(in_flight)))
        lengths = answer_lengths(options.max_tokens, in_flight, len(own))
        answers = sum(lengths) / options.max_tokens
        for way in rotation(list(WAYS), block):
            fields = {"temperature": options.temperature, **WAYS[way]}
            tokens, seconds, spent = run(url, own, lengths, in_flight, **fields)
            if block >= 0:
                each = {role: 1e3 * used / answers for role, used in spent.items()}
                found.append((Timing(way, block, "", tokens, seconds), each))
        say(f"{in_flight} in flight: block {block + 1} of {options.blocks}")
    return found


def summary(
    in_flight: int, found: Sequence[tuple[Timing, dict[str, float]]]
) -> list[dict[str, Any]]:
    """A row per way; processor milliseconds are means of blocks."""
    rows, timings = [], [timing for timing, _ in found]
    for way in WAYS:
        own = [(timing, spent) for timing, spent in found if timing.variant == way]
        tokens = sum(timing.tokens for timing, _ in own)
        used: defaultdict[str, float] = defaultdict(float)
        for _, spent in own:
            for role, ms in spent.items():
                used[role if role in _SHOWN else "others"] += ms / len(own)
        rows.append(
            {"in flight": in_flight, "": way}
            | {"tokens/s": tokens / sum(timing.seconds for timing, _ in own)}
            | {f"{role}, ms": used[role] for role in (*_SHOWN, "others")}
            | ({} if way == NEITHER else asdict(paired_ratio(timings, way, NEITHER)))
        )
    return rows


def main() -> None:
    """Measure, write and show."""
    parser = arguments(__doc__, "quick", "target", "data", "out", target="smollm2")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--blocks", type=int, default=7, help="of each number in flight")
    parser.add_argument("--max-tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--port", type=int, default=8021)
    options = parsed(parser, None, blocks=4, max_tokens=48)
    keys = {
        "training.enabled": False,
        "target.max_num_seqs": max(16, *options.in_flight),
        "target.prefix_cache": False,  # each prompt comes four times
    }
    rows = list[dict[str, Any]]()
    tokenizer = load_tokenizer(find_models(options.target)[0])
    topics = [measured_prompts(options.data, topic, tokenizer) for topic in TOPICS]
    found = interleaved(topics)
    if len(found) < (needed := (options.blocks + 1) * sum(map(block_size, options.in_flight))):
        parser.error(f"{needed} prompts are needed, and {len(found)} are there: fewer --blocks")
    prompts = iter(found)
    with application(options.target, options.port, keys) as running:
        for in_flight in options.in_flight:
            timings = measure(running.base_url, prompts, in_flight, options)
            rows += summary(in_flight, timings)
    settings = written(options) | {"data": source_of(options.data)}
    write(options.out / "defaults.json", {"machine": machine(), "settings": settings, "rows": rows})
    show("Speed, and over neither drafts nor records", rows)


if __name__ == "__main__":
    main()
