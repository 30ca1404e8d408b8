"""Requests of 512 tokens that fit in 1 GiB of KV cache, beside transformers' static cache.

    make bench-memory

Requests are admitted into a real engine (small target, no drafts) until one has to wait, and
answered to their ends. The static cache is really allocated for one request.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from expert_cache import TARGET
from harness import arguments, machine, rss_mib, show, write
from transformers import AutoConfig, StaticCache

from paceline.actors.engine.build import build_engine
from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings

_MIB = 2**20
_SEED = 7


def requests(count: int, tokens: int, output: int, vocab: int) -> list[GenerationRequest]:
    """Prompts of ``tokens - output`` random tokens, each with an answer of ``output``."""
    rng = random.Random(_SEED)
    sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    prompts = [tuple(rng.randrange(5, vocab) for _ in range(tokens - output)) for _ in range(count)]
    return [
        GenerationRequest(f"r{i}", prompt, sampling, draft="off", store=False)
        for i, prompt in enumerate(prompts)
    ]


def admitted(engine: Engine, sent: list[GenerationRequest]) -> dict[str, Any]:
    """Run them all; requests that ran at once before one had to wait, and their blocks.

    Raises:
        RuntimeError: all of them fit, or one was preempted.
    """
    before, began = rss_mib(), time.perf_counter()
    total = engine.kv_blocks[0]
    for request in sent:
        engine.add(request)
    engine.step()
    running = engine.num_running
    if not engine.num_waiting:
        raise RuntimeError(f"all {running} requests fit: send more")
    held, ended, most = total - engine.kv_blocks[1], 0, before
    while engine.has_work:
        ended += sum(output.chunk.finish_reason is not None for output in engine.step())
        most = max(most, rss_mib())
    if ended != len(sent) or engine.preemptions:
        raise RuntimeError(f"{ended} of {len(sent)} ended, {engine.preemptions} preempted")
    return {
        "requests": running,
        "blocks": total,
        "blocks_held": held,
        "rss_mib_before": before,
        "rss_mib_most": most,
        "seconds": round(time.perf_counter() - began, 1),
    }


def unused(engine: Engine, count: int, longest: int, vocab: int) -> dict[str, float]:
    """Positions that running requests hold and do not use, mean over requests and rounds.

    ``count`` requests of 32 to ``longest`` tokens, half of them answer.
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
    facts = machine()
    settings = TargetSettings(
        str(options.target),
        dtype=options.dtype,
        num_threads=options.threads,
        max_num_seqs=1024,
        kv_cache_mb=options.mib,
        prefix_cache=False,
        seed=1,
    )
    engine, _, described = build_engine(settings)
    dtype = getattr(torch, described.dtype)
    config = AutoConfig.from_pretrained(options.target)
    context, vocab = described.max_model_len, int(config.vocab_size)
    sizes = {length: static_bytes(config, length, dtype) for length in (context, options.tokens)}
    sent = requests(options.requests, options.tokens, options.output, vocab)
    return {
        "mib": options.mib,
        "tokens": options.tokens,
        "dtype": described.dtype,
        "block_size": described.kv_block_size,
        "paceline": admitted(engine, sent),
        "unused": unused(engine, 32, options.tokens, vocab),
        "static": {
            str(length): {"bytes": size, "requests": options.mib * _MIB // size}
            for length, size in sizes.items()
        },
        "context": context,
        "threads": options.threads,
        "machine": facts,
    }


def main() -> None:
    """Measure, print and write the file."""
    parser = arguments(__doc__, "dtype", "threads")
    parser.add_argument("--target", type=Path, default=TARGET)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of a request, answer included")
    parser.add_argument("--output", type=int, default=16, help="of them answer")
    parser.add_argument("--requests", type=int, default=200, help="more than fit")
    parser.add_argument("--out", type=Path, default=Path("out/bench/memory.json"))
    options = parser.parse_args()
    found = measure(options)
    write(options.out, found)
    rows = [{"cache": "Paceline", **found["paceline"], **found["unused"]}]
    rows += [
        {"cache": f"static, {length} tokens", "requests": one["requests"]}
        for length, one in found["static"].items()
    ]
    show(f"Requests of {found['tokens']} tokens in {found['mib']} MiB, {found['dtype']}", rows)


if __name__ == "__main__":
    main()
