"""Purges that are remembered for a while, for records that arrive after one."""

from __future__ import annotations

from collections.abc import Callable

from paceline.actors.replay.record import belongs, source_id

_REMEMBERED_S = 3600.0
_AHEAD_S = 5.0  # that clocks of other hosts may be: rather lose records of just after a purge


class Purges:
    """The purges of the last hour; what they cover must not be stored any more.

    A replica that stops is asked for no purge, and hands over what it holds when it ends.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start without any; ``clock`` is unix seconds, as in the records."""
        self._clock = clock
        self._purges: dict[tuple[str | None, str | None], float] = {}  # answer and topic: when

    def add(self, request_id: str | None, topic: str | None = None) -> None:
        """Remember a purge of an answer (None: all) of a topic (None: all)."""
        now = self._clock()
        late = [key for key, at in self._purges.items() if at < now - _REMEMBERED_S]
        for key in late:
            del self._purges[key]
        self._purges[request_id, topic] = now

    def cover(self, request_id: str, topic: str, created: float) -> bool:
        """Whether a record was purged: its answer was, or all that was there at that time.

        Args:
            request_id: of the record.
            topic: of the record.
            created: unix seconds.
        """
        source = source_id(request_id)
        # `belongs` is false for all others.
        answers = (None, request_id, source, source.rpartition("-")[0])
        return any(
            (at := self._purges.get((answer, own))) is not None
            and belongs(request_id, answer)
            and (answer is not None or created <= at + _AHEAD_S)
            for answer in answers
            for own in (None, topic)
        )
