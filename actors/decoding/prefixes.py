"""Prompts that begin like an answered one: its keys and values are copied, not computed again.

The rows that no request runs in keep those of finished requests. They are on loan: a request that
is admitted takes its row whatever lies in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


class FinishedRows:
    """Which free row holds the keys and values of which tokens; the oldest used goes first."""

    def __init__(self, rows: int, least: int = 16) -> None:
        """Begin with nothing.

        Args:
            rows: all rows, those of running requests included.
            least: tokens in common below which a copy is not worth it.
        """
        self._rows = rows
        self._least = least
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def find(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The row that shares most with a prompt, and how many tokens; None where it is too few."""
        shared = {row: common_prefix(prompt, tokens) for row, tokens in self._tokens.items()}
        row = max(shared, key=shared.__getitem__, default=None)
        if row is None or shared[row] < self._least:
            return None
        self._tokens.move_to_end(row)
        return row, shared[row]

    def taken(self, row: int) -> None:
        """A request is going to run in this row."""
        self._tokens.pop(row, None)

    def keep(self, tokens: Sequence[int], running: int) -> int | None:
        """Choose a row for a finished request's tokens.

        Args:
            tokens: those whose keys and values there are.
            running: rows 0..running-1 are in use.

        Returns:
            the row to copy to, None where it is not worth it or there is none.
        """
        if len(tokens) < self._least or running >= self._rows:
            return None
        for held, known in list(self._tokens.items()):
            if common_prefix(known, tokens) == len(known):  # the new one says all that it says
                del self._tokens[held]
        # The last rows are the last that requests take.
        free = (row for row in range(self._rows - 1, running - 1, -1) if row not in self._tokens)
        row = next(free, None)
        if row is None:
            row, _ = self._tokens.popitem(last=False)
        self._tokens[row] = tuple(tokens)
        return row
