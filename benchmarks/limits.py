"""How near a forward of the target is to what this processor can do.

    .venv/bin/python benchmarks/limits.py --target smollm2 --threads 2

Two limits are measured in the same run: reading memory from end to end, and products in registers
(of floats, or dot products or tiles of bfloat16 where those are faster). A forward must read every
weight once, as it is packed, and multiply it with every row, and read the keys and values of every
row's context; all else is not counted, so the share of the limit is a lower bound. Each time is the
best of several, all sizes in turns.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from harness import arguments, machine, show, write, written
from models import find_models

from paceline.actors.engine import native
from paceline.actors.engine.fused import FusedDecoder
from paceline.actors.engine.model_loader import load_causal_lm, target_dtype
from paceline.actors.engine.model_runner import ModelRunner
from paceline.actors.processor import has_tiles
from paceline.actors.speculation.profiling import stepper

_SOURCE = Path(__file__).with_name("limits.cpp")
_KERNELS = Path(native.__path__[0])  # whose vectors it uses
_READ = 2**29  # bytes, more than any cache
_ROUNDS = 2_000_000
# (rows, new tokens of each): decoding, rounds that verify drafts, prompts
SIZES = ((1, 1), (1, 4), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (1, 64), (1, 128))


class Limits:
    """The two limits of this processor with some threads."""

    def __init__(self, threads: int) -> None:
        """Compile them."""
        compiler = shutil.which("c++") or shutil.which("g++")
        assert compiler is not None, "needs a C++ compiler"
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/limits.so"
            flags = ["-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", f"-I{_KERNELS}"]
            flags += ["-DTILES"] if has_tiles() else []
            subprocess.run([compiler, *flags, str(_SOURCE), "-o", library], check=True)
            own = ctypes.CDLL(library)
        self._products = own.multiply_add, own.dot_products, own.tile_products
        self._read = own.read_all
        for products in self._products:
            products.argtypes = [ctypes.c_int64, ctypes.c_float, ctypes.c_void_p]
            products.restype = ctypes.c_int64
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._read.restype = ctypes.c_uint64
        self._pool, self._threads = ThreadPoolExecutor(threads), threads
        self._memory = np.ones(_READ, dtype=np.uint8)

    def _rate(self, work: Callable[[int], int]) -> float:
        """Sum of what all threads do at once, per second."""
        began = time.perf_counter()
        done = sum(self._pool.map(work, range(self._threads)))
        return done / (time.perf_counter() - began)

    def flops(self) -> float:
        """Floating point operations per second, of floats, dot products or tiles: the most."""
        sums = [ctypes.c_float(0.0) for _ in range(self._threads)]

        def rate(products: Any) -> float:
            return self._rate(lambda i: int(products(_ROUNDS, 1.0, ctypes.byref(sums[i]))))

        return max(map(rate, self._products))

    def bandwidth(self) -> float:
        """Bytes per second."""
        part = _READ // self._threads // 256 * 256

        def read(i: int) -> int:
            self._read(self._memory.ctypes.data + i * part, part // 64)
            return part

        return self._rate(read)


class Needs(NamedTuple):
    """What a forward needs at least.

    Attributes:
        token_s: seconds of a token's products.
        weights_s: seconds of reading the weights.
        row_s: seconds of reading a row's keys and values.
    """

    token_s: float
    weights_s: float
    row_s: float


def row_of(rows: int, tokens: int, seconds: float, needs: Needs) -> dict[str, Any]:
    """A line of the table.

    Args:
        rows: of the batch.
        tokens: new ones of each row.
        seconds: of the forward.
        needs: see Needs.
    """
    compute_s = rows * tokens * needs.token_s
    read_s = needs.weights_s + rows * needs.row_s
    return {
        "rows": rows,
        "tokens": tokens,
        "ms": 1e3 * seconds,
        "reading_ms": 1e3 * read_s,
        "products_ms": 1e3 * compute_s,
        "of_limit": max(read_s, compute_s) / seconds,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = arguments(__doc__, "target", "dtype", "threads", "out", target="smollm2", threads=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--context", type=int, default=96, help="cached positions of each row")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    device = torch.device("cpu")
    path = find_models(options.target)[0]
    model = load_causal_lm(path, target_dtype(options.dtype, device, path), device)
    most_rows, most = max(r for r, _ in SIZES), max(t for _, t in SIZES)
    runner = ModelRunner([model], most_rows, options.context + most)
    if not isinstance(runner.decoder, FusedDecoder):
        raise SystemExit(f"{options.target} is not run by the C++ kernels")
    linears = list(runner.decoder.linears())
    operations = 2.0 * sum(own.weight[0].numel() for own in linears)
    nbytes = sum(own.packed(0).packed.nbytes for own in linears)
    cached = (*runner.kv.keys, *runner.kv.values)
    for part in cached:
        part.normal_()  # else all of its pages are the same one of zeros, in the cache
    before, limits, run = machine(), Limits(options.threads), stepper(runner, options.context)
    flops = bandwidth = 0.0
    best = dict.fromkeys(SIZES, float("inf"))
    with torch.inference_mode():
        for _ in range(options.repeats):
            flops, bandwidth = max(flops, limits.flops()), max(bandwidth, limits.bandwidth())
            for rows, tokens in SIZES:
                run(rows, tokens, 1)  # the caches are as after the same size
                began = time.perf_counter()
                run(rows, tokens, 1)
                best[rows, tokens] = min(best[rows, tokens], time.perf_counter() - began)
                for row in range(rows):
                    runner.kv.free(row)
    row_bytes = options.context * sum(part[0, 0].nbytes for part in cached)
    needs = Needs(operations / flops, nbytes / bandwidth, row_bytes / bandwidth)
    table = [row_of(rows, tokens, seconds, needs) for (rows, tokens), seconds in best.items()]
    figures = {
        "machine": before,
        "load_average_after": machine()["load_average"],
        "settings": written(options),
        "dtype": str(model.dtype),
        "gflop_per_s": flops / 1e9,
        "gb_per_s": bandwidth / 1e9,
        "weights_mb": nbytes / 1e6,
        "gflop_per_token": operations / 1e9,
        "forwards": table,
    }
    write(options.out / "limits.json", figures)
    show("Limits", [{k: v for k, v in figures.items() if isinstance(v, float)}])
    show("Forwards", table)


if __name__ == "__main__":
    main()
