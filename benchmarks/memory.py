"""Requests of 512 tokens that fit in 1 GiB of KV cache, beside transformers' static cache.

    make bench-memory

Requests are admitted into a real engine (no drafts) until one has to wait, and answered to their
ends. The static cache is really allocated for one request.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from decoding import answers
from harness import arguments, machine, show, write, written
from models import find_models, load_engine
from transformers import AutoConfig, StaticCache

from paceline.actors.engine.engine import Engine
from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams

_MIB = 2**20
_ANSWER = 16  # tokens of a request that are its answer


def admitted(engine: Engine, vocab: int, count: int, tokens: int) -> dict[str, int]:
    """Run ``count`` requests of random tokens; those that ran at once before one had to wait.

    Raises:
        RuntimeError: all of them fit, or one was preempted.
    """
    rng, sampling = random.Random(7), SamplingParams(_ANSWER, temperature=0.0, ignore_eos=True)
    total, options = engine.kv_blocks[0], {"draft": DRAFT_OFF, "store": False}
    for number in range(count):
        prompt = tuple(rng.randrange(5, vocab) for _ in range(tokens - _ANSWER))
        engine.add(GenerationRequest(f"{number}", prompt, sampling, **options))
    engine.step()
    found = {"requests": engine.num_running, "blocks": total}
    found["blocks_held"] = total - engine.kv_blocks[1]
    if not engine.num_waiting or sum(1 for _ in answers(engine, [], 0)) < count:
        raise RuntimeError(f"all {count} requests fit: send more")
    if engine.preemptions:
        raise RuntimeError(f"{engine.preemptions} requests were preempted")
    return found


def static_bytes(config: Any, length: int, dtype: torch.dtype) -> int:
    """Bytes of transformers' static cache for one request, as its tensors have them."""
    cache = StaticCache(config=config, max_cache_len=length)
    heads, dim = config.num_key_value_heads, config.head_dim
    cache.early_initialization(
        batch_size=1, num_heads=heads, head_dim=dim, dtype=dtype, device=torch.device("cpu")
    )
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def main() -> None:
    """Measure, print and write the file."""
    parser = arguments(__doc__, "target", "dtype", "threads", "out")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512, help="of a request, answer included")
    parser.add_argument("--requests", type=int, default=200, help="more than fit")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    target, _ = find_models(options.target)
    own = {"dtype": options.dtype, "kv_cache_mb": options.mib, "max_num_seqs": 1024}
    engine, _, facts = load_engine({}, threads=options.threads, target=target, **own)
    config, dtype = AutoConfig.from_pretrained(target), getattr(torch, facts.dtype)
    count, tokens = options.requests, options.tokens
    rows = [{"cache": "Paceline", **admitted(engine, int(config.vocab_size), count, tokens)}]
    for length in (facts.max_model_len, tokens):
        fits = options.mib * _MIB // static_bytes(config, length, dtype)
        rows.append({"cache": f"static, {length} tokens", "requests": fits})
    figures = {"machine": machine(), "settings": written(options), "rows": rows}
    write(options.out / "memory.json", figures)
    show(f"Requests of {tokens} tokens in {options.mib} MiB, {facts['dtype']}", rows)


if __name__ == "__main__":
    main()
