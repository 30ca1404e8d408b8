"""Paceline's engine without HTTP, Ray and events: reads blocks of prompts, writes their timings.

A line of JSON on stdin per block: prompts, lengths, temperature, at_once. A line on stdout:
the replies' fields.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from decoding import drive
from harness import say
from peers.load import Reply

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.deploy.config.config import load_config
from paceline.deploy.config.replica_settings import target_settings
from paceline.deploy.draft_store import fetch_models


def answer(engine: Engine, block: dict[str, Any]) -> list[Reply]:
    """Replies to a block's prompts, in order."""
    began = time.monotonic()
    replies = [Reply(began) for _ in block["prompts"]]
    waiting = iter(replies[block["at_once"] :])
    sampling = partial(SamplingParams, temperature=block["temperature"], ignore_eos=True)
    asked = zip(block["prompts"], block["lengths"], strict=True)
    requests = [
        GenerationRequest(str(index), tuple(prompt), sampling(length))
        for index, (prompt, length) in enumerate(asked)
    ]
    for output in drive(engine, requests, block["at_once"]):
        reply = replies[int(output.request_id)]
        if output.chunk.token_ids:
            reply.events.append(time.monotonic())
            reply.tokens += len(output.chunk.token_ids)
            reply.first_tokens = reply.first_tokens or reply.tokens
        if output.chunk.finish_reason is not None:
            following = next(waiting, None)
            if following is not None:
                following.sent = time.monotonic()
    return replies


def main(argv: Sequence[str]) -> None:
    config = fetch_models(load_config(Path(argv[0])), say)
    engine, _, _ = build_engine(target_settings(config))
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        replies = answer(engine, json.loads(line))
        print(json.dumps([asdict(reply) for reply in replies]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
