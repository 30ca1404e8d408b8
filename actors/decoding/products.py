"""Which of a CPU's two products with a weight is faster, by the number of rows: measured once.

oneDNN's with packed weights, or the one that torch takes by itself (MKL's in float32). Which one
wins is the processor's own: on AMD's the packed one does at every size, on an Intel Xeon without
bfloat16 the other is up to four times faster for the few rows of a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

_ROWS = (2, 3, 5, 9, 16)
_TRIALS = 5
_GAIN = 0.9  # of the packed one's time, below which the other is taken
_found: dict[tuple[int, ...], int] = {}


def plain_rows(
    weight: Tensor,
    packed: Callable[[Tensor], Tensor],
    clock: Callable[[], float] = time.perf_counter,
) -> int:
    """Most rows for which torch's own product is faster than the packed one; 0: for none.

    Measured once per size and number of threads in a process: weights of a size are alike.

    Args:
        weight: ``[out, in]``.
        packed: ``[N, in]`` to ``[N, out]`` with the packed weight.
        clock: seconds.
    """
    key = (*weight.shape, torch.get_num_threads())
    if key not in _found:
        _found[key] = _measured(weight, packed, clock)
    return _found[key]


def _measured(
    weight: Tensor, packed: Callable[[Tensor], Tensor], clock: Callable[[], float]
) -> int:
    most = 0
    for rows in _ROWS:
        x = torch.ones(rows, weight.shape[1], dtype=weight.dtype)
        seconds = [float("inf"), float("inf")]
        for _ in range(_TRIALS):  # in turns: a neighbour's load meets both
            for which, product in enumerate((lambda y: functional.linear(y, weight), packed)):
                began = clock()
                product(x)
                seconds[which] = min(seconds[which], clock() - began)
        if seconds[0] >= _GAIN * seconds[1]:
            break
        most = rows
    return most
