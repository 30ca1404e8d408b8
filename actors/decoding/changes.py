"""What is changed about the drafts between two rounds, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import torch

Change = Callable[[], Iterator[None] | None]
_DONE = object()


class Changes:
    """A queue of changes. One that takes long comes in parts, and those behind it wait."""

    def __init__(self) -> None:
        """Begin with nothing to do."""
        self._queue: deque[Change] = deque()
        self._parts: Iterator[None] | None = None

    def __bool__(self) -> bool:
        """Whether there is something to do."""
        return self._parts is not None or bool(self._queue)

    def add(self, change: Change) -> None:
        """Queue a change; one that gives an iterator is done when that ends."""
        self._queue.append(change)

    @torch.inference_mode()
    def carry_out(self, *, busy: bool) -> None:
        """Carry out what is queued.

        Args:
            busy: requests run and wait for it: of a change in parts only one is done.
        """
        while self:
            if self._parts is None:
                self._parts = self._queue.popleft()()
            elif next(self._parts, _DONE) is _DONE:
                self._parts = None
            elif busy:
                return
