"""Drafts in the target's process against drafts in a pool, drafting ahead or not.

    make bench-placement ARGS="--quick"

Every expert of the pool is a process of its own, as Serve places it, without Serve. All variants
answer the same prompts, block by block in turns, with k by measured goodput or ``--tokens``.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from decoding import Block, Cell, Served, run_cell, summary
from expert_cache import DRAFT, TARGET, experts_dir, facts_of
from harness import arguments, interval, machine, say, show, write
from prompts import MAX_PROMPT_TOKENS, Prompt, bench_texts, encode

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.model_loader import load_tokenizer
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.speculation.pool.build import build_server
from paceline.actors.speculation.pool.connection import connect
from paceline.actors.speculation.pool.messages import Session
from paceline.actors.speculation.pool.proposer import PoolProposer
from paceline.actors.speculation.pool.settings import ExpertSettings
from paceline.actors.speculation.proposer import DraftRow
from paceline.actors.speculation.rejection_sampler import Proposal

PLAIN, COLOCATED, POOL, AHEAD = "plain", "colocated", "pool", "pool, ahead"
_START_S, _CONNECT_S, _ROUND_S = 120.0, 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run: ``blocks`` per topic, each of as many prompts as rows, at least 4."""

    topics: int
    batches: tuple[int, ...]
    blocks: int
    max_tokens: int


class NeverAhead(PoolProposer):
    """Proposer that forbids drafting ahead."""

    def propose(
        self, rows: Sequence[DraftRow], *, draft_ahead: bool = False, timeout_s: float | None = None
    ) -> Proposal:
        """See PoolProposer."""
        del draft_ahead
        return super().propose(rows, draft_ahead=False, timeout_s=timeout_s)


def serve_expert(settings: ExpertSettings, pipe: Any) -> None:
    """The expert's process: sends its sessions, and serves until the parent is gone."""
    server = build_server(settings, "127.0.0.1")
    pipe.send([server.open_session(name) for name in (POOL, AHEAD)])
    pipe.poll(None)  # the parent closes its end
    server.close()


@contextmanager
def pool_of(target: TargetSettings) -> Iterator[dict[str, dict[str, Session]]]:
    """An expert's process per draft; yields expert to its sessions by name."""
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for expert in target.drafts:
        settings = ExpertSettings(
            expert=expert,
            target=target,
            max_sequences=2 * target.max_num_seqs,
            target_cores=target.num_threads,
            other_cores=len(target.drafts) - 1,
            device="cpu",
            draft_ahead="on",
        )
        pipes[expert], theirs = spawn.Pipe()
        process = spawn.Process(target=serve_expert, args=(settings, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
    try:
        found = {}
        for expert, pipe in pipes.items():
            if not pipe.poll(_START_S):
                raise RuntimeError(f"the expert {expert} does not come up")
            found[expert] = {session.name: session for session in pipe.recv()}
        yield found
    finally:
        for pipe in pipes.values():
            pipe.close()
        for process in processes:
            process.join(10)


def attached(
    proposer: PoolProposer, sessions: Mapping[str, Mapping[str, Session]], name: str
) -> Any:
    """The proposer, connected to every expert."""
    for expert, own in sessions.items():
        proposer.attach(expert, *connect(own[name], _CONNECT_S))
    return proposer


def make_proposer(cls: type[PoolProposer], settings: TargetSettings) -> PoolProposer:
    """One that waits long: a busy machine must not decide what is compared."""
    config = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))
    return cls(
        list(settings.drafts),
        device=torch.device("cpu"),
        vocab_size=int(config["vocab_size"]),
        round_timeout_s=_ROUND_S,
        clock=time.monotonic,
    )


def run_batch(
    variants: Sequence[Served], prompts: Mapping[str, Sequence[Prompt]], plan: Plan, batch: int
) -> dict[str, Any]:
    """Figures of every variant at one batch size, with ratios to colocated."""
    size = max(4, batch)
    parts = [
        (topic, tuple(own[at * size : (at + 1) * size]))
        for at in range(plan.blocks)
        for topic, own in prompts.items()
    ]
    # The first block warms up, and teaches the controller.
    blocks = [Block(0, *parts[0]), *(Block(i, *part) for i, part in enumerate(parts, start=1))]
    outcome = run_cell(Cell(batch, 0.0), variants, blocks, plan.max_tokens)
    pairs = [(variant.name, COLOCATED) for variant in variants]
    figures = summary(Cell(batch, 0.0), outcome, pairs, PLAIN)
    rows = [
        {"variant": name, "tokens/s": own["tokens_per_s"]}
        | {"to colocated": interval(figures["ratios"][f"{name} / {COLOCATED}"])}
        | {"accepted": outcome.drafted[name].accepted, "differ": own["answers_that_differ"]}
        for name, own in figures["variants"].items()
    ]
    show(f"Batch {batch}", rows)
    return figures


def bench(options: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """Measure everything."""
    texts = dict(list(bench_texts().items())[: plan.topics])
    prompts = encode(load_tokenizer(TARGET), texts)
    folder = experts_dir(options.out, None)
    trained = all(facts_of(folder / topic) is not None for topic in prompts)
    drafts = {topic: str(folder / topic if trained else DRAFT) for topic in prompts}
    settings = TargetSettings(
        str(TARGET),
        drafts,
        dtype=options.dtype,
        device="cpu",
        num_threads=options.threads,
        max_num_seqs=max(plan.batches),
        num_speculative_tokens=options.tokens,
        max_model_len=MAX_PROMPT_TOKENS + plan.max_tokens + 16,
        prefix_cache=False,
        seed=1,
    )
    say(f"drafts: {'trained experts' if trained else 'the general one'}")
    plain, _, _ = build_engine(replace(settings, drafts={}, num_speculative_tokens=0))
    colocated, _, _ = build_engine(settings)
    torch.set_num_threads(options.threads)
    with pool_of(settings) as sessions:
        proposers = {POOL: make_proposer(NeverAhead, settings)}
        proposers[AHEAD] = make_proposer(PoolProposer, settings)
        variants = [Served(PLAIN, plain, 0), Served(COLOCATED, colocated, None)]
        for name, proposer in proposers.items():
            engine, _, _ = build_engine(settings, attached(proposer, sessions, name))
            variants.append(Served(name, engine, None))
        batches = {str(batch): run_batch(variants, prompts, plan, batch) for batch in plan.batches}
        experts = {name: proposer.stats() for name, proposer in proposers.items()}
    return {
        "machine": machine(),
        "plan": asdict(plan),
        "tokens": options.tokens,
        "trained_experts": trained,
        "batches": batches,
        "experts": experts,
    }


def main() -> None:
    """Measure, print, write."""
    parser = arguments(__doc__, "quick", "dtype", "out")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2))
    parser.add_argument("--tokens", type=int, help="draft so many; default: by goodput")
    options = parser.parse_args()
    plan = Plan(2, (1, 8), 1, 24) if options.quick else Plan(4, (1, 8), 6, 64)
    write(options.out / "placement.json", bench(options, plan))


if __name__ == "__main__":
    main()
