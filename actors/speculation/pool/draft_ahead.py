"""Whether drafting ahead pays: pure, from how often its assumption came true."""

from __future__ import annotations

from typing import Literal

DraftAhead = Literal["auto", "on", "off"]
_SMOOTHING = 0.05
_LEAST_HITS = 0.25
_LOOK_EVERY = 64


class AheadPolicy:
    """``auto`` drafts ahead while it comes true often enough, and looks again now and then.

    A guess that comes true saves a round its drafting; one that does not may keep the next
    question waiting until the drafting in progress is done.
    """

    def __init__(self, mode: DraftAhead, spare_cores: int, num_threads: int) -> None:
        """Decide what can be decided now.

        Args:
            mode: ``on`` always, ``off`` never; ``auto`` never without a core of its own.
            spare_cores: of this machine, those that the target does not compute on.
            num_threads: of the expert's forwards.
        """
        self._mode = mode
        self._possible = mode == "on" or (mode == "auto" and spare_cores >= num_threads)
        self._hit_rate = 0.5
        self._rounds = 0
        self.hits = 0
        self.misses = 0

    def outcome(self, came_true: bool) -> None:
        """Whether an assumed sequence is the one that came."""
        self.hits += came_true
        self.misses += not came_true
        self._hit_rate += _SMOOTHING * (came_true - self._hit_rate)

    def worthwhile(self) -> bool:
        """Whether to draft behind the answer that is given now; counts the rounds."""
        if not self._possible:
            return False
        self._rounds += 1
        if self._mode == "on" or self._hit_rate >= _LEAST_HITS:
            return True
        return self._rounds % _LOOK_EVERY == 0
