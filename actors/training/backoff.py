"""Waiting for leave: often while it may come any moment, seldom where it has long been refused."""

from __future__ import annotations

from collections.abc import Callable

from paceline.actors.training.progress import Stopped

# Asking takes processor time of the board and of who asks, just where there is none to spare.
_OF_THE_WAITING = 1 / 16
_LONGEST_S = 0.04  # gaps of a busy hour are short, and all that there is then


def pause_s(waited_s: float, poll_s: float) -> float:
    """Seconds until the next question after so many of being refused.

    A sixteenth of them: what is missed of a gap is small beside what was waited for it. Never less
    than ``poll_s`` nor more than a 25th of a second, or ``poll_s`` where that is more.
    """
    return max(poll_s, min(_OF_THE_WAITING * waited_s, _LONGEST_S))


class Patience:
    """Asks for leave until it is given."""

    def __init__(
        self, poll_s: float, *, sleep: Callable[[float], object], stopped: Callable[[], bool]
    ) -> None:
        """Ask nothing yet.

        Args:
            poll_s: the shortest pause between two questions, seconds.
            sleep: waits some seconds.
            stopped: whether to end; looked at after every question.
        """
        self._poll_s = poll_s
        self._sleep = sleep
        self._stopped = stopped

    def until(self, granted: Callable[[], bool]) -> None:
        """Return once ``granted`` answers yes; what it raises goes on.

        Raises:
            Stopped: when told to end.
        """
        waited = 0.0
        while not granted():
            if self._stopped():
                raise Stopped
            pause = pause_s(waited, self._poll_s)
            self._sleep(pause)
            waited += pause
        if self._stopped():
            raise Stopped
