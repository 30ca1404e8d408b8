"""Recorded answers of this replica, by topic, from which suffix drafts are taken.

In memory only and bounded. What replay would not hold is not here either: the caller adds recorded
answers alone, and retention and purges reach them. Requests with a ``cache_salt`` share with those
of the same salt alone, as in the prefix cache: how fast an answer comes says whether its text is
known.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.actors.replay.purges import Purges
from paceline.actors.replay.record import belongs
from paceline.actors.speculation.suffix.index import SEPARATOR, SuffixIndex

LEAST_TOKENS, TOPIC_TOKENS, ALL_TOKENS = 2**10, 2**17, 2**20  # 28 bytes each
_MAX_TEXTS = ALL_TOKENS // LEAST_TOKENS // 4
_MAX_POSITION = 2**30


@dataclass(frozen=True, slots=True)
class _Answer:
    """Where an answer lies in its index; ``created`` is in seconds."""

    request_id: str
    created: float
    start: int
    stop: int


@dataclass(slots=True)
class _Texts:
    """Answers of one topic and salt, the oldest first."""

    limit: int = LEAST_TOKENS
    index: SuffixIndex = field(init=False)
    answers: deque[_Answer] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.index = SuffixIndex(self.limit)

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.index.set_limit(limit)

    def halve(self) -> None:
        self.set_limit(self.limit // 2)
        self.forget_overwritten()

    def forget_overwritten(self) -> None:
        tail = self.index.tail
        while self.answers and self.answers[0].stop <= tail:
            self.answers.popleft()


class SuffixStore:
    """Answers by topic and salt. Thread-safe, but an index may only be read under ``lock``.

    Attributes:
        lock: held while the answers change.
    """

    def __init__(self, retention_s: float, clock: Callable[[], float]) -> None:
        """Start empty.

        Args:
            retention_s: age at which an answer is removed.
            clock: unix seconds.
        """
        self._retention_s = retention_s
        self._clock = clock
        self._purges = Purges(clock)
        self._texts: dict[tuple[str, str], _Texts] = {}  # the latest addition last
        self.lock = threading.RLock()

    @property
    def num_tokens(self) -> int:
        """Tokens for which there may be memory: at most ``ALL_TOKENS``."""
        with self.lock:
            return sum(texts.limit for texts in self._texts.values())

    def index(self, topic: str, salt: str) -> SuffixIndex | None:
        """Answers of a topic's requests with this salt; None without any."""
        texts = self._texts.get((topic, salt))
        return None if texts is None else texts.index

    def add(self, topic: str, salt: str, request_id: str, tokens: Sequence[int]) -> None:
        """Add an answer, with the tokens before it that a match may begin with.

        Not one that was purged by its id while it was generated.
        """
        with self.lock:
            now = self._clock()
            self._expire(now)
            if self._purges.cover(request_id, topic, now):
                return
            key = topic, salt
            texts = self._texts.pop(key, None)
            if texts is None or texts.index.end > _MAX_POSITION:
                while len(self._texts) >= _MAX_TEXTS:
                    del self._texts[next(iter(self._texts))]
                while self.num_tokens + LEAST_TOKENS > ALL_TOKENS:
                    self._largest().halve()
                texts = _Texts()
            self._texts[key] = texts
            given = [*tokens[-TOPIC_TOKENS + 1 :], SEPARATOR]
            self._grow(texts, len(given))
            texts.index.extend(given)
            stop = texts.index.end
            texts.answers.append(_Answer(request_id, now, stop - len(given), stop))
            texts.forget_overwritten()

    def remove(self, request_id: str | None, topic: str | None) -> int:
        """Remove an answer (None: all) of a topic (None: all); returns how many.

        Args:
            request_id: see ``replay.record.belongs``.
            topic: name.
        """
        with self.lock:
            if request_id is not None:
                self._purges.add(request_id, topic)
            return self._remove(
                lambda own, answer: topic in (None, own) and belongs(answer.request_id, request_id)
            )

    def expire(self) -> int:
        """Remove what is past its retention; returns how many answers."""
        with self.lock:
            return self._expire(self._clock())

    def _expire(self, now: float) -> int:
        oldest = now - self._retention_s
        if not any(t.answers and t.answers[0].created < oldest for t in self._texts.values()):
            return 0
        return self._remove(lambda _, answer: answer.created < oldest)

    def _remove(self, matches: Callable[[str, _Answer], bool]) -> int:
        removed = 0
        for key, texts in list(self._texts.items()):
            gone = [answer for answer in texts.answers if matches(key[0], answer)]
            for answer in gone:
                texts.index.erase(answer.start, answer.stop)
                texts.answers.remove(answer)
            removed += len(gone)
            if not texts.answers:
                del self._texts[key]
        return removed

    def _grow(self, texts: _Texts, more: int) -> None:
        """Double the memory of a text until ``more`` tokens fit, at the cost of the largest."""
        needed = texts.index.end - texts.index.tail + more
        while texts.limit < min(needed, TOPIC_TOKENS):
            if self.num_tokens + texts.limit > ALL_TOKENS:
                largest = self._largest()
                if largest.limit <= 2 * texts.limit:
                    return
                largest.halve()
            else:
                texts.set_limit(2 * texts.limit)

    def _largest(self) -> _Texts:
        return max(self._texts.values(), key=lambda own: own.limit)
