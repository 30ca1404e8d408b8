"""ASGI middleware that counts generation requests by outcome and measures their latency."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.deploy.errors import CLIENT_GONE

OK, CANCELLED = "ok", "cancelled"
REFUSED, RATE_LIMITED, OVERLOADED = "refused", "rate_limited", "overloaded"
TIMED_OUT, FAILED = "timed_out", "failed"
OUTCOMES = (OK, CANCELLED, REFUSED, RATE_LIMITED, OVERLOADED, TIMED_OUT, FAILED)

_COUNTED = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses"})
_MAX_LATENCIES = 4096  # between two exports; more drop the oldest


@dataclass(slots=True)
class _Progress:
    """A running request.

    Attributes:
        status: HTTP's, None before the answer starts.
        complete: the answer was sent to its end.
    """

    status: int | None = None
    complete: bool = False


_PROGRESS: ContextVar[_Progress | None] = ContextVar("paceline_request", default=None)


def note_failure(status: int) -> None:
    """Record that the current request's stream ends with an error, despite its HTTP status of 200.

    Args:
        status: of the error.
    """
    progress = _PROGRESS.get()
    if progress is not None:
        progress.status = status


def request_outcome(status: int | None, complete: bool) -> str:
    """One of `OUTCOMES`; a client that disconnects is not a failure.

    Args:
        status: HTTP's, None if the answer had not started.
        complete: the answer was sent to its end.
    """
    if status in (None, CLIENT_GONE) or (status < 400 and not complete):
        return CANCELLED
    if status < 400:
        return OK
    known = {429: RATE_LIMITED, 503: OVERLOADED, 504: TIMED_OUT}
    return known.get(status, REFUSED if status < 500 else FAILED)


class Outcomes:
    """Generation requests since the start.

    Args:
        clock: monotonic seconds.

    Attributes:
        counts: by outcome.
        latencies: seconds from the request to the end of its answer, of ``ok`` ones; the reader
            removes them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.counts: Counter[str] = Counter()
        self.latencies: deque[float] = deque(maxlen=_MAX_LATENCIES)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def finish(self, outcome: str, started_at: float) -> None:
        """Count a request that has ended."""
        self.counts[outcome] += 1
        if outcome == OK:
            self.latencies.append(self._clock() - started_at)


class OutcomeMiddleware:
    """Count every generation request in :class:`Outcomes`; passes all messages on unchanged."""

    def __init__(self, app: ASGIApp, outcomes: Outcomes) -> None:
        self._app = app
        self._outcomes = outcomes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request."""
        counted = scope["type"] == "http" and scope["path"] in _COUNTED
        if not counted or scope["method"] == "OPTIONS":  # a browser's preflight
            await self._app(scope, receive, send)
            return
        progress, started_at = _Progress(), self._outcomes.now()

        async def watched_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                progress.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                progress.complete = True

        token = _PROGRESS.set(progress)
        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            # the outer layer sends the error
            progress.status = CLIENT_GONE if isinstance(error, ClientDisconnect) else 500
            raise
        finally:
            _PROGRESS.reset(token)
            self._outcomes.finish(request_outcome(progress.status, progress.complete), started_at)
