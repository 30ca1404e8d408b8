"""One expert as a target sees it: connection, circuit, what it knows, and how it did."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.actors.speculation.pool.circuit_breaker import ExpertCircuit
from paceline.actors.speculation.pool.connection import ExpertLink
from paceline.actors.speculation.pool.messages import (
    Answer,
    Ask,
    AskRow,
    Message,
    Ping,
    Pong,
    Release,
    WireError,
)
from paceline.actors.speculation.proposer import DraftRow

_ROUND_TRIPS = 512


class Peer:
    """The engine thread's own, but for ``wanting`` and :meth:`describe`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.link: ExpertLink | None = None
        self.circuit = ExpertCircuit()
        self.weight_versions: dict[str, int] = {}
        self.wanting = True  # set by the engine's thread, cleared by who brings a connection
        self.late = self._silent = self._lost = self._answered = self._unknown = self._ahead = 0
        self._sent: dict[str, int] = {}  # tokens of each sequence that were sent on this link
        self._pings = 0
        self._asked_at = 0.0
        self._round_trips: deque[float] = deque(maxlen=_ROUND_TRIPS)

    @property
    def sending(self) -> bool:
        """True where bytes wait for the kernel to take them."""
        return self.link is not None and self.link.sending

    def take(self, link: ExpertLink) -> None:
        """Use a new connection; the expert knows nothing of us on it."""
        if self.link is not None:
            self.link.close()
        self.link = link
        self.weight_versions = dict(link.weight_versions)
        self._sent.clear()
        self.circuit.connected()

    def lose(self) -> None:
        """The connection is gone; ask for another."""
        if self.link is not None:
            self.link.close()
            self._lost += 1
        self.link = None
        self._sent.clear()
        self.circuit.disconnected()
        self.wanting = True

    def silent(self, now: float) -> None:
        """No answer within the round's time."""
        self._silent += 1
        self.circuit.failed(now)

    def flush(self) -> None:
        """Send what the kernel did not take before; raises ChannelError."""
        if self.link is not None and self.link.sending:
            self.link.flush()

    def receive(self) -> list[Message]:
        """What has come; raises ChannelError and WireError."""
        return [] if self.link is None else self.link.receive()

    def ping(self) -> None:
        """Ask for a sign of life; raises ChannelError."""
        if self.link is not None:
            self._pings += 1
            self.link.send(Ping(self._pings))

    def pong(self, pong: Pong) -> None:
        """A sign of life; only that of the latest ping counts."""
        if self.link is not None and pong.number == self._pings and pong.epoch == self.link.epoch:
            self.weight_versions = dict(pong.weight_versions)
            self.circuit.pong()

    def release(self, request_id: str) -> None:
        """Tell of a sequence that has ended; raises ChannelError."""
        if self._sent.pop(request_id, None) is not None and self.link is not None:
            self.link.send(Release((request_id,)))

    def rows(self, rows: Sequence[DraftRow]) -> tuple[AskRow, ...]:
        """The rows as the expert has to hear them: new tokens only, where it knows the others."""
        asked = []
        for row in rows:
            base = self._sent.get(row.request_id, 0)
            asked.append(
                AskRow(
                    request_id=row.request_id,
                    draft=row.draft,
                    base=base,
                    tokens=tuple(row.tokens[base:]),
                    num_output=row.num_output,
                    num_draft_tokens=row.num_draft_tokens,
                    sampling=row.sampling if base == 0 else None,
                )
            )
            self._sent[row.request_id] = len(row.tokens)
        return tuple(asked)

    def ask(self, ask: Ask, now: float) -> None:
        """Send a round's question; raises ChannelError."""
        assert self.link is not None
        self._asked_at = now
        self.link.send(ask)

    def answers(self, answer: Answer, number: int) -> bool:
        """Whether an answer is that to the question of round ``number``."""
        return self.link is not None and answer.round == number and answer.epoch == self.link.epoch

    def accept(self, answer: Answer, rows: Sequence[DraftRow], vocab_size: int, now: float) -> None:
        """Take note of the answer to the present question.

        Raises:
            WireError: for an answer that cannot be one to these rows.
        """
        _check(answer, rows, vocab_size)
        for index in answer.unknown:
            self._sent.pop(rows[index].request_id, None)
        self._unknown += len(answer.unknown)
        self._ahead += answer.ahead
        self._answered += 1
        self._round_trips.append(now - self._asked_at)
        self.weight_versions = dict(answer.weight_versions)
        self.circuit.answered()

    def describe(self) -> dict[str, Any]:
        """State and counts, for people; times in milliseconds."""
        times = sorted(self._round_trips.copy())
        link = self.link
        return {
            "circuit": str(self.circuit.state),
            "connected": link is not None,
            "epoch": None if link is None else link.epoch,
            "answered": self._answered,
            "silent": self._silent,
            "lost": self._lost,
            "late": self.late,
            "sent_again": self._unknown,
            "from_ahead": self._ahead,
            "round_trip_p50_ms": _milliseconds(times, 0.5),
            "round_trip_p99_ms": _milliseconds(times, 0.99),
        }


def _milliseconds(times: list[float], share: float) -> float | None:
    return None if not times else round(1e3 * times[int(share * (len(times) - 1))], 3)


def _check(answer: Answer, rows: Sequence[DraftRow], vocab_size: int) -> None:
    """Refuse what would break the target's forward or its law.

    Raises:
        WireError: says what is wrong.
    """
    if len(answer.num_drafted) != len(rows):
        raise WireError("an answer to other rows")
    if any(not 0 <= index < len(rows) for index in answer.unknown):
        raise WireError("an answer about a row that was not asked")
    wanted = [row.num_draft_tokens for row in rows]
    steps = answer.token_ids.shape[1]
    if not ((answer.num_drafted >= 0) & (answer.num_drafted <= np.minimum(wanted, steps))).all():
        raise WireError("an answer with more tokens than were asked for")
    for ids in (answer.token_ids, answer.support_ids):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise WireError("a token outside the target's vocabulary")
    for probs in (answer.token_probs, answer.support_probs):
        if not ((probs >= 0.0) & (probs <= 1.0 + 1e-4)).all():  # False for NaN too
            raise WireError("something that is no probability")
