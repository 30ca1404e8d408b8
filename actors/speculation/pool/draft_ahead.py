"""When to draft ahead, by how often drafting ahead has hit."""

from __future__ import annotations

from typing import Literal

DraftAheadMode = Literal["auto", "on", "off"]
_SMOOTHING = 0.05
_MIN_HIT_RATE = 0.25
_PROBE_EVERY = 64  # responses


class DraftAheadPolicy:
    """Decides whether to draft ahead: with ``auto`` while it hits often enough, probing it rarely.

    A hit saves a round its drafting; a miss may delay the next request by the drafting in progress.
    """

    def __init__(self, mode: DraftAheadMode, spare_cores: int, num_threads: int) -> None:
        """Set the mode.

        Args:
            mode: ``on`` always, ``off`` never; ``auto`` never without spare cores.
            spare_cores: of this machine, those on which nothing else computes.
            num_threads: of the expert's forwards.
        """
        self._mode = mode
        self._possible = mode == "on" or (mode == "auto" and spare_cores >= num_threads)
        self._hit_rate = 0.5
        self._rounds = 0

    def record(self, hit: bool) -> None:
        """Record whether an assumed sequence is the one that came."""
        self._hit_rate += _SMOOTHING * (hit - self._hit_rate)

    def should_draft_ahead(self) -> bool:
        """Decide for one response."""
        if not self._possible:
            return False
        self._rounds += 1
        if self._mode == "on" or self._hit_rate >= _MIN_HIT_RATE:
            return True
        return self._rounds % _PROBE_EVERY == 0
