"""How full a target replica is: what its autoscaling goes by."""

from __future__ import annotations


def row_load(running: int, waiting: int, rows: int) -> float:
    """The load in full replicas; it rises with either count.

    A replica with a queue counts as full, however many of its rows run: what waits has no row, or
    no memory for keys and values.

    Args:
        running: requests being decoded.
        waiting: requests in the queue.
        rows: requests that may be decoded at once.

    Returns:
        0.0 for nothing, 1.0 for full, more with a queue: 2.0 where ``rows`` requests wait.
    """
    occupied = 1.0 if waiting else min(running / rows, 1.0)
    return occupied + waiting / rows
