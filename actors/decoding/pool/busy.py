"""The share of time in which something is done."""

from __future__ import annotations

from collections.abc import Callable


class BusyShare:
    """From a growing count of busy seconds to the share of them since the last look."""

    def __init__(self, busy_s: Callable[[], float], clock: Callable[[], float]) -> None:
        """Begin now.

        Args:
            busy_s: seconds busy since some beginning, never fewer than before.
            clock: seconds, monotonic.
        """
        self._busy_s = busy_s
        self._clock = clock
        self._last = (busy_s(), clock())
        self._share = 0.0

    def look(self) -> float:
        """The share since the last look, 0 to 1; that of the last one where no time has passed."""
        busy_s, now = self._busy_s(), self._clock()
        before_s, at = self._last
        if now > at:
            self._share = min(max((busy_s - before_s) / (now - at), 0.0), 1.0)
            self._last = (busy_s, now)
        return self._share
