"""Server-sent events: a stream of chunks as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from paceline.actors.engine.request import GenerationChunk
from paceline.deploy.api.response_builder import (
    DONE,
    ResponseContext,
    UsageCounter,
    chunk_event,
    error_event,
    role_event,
    usage_event,
)
from paceline.deploy.errors import ApiError, timed_out
from paceline.deploy.monitoring.outcomes import note_failure

Pieces = AsyncGenerator[tuple[int, GenerationChunk], None]

PATIENCE_S = 1.0  # the longest that headers wait for what may still be an HTTP error
SILENT_S = 2.0
WAITING = b": waiting\n\n"


async def events(
    answer: ResponseContext,
    pieces: AsyncIterator[tuple[int, GenerationChunk]],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, ``[DONE]`` included; a late failure becomes an error event.

    Args:
        answer: what every event repeats.
        pieces: index of the choice and chunk, as they come.
        include_usage: True to end with an event of the token counts.
    """
    tally = UsageCounter(answer)
    opened: set[int] = set()
    try:
        async for index, chunk in pieces:
            if answer.chat and index not in opened:
                opened.add(index)
                yield role_event(answer, index)
            tally.add(index, chunk)
            told = answer.token_ids or chunk.logprobs is not None or chunk.token_sources is not None
            tokens = bool(chunk.token_ids) and told
            if chunk.text or chunk.finish_reason is not None or tokens:
                yield chunk_event(answer, index, chunk)
    except ApiError as error:
        note_failure(error.status)
        yield error_event(error)
    else:
        if include_usage:
            yield usage_event(answer, tally.usage())
    yield DONE


class Started:
    """Pieces of which the first has come, or is awaited in a task of its own."""

    def __init__(self, pieces: Pieces, first: asyncio.Future[tuple[int, GenerationChunk]]) -> None:
        """Go on with ``pieces`` after ``first``; :func:`started` does."""
        self._pieces = pieces
        self._first: asyncio.Future[tuple[int, GenerationChunk]] | None = first
        self.waiting = not first.done()

    def __aiter__(self) -> Started:
        """These pieces."""
        return self

    async def __anext__(self) -> tuple[int, GenerationChunk]:
        """The next piece."""
        if self._first is None:
            return await anext(self._pieces)
        try:
            return await self._first
        finally:
            self._first = None

    async def aclose(self) -> None:
        """Cancel what still runs."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._pieces.aclose()


async def started(pieces: Pieces, within_s: float = PATIENCE_S) -> Started:
    """The same pieces, once the first has come, or that long has passed.

    A request that fails at once can so be answered by its HTTP status, and one that waits does
    not keep its client without an answer.

    Raises:
        ApiError: where the first piece is a failure that came in time.
    """
    first = asyncio.ensure_future(anext(pieces))
    begun = Started(pieces, first)
    try:
        await asyncio.wait([first], timeout=within_s)
        if first.done():
            first.result()
    except BaseException:
        await begun.aclose()
        raise
    begun.waiting = not first.done()
    return begun


async def timed(pieces: Pieces, deadline: float) -> Pieces:
    """The same pieces, until a time of the running loop's clock; then they are cancelled.

    Raises:
        ApiError: 504 where the deadline comes before the end.
    """
    try:
        while True:
            limit = asyncio.timeout_at(deadline)
            try:
                async with limit:
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise timed_out() from error
            yield piece
    finally:
        await pieces.aclose()


class EventStream(StreamingResponse):
    """A stream of events that tidies up however it ends: read out, failed or client gone.

    While no event comes, comments do: proxies and clients give up on a silent connection.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        pieces: Started,
        on_close: Callable[[], None],
        silent_s: float = SILENT_S,
    ) -> None:
        """Stream ``content``; at the end close ``pieces`` behind it and call ``on_close``.

        Args:
            content: the events.
            pieces: what they are made of.
            on_close: called once.
            silent_s: seconds without an event that a comment breaks.
        """
        super().__init__(
            content,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._content = content
        self._pieces = pieces
        self._on_close = on_close
        self._silent_s = silent_s
        self._sent_at = 0.0  # of the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
            await asyncio.shield(self._close())

    async def stream_response(self, send: Send) -> None:
        """Send headers, events and, in between, comments."""
        loop = asyncio.get_running_loop()
        commenting: asyncio.Task[None] | None = None

        async def noted(message: Message) -> None:
            nonlocal commenting
            if not message.get("more_body", True) and commenting is not None:
                commenting.cancel()  # nothing comes after the end
            await send(message)
            self._sent_at = loop.time()
            if message["type"] == "http.response.start":
                commenting = asyncio.create_task(self._comment(send))

        try:
            await super().stream_response(noted)
        finally:
            if commenting is not None:
                commenting.cancel()

    async def _comment(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0 if self._pieces.waiting else self._sent_at + self._silent_s
        while True:
            if loop.time() >= due:
                await send({"type": "http.response.body", "body": WAITING, "more_body": True})
                self._sent_at = loop.time()
            due = self._sent_at + self._silent_s
            await asyncio.sleep(due - loop.time())

    async def _close(self) -> None:
        await self._content.aclose()
        await self._pieces.aclose()


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """Cancel what runs inside at a time of the loop's clock; it becomes a 504."""
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise timed_out() from error
