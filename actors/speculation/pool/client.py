"""A target's client of one expert: connection, circuit breaker, cached tokens, statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TypedDict

import numpy as np

from paceline.actors.speculation.pool.circuit_breaker import CircuitBreaker
from paceline.actors.speculation.pool.connection import Connection
from paceline.actors.speculation.pool.hidden_states import RowReader, num_states, state_bytes
from paceline.actors.speculation.pool.messages import (
    DraftRequest,
    DraftRequestRow,
    DraftResponse,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Release,
    Welcome,
)
from paceline.actors.speculation.proposer import DraftRow

_MAX_ROUND_TRIPS = 512
# Hidden states in one request: a long prompt's are many megabytes, and travel in parts.
_MAX_STATE_BYTES = 1 << 23


class ExpertStats(TypedDict):
    """State and counts of an expert, as seen by one target.

    Attributes:
        circuit: see CircuitState.
        connected: whether there is a connection.
        epoch: of the expert's process; None without a connection.
        answered: responses in time.
        silent: rounds without a response in time.
        lost: connections.
        late: responses dropped.
        sent_again: sequences that the expert did not know.
        from_ahead: rows served from tokens drafted ahead.
        round_trip_p50_ms: from request to response, drafting included; None before the first.
        round_trip_p99_ms: likewise.
    """

    circuit: str
    connected: bool
    epoch: int | None
    answered: int
    silent: int
    lost: int
    late: int
    sent_again: int
    from_ahead: int
    round_trip_p50_ms: float | None
    round_trip_p99_ms: float | None


class ExpertClient:
    """Client of one expert. Sending and receiving raise ConnectionLostError.

    Used by the engine's thread; other threads may read ``needs_connection`` and :meth:`stats`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.connection: Connection | None = None
        self.circuit = CircuitBreaker()
        self.weight_versions: dict[str, int] = {}
        self.needs_connection = True  # set by the engine's thread, cleared when one is attached
        self.late = self._timeouts = self._lost = self._answered = 0
        self._unknown_rows = self._ahead_hits = 0
        self._epoch = self._hidden_size = 0
        self._num_sent: dict[str, int] = {}  # tokens sent over this connection, by sequence
        self._pings = 0
        self._requested_at = 0.0  # seconds
        self._round_trips_s: deque[float] = deque(maxlen=_MAX_ROUND_TRIPS)

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for the kernel to take them."""
        return self.connection is not None and self.connection.has_unsent

    def connect(self, connection: Connection, welcome: Welcome) -> None:
        """Use a new connection; the server has no sequences on it."""
        if self.connection is not None:
            self.connection.close()
        self.connection = connection
        self._epoch, self._hidden_size = welcome.epoch, welcome.hidden_size
        self.weight_versions = dict(welcome.weight_versions)
        self._num_sent.clear()
        self.circuit.on_connect()

    def disconnect(self) -> None:
        """Drop a lost connection and request another."""
        if self.connection is not None:
            self.connection.close()
            self._lost += 1
        self.connection = None
        self._num_sent.clear()
        self.circuit.on_disconnect()
        self.needs_connection = True

    def on_timeout(self, now: float) -> None:
        """Note that no response came within the round's time."""
        self._timeouts += 1
        self.circuit.on_timeout(now)

    def flush(self) -> None:
        """Send what the kernel did not take before."""
        if self.connection is not None and self.connection.has_unsent:
            self.connection.flush()

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; raises ProtocolError too."""
        return [] if self.connection is None else self.connection.receive()

    def ping(self) -> None:
        """Send a ping."""
        if self.connection is not None:
            self._pings += 1
            self.connection.send(Ping(self._pings))

    def on_pong(self, pong: Pong) -> None:
        """Take a pong; only that of the latest ping counts."""
        if pong.number == self._pings and pong.epoch == self._epoch:
            self.weight_versions = dict(pong.weight_versions)
            self.circuit.on_pong()

    def release(self, request_id: str) -> None:
        """Have the server release a sequence."""
        if self._num_sent.pop(request_id, None) is not None and self.connection is not None:
            self.connection.send(Release((request_id,)))

    def request(
        self,
        round_number: int,
        rows: Sequence[DraftRow],
        draft_ahead: bool,
        now: float,
        read_states: RowReader | None = None,
    ) -> None:
        """Send a round's request: of every row only the tokens that the server lacks.

        Args:
            round_number: of the round.
            rows: see Proposer.
            draft_ahead: see DraftRequest.
            now: monotonic seconds.
            read_states: the target's hidden states, which go to an expert that reads them.
        """
        assert self.connection is not None
        read = read_states if self._hidden_size else None
        request_rows = []
        left = 0 if read is None else _MAX_STATE_BYTES // state_bytes(self._hidden_size)
        for row in rows:
            start = self._num_sent.get(row.request_id, 0)
            stop = len(row.tokens) if read is None else min(len(row.tokens), start + left)
            left -= stop - start
            states = num_states(start, stop - start)
            request_rows.append(
                DraftRequestRow(
                    request_id=row.request_id,
                    draft=row.draft,
                    num_cached_tokens=start,
                    tokens=tuple(row.tokens[start:stop]),
                    num_output=row.num_output,
                    num_draft_tokens=row.num_draft_tokens if stop == len(row.tokens) else 0,
                    sampling=row.sampling if start == 0 else None,
                    hidden=read(row.target_row, stop - 1 - states, stop - 1)
                    if read is not None and states
                    else b"",
                )
            )
            self._num_sent[row.request_id] = stop
        self._requested_at = now
        self.connection.send(DraftRequest(round_number, tuple(request_rows), draft_ahead))

    def is_response(self, response: DraftResponse, round_number: int) -> bool:
        """Return whether a response is for the given round and from the present process."""
        return response.round == round_number and response.epoch == self._epoch

    def on_response(
        self, response: DraftResponse, rows: Sequence[DraftRow], vocab_size: int, now: float
    ) -> None:
        """Check and note the response to the latest request.

        Raises:
            ProtocolError: it does not fit these rows.
        """
        _validate(response, rows, vocab_size)
        for index in response.unknown_rows:
            self._num_sent.pop(rows[index].request_id, None)
        self._unknown_rows += len(response.unknown_rows)
        self._ahead_hits += response.num_ahead_hits
        self._answered += 1
        self._round_trips_s.append(now - self._requested_at)
        self.weight_versions = dict(response.weight_versions)
        self.circuit.on_response()

    def stats(self) -> ExpertStats:
        """Return state and counts."""
        times_s = sorted(self._round_trips_s.copy())
        connected = self.connection is not None
        return {
            "circuit": str(self.circuit.state),
            "connected": connected,
            "epoch": self._epoch if connected else None,
            "answered": self._answered,
            "silent": self._timeouts,
            "lost": self._lost,
            "late": self.late,
            "sent_again": self._unknown_rows,
            "from_ahead": self._ahead_hits,
            "round_trip_p50_ms": _quantile_ms(times_s, 0.5),
            "round_trip_p99_ms": _quantile_ms(times_s, 0.99),
        }


def _quantile_ms(times_s: list[float], share: float) -> float | None:
    return None if not times_s else round(1e3 * times_s[int(share * (len(times_s) - 1))], 3)


def _validate(response: DraftResponse, rows: Sequence[DraftRow], vocab_size: int) -> None:
    """Reject what would break the target's forward or its output distribution.

    Raises:
        ProtocolError: with the reason.
    """
    if len(response.num_drafted) != len(rows):
        raise ProtocolError("a response to other rows")
    if any(not 0 <= index < len(rows) for index in response.unknown_rows):
        raise ProtocolError("a response about a row that was not requested")
    limits = [min(row.num_draft_tokens, response.token_ids.shape[1]) for row in rows]
    if not ((response.num_drafted >= 0) & (response.num_drafted <= np.array(limits, int))).all():
        raise ProtocolError("a response with more tokens than requested")
    for ids in (response.token_ids, response.support_ids):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise ProtocolError("a token outside the target's vocabulary")
    for probs in (response.token_probs, response.support_probs):
        if not ((probs >= 0.0) & (probs <= 1.0 + 1e-4)).all():  # False for NaN too
            raise ProtocolError("a value that is not a probability")
