"""Experts behind real sockets, and engines that draft with them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from engines import DEVICE, MAX_LEN, TOKENIZER, served
from tiny_models import tiny_llama

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.engine.settings import EngineSettings
from paceline.actors.speculation.draft_runner import DraftRunner
from paceline.actors.speculation.experts import ExpertStack
from paceline.actors.speculation.goodput import GoodputPolicy
from paceline.actors.speculation.pool.connection import connect
from paceline.actors.speculation.pool.draft_ahead import DraftAheadMode, DraftAheadPolicy
from paceline.actors.speculation.pool.drafter import Drafter
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.pool.server import ExpertServer
from paceline.actors.speculation.suffix.arm import SuffixArm

VOCAB = 300
DRAFT_SEEDS = {"a": 2, "b": 3}  # those of engines.make_engine


def make_drafter(
    expert: str = "a",
    *,
    draft_ahead: DraftAheadMode = "off",
    rows: int = 8,
    support: int = 16,
    seed: int = 0,
    chunk: int = 256,
    positions: int | None = None,
    candidate: bool = False,
    vocab: int = VOCAB,
) -> Drafter:
    names = [expert, f"{expert}@0", *([f"{expert}@candidate"] if candidate else [])]
    models = [served(tiny_llama(DRAFT_SEEDS[expert], layers=1, vocab=vocab)) for _ in names]
    runner = ModelRunner(models, rows, MAX_LEN, positions, vocab_size=VOCAB)
    stack = ExpertStack(runner, names, rows, chunk)
    return Drafter(
        stack,
        support=support,
        generator=torch.Generator(DEVICE).manual_seed(seed),
        max_sequences=rows,
        epoch=seed + 1,
        draft_ahead=DraftAheadPolicy(draft_ahead, 2, 1),
    )


@contextlib.contextmanager
def serving(
    experts: tuple[str, ...] = ("a", "b"), *, host: str | None = None, **options: Any
) -> Iterator[dict[str, ExpertServer]]:
    """Servers of this process, one per expert."""
    servers = {
        name: ExpertServer(make_drafter(name, **options), num_threads=1, host=host)
        for name in experts
    }
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


def make_proposer(experts: tuple[str, ...] = ("a", "b"), timeout_s: float = 10.0) -> PoolProposer:
    return PoolProposer(
        experts,
        device=DEVICE,
        vocab_size=VOCAB,
        round_timeout_s=timeout_s,
        clock=time.monotonic,
    )


def attached(
    servers: Mapping[str, ExpertServer], client: str = "test", timeout_s: float = 10.0
) -> PoolProposer:
    """A proposer with a connection to every server."""
    proposer = make_proposer(tuple(servers), timeout_s)
    for name, server in servers.items():
        proposer.attach(name, *connect(server.open_session(client), 10.0))
    return proposer


def pool_engine(
    proposer: PoolProposer,
    *,
    k: int | None = 4,
    target_seed: int = 1,
    target_layers: int = 2,
    canary_share: float = 0.0,
    policy: GoodputPolicy | None = None,
    suffixes: SuffixArm | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Engine:
    """engines.make_engine, but for where the drafts are."""
    target = served(tiny_llama(target_seed, layers=target_layers, vocab=VOCAB))
    settings = EngineSettings(
        4,
        MAX_LEN,
        k,
        8,
        8,
        frozenset({2}),
        canary_share=canary_share,
        suffix_drafts=suffixes is not None,
    )
    return Engine(
        runner=ModelRunner([target], 4, MAX_LEN),
        draft_runner=DraftRunner(proposer, policy, target.device, clock, suffixes),
        tokenizer=TOKENIZER,
        settings=settings,
        generator=torch.Generator(target.device).manual_seed(0),
        now=lambda: 1234.5,
    )


class ExpertProcess:
    """An expert's server in a process of its own; writes its session to its standard output."""

    def __init__(self, expert: str = "a") -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, expert],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert self._process.stdout is not None
        facts = json.loads(self._process.stdout.readline())
        self.session = Session(
            facts["name"], bytes.fromhex(facts["key"]), bytes.fromhex(facts["unix"]), None, None
        )

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


def _main(expert: str) -> None:
    with serving((expert,)) as servers:
        session = servers[expert].open_session("parent")
        facts = {"name": session.name, "key": session.key.hex(), "unix": session.unix.hex()}
        print(json.dumps(facts), flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _main(sys.argv[1])
