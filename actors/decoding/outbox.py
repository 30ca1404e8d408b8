"""When streams get what was decoded: soon where few are open, later where many are.

A chunk costs its way through three processes, whatever is in it. Where sixteen streams get one
after every round, sending takes more of a CPU than decoding, and from the engine's own process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.actors.decoding.request import FAILED, GenerationChunk, joined

logger = logging.getLogger(__name__)

Deliver = Callable[[GenerationChunk], None]
_LONGEST_S = 0.05  # between two chunks of a stream: twenty a second still look like writing
_WHOLE_S = 1.0  # of an answer that nobody reads before its end


def interval_s(streams: int, chunks_per_s: float) -> float:
    """Seconds between two chunks of one stream: so many a second for all, but twenty for each.

    Args:
        streams: that somebody reads as they come.
        chunks_per_s: for all of them together; 0 sends every round's.
    """
    return min(streams / chunks_per_s, _LONGEST_S) if chunks_per_s else 0.0


@dataclass(slots=True)
class _Stream:
    deliver: Deliver
    whole: bool
    held: list[GenerationChunk] = field(default_factory=list)
    sent_at: float = float("-inf")


class Outbox:
    """Open streams, and what they are to get. The engine's thread alone uses it.

    A stream's first chunk goes out at once, so does its last with all that was held until then.
    """

    def __init__(
        self, chunks_per_s: float, clock: Callable[[], float], lost: Callable[[str], None]
    ) -> None:
        """No stream is open.

        Args:
            chunks_per_s: see :func:`interval_s`.
            clock: monotonic seconds.
            lost: hears of a stream whose ``deliver`` raised; it is closed.
        """
        self._chunks_per_s = chunks_per_s
        self._clock = clock
        self._lost = lost
        self._flushed_at = float("-inf")
        self._round_s = 0.0
        self._streams: dict[str, _Stream] = {}
        self._read = 0  # of these, those that are not whole

    @property
    def names(self) -> list[str]:
        """Of the open streams."""
        return list(self._streams)

    def __len__(self) -> int:
        """Streams that are open; any thread may ask."""
        return len(self._streams)

    def open(self, name: str, deliver: Deliver, *, whole: bool = False) -> None:
        """Take a stream on; ``whole`` ones are handed on once a second and at their end."""
        self.close(name)
        self._streams[name] = _Stream(deliver, whole)
        self._read += not whole

    def close(self, name: str) -> None:
        """Drop a stream and what it has not got; unknown ones are fine."""
        stream = self._streams.pop(name, None)
        self._read -= stream is not None and not stream.whole

    def put(self, name: str, chunk: GenerationChunk) -> None:
        """Hand a chunk on, now or with later ones; one with a finish reason closes its stream."""
        stream = self._streams.get(name)
        if stream is None:
            return
        ended = chunk.finish_reason is not None
        if ended:
            self.close(name)
        if chunk.finish_reason in FAILED and stream.held:
            self._send(name, stream)  # whoever goes on elsewhere has what came before
        stream.held.append(chunk)
        if ended or self._due(stream):
            self._send(name, stream)

    def flush(self) -> None:
        """Send what has been held long enough; call it after every round.

        Between two rounds nothing is sent: a chunk goes at that end of a round which is nearest to
        its time.
        """
        now = self._clock()
        self._round_s, self._flushed_at = now - self._flushed_at, now
        for name, stream in list(self._streams.items()):
            if stream.held and self._due(stream):
                self._send(name, stream)

    def _due(self, stream: _Stream) -> bool:
        least = interval_s(self._read, self._chunks_per_s)
        if stream.whole and self._chunks_per_s:
            least = _WHOLE_S
        early = min(self._round_s, least) / 2
        return self._clock() - stream.sent_at >= least - early

    def _send(self, name: str, stream: _Stream) -> None:
        """Whoever takes nothing any more ends its own request alone."""
        chunk, stream.held, stream.sent_at = joined(stream.held), [], self._clock()
        try:
            stream.deliver(chunk)
        except Exception:
            logger.warning("nobody takes what request %s gets", name, exc_info=True)
            self.close(name)
            self._lost(name)
