"""How many requests of 512 tokens fit in 1 GiB of keys and values, beside a static cache.

    make bench-memory

Requests are admitted into a real engine (embedded target, no drafts) until one has to wait, and
answered to their ends. The static cache is transformers' own, really allocated for one request.
Prints a table; all figures go to one JSON file.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import machine
import torch
from transformers import AutoConfig, StaticCache

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.deploy.config.config import MODELS_DIR

_MIB = 2**20
_SEED = 7


def requests(count: int, tokens: int, output: int, vocab: int) -> list[GenerationRequest]:
    """Different prompts of ``tokens - output`` random tokens, each with an answer of ``output``."""
    rng = random.Random(_SEED)
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return [
        GenerationRequest(
            f"r{i}",
            tuple(rng.randrange(5, vocab) for _ in range(tokens - output)),
            sampling,
            draft="off",
            store=False,
        )
        for i in range(count)
    ]


def admitted(engine: Engine, asked: list[GenerationRequest]) -> dict[str, Any]:
    """Run them all; how many ran at once before one had to wait, and what their blocks held.

    Raises:
        RuntimeError: where all of them fit, so that none had to wait, or one had to begin anew.
    """
    before, began = machine.rss_mib(), time.perf_counter()
    total = engine.kv_blocks[0]
    for request in asked:
        engine.add(request)
    engine.step()
    running, waiting = engine.num_running, engine.num_waiting
    if not waiting:
        raise RuntimeError(f"all {running} requests fit: ask for more")
    held, ended, most = total - engine.kv_blocks[1], 0, before
    while engine.has_work:
        ended += sum(output.chunk.finish_reason is not None for output in engine.step())
        most = max(most, machine.rss_mib())
    if ended != len(asked) or engine.preemptions:
        raise RuntimeError(f"{ended} of {len(asked)} ended, {engine.preemptions} began anew")
    return {
        "requests": running,
        "blocks": total,
        "blocks_held": held,
        "rss_mib_before": before,
        "rss_mib_most": most,
        "seconds": round(time.perf_counter() - began, 1),
    }


def unused(engine: Engine, count: int, longest: int, vocab: int) -> dict[str, float]:
    """What running requests hold and do not use, mean over requests and rounds.

    ``count`` requests of 32 to ``longest`` tokens, half of them answer, up to all at once.
    """
    rng = random.Random(_SEED)
    scheduler, kv = engine._scheduler, engine._runner.kv
    for i, length in enumerate(rng.randrange(32, longest + 1) for _ in range(count)):
        (one,) = requests(1, length, length // 2, vocab)
        engine.add(replace(one, request_id=f"u{i}"))
    empty, held = [], 0
    while engine.has_work:
        engine.step()
        for sequence in scheduler.running.values():
            if sequence.prefilled:
                positions = len(kv.blocks(scheduler.rows.row(sequence.request_id))) * kv.block_size
                # The newest token has no keys and values yet.
                empty.append(positions - (len(sequence.tokens) - 1))
                held += positions
    return {"positions": sum(empty) / len(empty), "share": sum(empty) / held}


def static_bytes(config: Any, length: int, dtype: torch.dtype) -> int:
    """Bytes of transformers' static cache for one request, as its tensors have them."""
    cache = StaticCache(config=config, max_cache_len=length)
    heads, dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(
        batch_size=1, num_heads=heads, head_dim=dim, dtype=dtype, device=torch.device("cpu")
    )
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    torch.set_num_threads(options.threads)
    facts = machine.facts()
    settings = TargetSettings(
        str(options.target),
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_seqs=options.rows,
        kv_cache_mb=options.mib,
        prefix_cache=False,
        seed=1,
    )
    engine, _, described = build_engine(settings)
    dtype = getattr(torch, described["dtype"])
    config = AutoConfig.from_pretrained(options.target)
    context, vocab = described["max_model_len"], int(config.vocab_size)
    budget = options.mib * _MIB
    sizes = {length: static_bytes(config, length, dtype) for length in (context, options.tokens)}
    asked = requests(options.requests, options.tokens, options.output, vocab)
    return {
        "mib": options.mib,
        "tokens": options.tokens,
        "dtype": described["dtype"],
        "block_size": described["kv_block_size"],
        "paceline": admitted(engine, asked),
        "unused": unused(engine, 32, options.tokens, vocab),
        "static": {
            str(length): {"bytes": size, "requests": budget // size}
            for length, size in sizes.items()
        },
        "context": context,
        "threads": options.threads,
        "machine": facts,
        "load_average_after": machine.facts()["load_average"],
    }


def table(found: dict[str, Any]) -> str:
    """The figures for people."""
    own, empty = found["paceline"], found["unused"]
    rows = [("Paceline", own["requests"])]
    for length, one in found["static"].items():
        rows.append((f"static cache of {length} tokens", one["requests"]))
    lines = [f"requests of {found['tokens']} tokens in {found['mib']} MiB, {found['dtype']}"]
    lines += [f"  {name:<28}{count:>6}" for name, count in rows]
    lines.append(f"blocks held: {own['blocks_held']} of {own['blocks']}")
    lines.append(f"unused: {empty['positions']:.1f} positions a request, {empty['share']:.1%}")
    lines.append(f"resident: {own['rss_mib_before']} MiB before, {own['rss_mib_most']} at most")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", type=Path, default=MODELS_DIR / "target")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of a request, answer included")
    parser.add_argument("--output", type=int, default=16, help="of them answer")
    parser.add_argument("--requests", type=int, default=200, help="more than fit")
    parser.add_argument("--rows", type=int, default=1024, help="requests at once but for memory")
    parser.add_argument("--out", type=Path, default=Path("out/bench/memory.json"))
    options = parser.parse_args()
    found = measure(options)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(table(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
