"""Time to the first token of a growing conversation, turn by turn, with its prefix reused or not.

    make bench-conversation ARGS="--turns 12"

An agent sends its whole history on every turn, with the server's own answers in it, and adds a
question or a tool's output. Every turn is sent twice to one server, in turns first: with the same
first message as before, whose keys and values are in the prefix cache; and with another session
number in it, which makes all of the history new. Nothing is trained meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import pandas as pd
from clients import Reply, ask
from harness import (
    Timing,
    arguments,
    machine,
    paired_ratio,
    parsed,
    rotation,
    say,
    show,
    write,
    written,
)
from serving import application

from paceline.deploy.demo.prompts import generate

REUSED, NEW = "reused", "new"
_MS = 1e3
_TOPIC = "shell"  # of the questions
_LINES = 6  # of a tool's output, some 20 tokens each


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: the ``turn``-th of a conversation, by variant.

    Attributes:
        cached_tokens: of the prompt's, found in the prefix cache.
        ttft_s: from sending to the first event with tokens.
    """

    conversation: int
    turn: int
    variant: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def session(number: int) -> dict[str, Any]:
    """The first message; all numbers have as many digits."""
    text = f"Session {number:08d}. You operate a Linux machine. Answer with one command."
    return {"role": "system", "content": text}


def added(seed: int, turns: int) -> Iterator[list[dict[str, Any]]]:
    """The messages that a client adds before each turn: a question, or a tool's output."""
    rng, questions = random.Random(seed), generate(_TOPIC, turns, seed)
    for turn, question in enumerate(questions):
        if turn % 2 == 0:
            yield [{"role": "user", "content": question}]
            continue
        rows = (f"{rng.randrange(10**6)} -rw-r--r-- part-{n}.log" for n in range(_LINES))
        yield [{"role": "tool", "tool_call_id": f"call_{turn}", "content": "\n".join(rows)}]


async def request(http: httpx.AsyncClient, messages: list[dict[str, Any]], answer: int) -> Reply:
    """Stream the answer to a history.

    Raises:
        RuntimeError: there is no whole answer.
    """
    body = {
        "model": "paceline",
        "messages": messages,
        "max_tokens": answer,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    reply = await ask(http, body, Reply())
    if reply.error is not None or reply.first_token_at is None:
        raise RuntimeError(reply.error or "an answer has no token")
    return reply


async def converse(
    http: httpx.AsyncClient, conversation: int, options: argparse.Namespace
) -> list[Turn]:
    """Hold a conversation; it ends before it would exceed the context."""
    rng = random.Random(conversation)
    own, history, found = session(rng.randrange(10**8)), list[dict[str, Any]](), list[Turn]()
    for turn, messages in enumerate(added(conversation, options.turns)):
        history += messages
        size = (await http.post("/tokenize", json={"messages": [own, *history]})).json()
        if size["count"] + options.answer > size["max_model_len"]:
            say(f"conversation {conversation} ends after {turn} turns: the context is full")
            break
        for variant in rotation((REUSED, NEW), conversation + turn):
            first = own if variant == REUSED else session(rng.randrange(10**8))
            sent_at = time.monotonic()
            reply = await request(http, [first, *history], options.answer)
            assert reply.first_token_at is not None
            usage = reply.usage
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            ttft_s = reply.first_token_at - sent_at
            found.append(Turn(conversation, turn, variant, usage["prompt_tokens"], cached, ttft_s))
            if variant == REUSED:
                answered = {"role": "assistant", "content": reply.text}
        history.append(answered)
    return found


def table(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row per turn: means over conversations, and how often faster reuse makes it, paired."""
    rows = []
    for turn, own in pd.DataFrame(turns).groupby("turn"):
        means = own.groupby("variant")[["prompt_tokens", "cached_tokens", "ttft_s"]].mean()
        timings = [
            Timing(each.variant, each.conversation, "", 1, each.ttft_s)
            for each in turns
            if each.turn == turn
        ]
        gain = paired_ratio(timings, REUSED, NEW)
        rows.append(
            {
                "turn": int(str(turn)) + 1,
                "prompt tokens": means.prompt_tokens[REUSED],
                "cached": means.cached_tokens[REUSED],
                "cached, new": means.cached_tokens[NEW],
                "ttft ms": _MS * means.ttft_s[REUSED],
                "ttft ms, new": _MS * means.ttft_s[NEW],
                "times": gain.ratio,
                "low": gain.low,
                "high": gain.high,
            }
        )
    return rows


async def measure(url: str, options: argparse.Namespace) -> list[Turn]:
    """All conversations, after one that warms the server up."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await converse(http, options.conversations, options)
        return [
            turn
            for number in range(options.conversations)
            for turn in await converse(http, number, options)
        ]


def main() -> None:
    """Measure, print and write the file."""
    parser = arguments(__doc__, "quick", "target", "threads", "dtype", "out", target="smollm2")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--answer", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--port", type=int, default=8000)
    options = parsed(parser, None, turns=6, conversations=2)
    keys = {
        "target.dtype": options.dtype,
        "target.num_threads": options.threads,
        "training.enabled": False,
    }
    with application(options.target, options.port, keys) as running:
        turns = asyncio.run(measure(running.base_url, options))
    rows = table(turns)
    facts = {"machine": machine(), "settings": written(options)}
    turn_facts = [asdict(turn) for turn in turns]
    write(options.out / "conversation.json", facts | {"rows": rows, "turns": turn_facts})
    show("Time to the first token by turn, prefix reused and new", rows)


if __name__ == "__main__":
    main()
