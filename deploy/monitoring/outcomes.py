"""What became of the requests for answers, and how long they took: an ASGI layer that counts."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.deploy.api.request_parser import is_disconnect
from paceline.deploy.errors import CLIENT_GONE

OK, CANCELLED = "ok", "cancelled"
REFUSED, RATE_LIMITED, OVERLOADED = "refused", "rate_limited", "overloaded"
TIMED_OUT, FAILED = "timed_out", "failed"
OUTCOMES = (OK, CANCELLED, REFUSED, RATE_LIMITED, OVERLOADED, TIMED_OUT, FAILED)

_COUNTED = frozenset({"/v1/completions", "/v1/chat/completions"})
_MOST_LATENCIES = 4096  # that nobody has taken; the oldest go


@dataclass(slots=True)
class _Note:
    """What is known of a request while it runs: its HTTP status, and whether all was sent."""

    status: int | None = None
    complete: bool = False


_NOTE: ContextVar[_Note | None] = ContextVar("paceline_request", default=None)


def note_failure(status: int) -> None:
    """A stream that has begun ends with an error, which its HTTP status does not tell.

    Args:
        status: that it would have had.
    """
    note = _NOTE.get()
    if note is not None:
        note.status = status


def outcome_of(status: int | None, complete: bool) -> str:
    """One of `OUTCOMES`.

    Args:
        status: HTTP's, None where the answer had not begun.
        complete: whether the answer was sent to its end; a client that goes away is not a failure.
    """
    if status in (None, CLIENT_GONE) or (status < 400 and not complete):
        return CANCELLED
    if status < 400:
        return OK
    named = {429: RATE_LIMITED, 503: OVERLOADED, 504: TIMED_OUT}
    return named.get(status, REFUSED if status < 500 else FAILED)


class Outcomes:
    """Requests for answers since the start.

    Attributes:
        counts: by outcome.
        latencies: seconds from the request to the end of its answer, of those that were ``ok``;
            whoever reads them takes them out.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Begin at zero; ``clock`` gives monotonic seconds."""
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=_MOST_LATENCIES)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def ended(self, outcome: str, began: float) -> None:
        """A request has come to its end."""
        self.counts[outcome] += 1
        if outcome == OK:
            self.latencies.append(self._clock() - began)


class OutcomeMiddleware:
    """Tells :class:`Outcomes` of every request for an answer; passes everything on unchanged."""

    def __init__(self, app: ASGIApp, outcomes: Outcomes) -> None:
        """Wrap ``app``."""
        self._app = app
        self._outcomes = outcomes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on one request."""
        if scope["type"] != "http" or scope["path"] not in _COUNTED:
            await self._app(scope, receive, send)
            return
        note, began = _Note(), self._outcomes.now()

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                note.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                note.complete = True

        token = _NOTE.set(note)
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            # the layer around this one answers, where there is somebody
            note.status = CLIENT_GONE if is_disconnect(error) else 500
            raise
        finally:
            _NOTE.reset(token)
            self._outcomes.ended(outcome_of(note.status, note.complete), began)
