"""Stream a response as server-sent events in OpenAI's format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from paceline.actors.engine.request import GenerationChunk
from paceline.deploy.api.response_builder import (
    DONE,
    ChatDeltas,
    ResponseContext,
    UsageCounter,
    chunk_event,
    delta_event,
    error_event,
    role_event,
    usage_event,
)
from paceline.deploy.api.response_schemas import Delta, Usage
from paceline.deploy.errors import ApiError, timed_out
from paceline.deploy.monitoring.outcomes import note_failure

IndexedChunk = tuple[int, GenerationChunk]  # with the index of its choice
ChunkStream = AsyncGenerator[IndexedChunk, None]

PREFETCH_TIMEOUT_S = 1.0  # longest delay of the headers for an error that still sets the status
KEEPALIVE_INTERVAL_S = 2.0
KEEPALIVE = b": waiting\n\n"
_LAST_EVENTS_S = 5.0  # to send a timeout's own event


async def sse_events(
    context: ResponseContext, chunks: AsyncIterator[IndexedChunk]
) -> AsyncGenerator[bytes, None]:
    """The events of a response, ``[DONE]`` included; a late failure becomes an error event.

    Args:
        context: what all events have in common.
        chunks: of all choices, as they come.
    """
    usage = UsageCounter(context)
    messages: dict[int, ChatDeltas] = {}
    started: set[int] = set()

    def total() -> Usage | None:
        return usage.usage() if context.continuous_usage else None

    try:
        async for index, chunk in chunks:
            if context.chat and index not in messages:
                messages[index] = ChatDeltas(context, index)
                yield role_event(context, index, total())
            usage.add(index, chunk)
            deltas: list[Delta] = []
            if context.chat:
                deltas, chunk = messages[index].read(chunk)
                for early in deltas[:-1]:
                    yield delta_event(context, index, early, total())
            details = (
                context.token_ids or chunk.logprobs is not None or chunk.token_sources is not None
            )
            has_text = bool(deltas if context.chat else chunk.text)
            if has_text or chunk.finish_reason is not None or (chunk.token_ids and details):
                delta = deltas[-1] if deltas else None
                first = index not in started
                event = partial(
                    chunk_event, context, index, chunk, total(), first=first, delta=delta
                )
                # A prompt has many log-probabilities: other streams go on meanwhile.
                large = chunk.prompt_logprobs is not None
                yield await asyncio.to_thread(event) if large else event()
                started.add(index)
    except ApiError as error:
        note_failure(error.status)
        yield error_event(error)
    else:
        if context.include_usage:
            yield usage_event(context, usage.usage())
    yield DONE


class PrefetchedStream:
    """A chunk stream with its first chunk fetched, or being fetched in a task; see `prefetch`.

    Attributes:
        pending: True if the first chunk had not come when the stream was handed over.
    """

    def __init__(self, chunks: ChunkStream, first: asyncio.Future[IndexedChunk]) -> None:
        self._chunks = chunks
        self._first: asyncio.Future[IndexedChunk] | None = first
        self.pending = not first.done()

    def __aiter__(self) -> PrefetchedStream:
        return self

    async def __anext__(self) -> IndexedChunk:
        if self._first is None:
            return await anext(self._chunks)
        try:
            return await self._first
        finally:
            self._first = None

    async def aclose(self) -> None:
        """Cancel what still runs."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._chunks.aclose()


async def prefetch(chunks: ChunkStream, timeout_s: float = PREFETCH_TIMEOUT_S) -> PrefetchedStream:
    """Wait for the first chunk, but not for long.

    A request that fails at once then sets the HTTP status, and a request that waits does not
    delay the response's headers.

    Raises:
        ApiError: the first chunk is a failure that came in time.
    """
    first = asyncio.ensure_future(anext(chunks))
    stream = PrefetchedStream(chunks, first)
    try:
        await asyncio.wait([first], timeout=timeout_s)
        if first.done():
            first.result()
    except BaseException:
        await stream.aclose()
        raise
    stream.pending = not first.done()
    return stream


async def with_deadline(chunks: ChunkStream, deadline: float) -> ChunkStream:
    """The same chunks, cancelled at the deadline, a time of the running loop's clock.

    Raises:
        ApiError: 504 at the deadline.
    """
    try:
        while True:
            timeout = asyncio.timeout_at(deadline)
            try:
                async with timeout:
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                if not timeout.expired():
                    raise
                raise timed_out() from error
            yield chunk
    finally:
        await chunks.aclose()


@asynccontextmanager
async def deadline_scope(deadline: float) -> AsyncIterator[None]:
    """Cancel the block at the deadline, a time of the running loop's clock.

    Raises:
        ApiError: 504 at the deadline.
    """
    timeout = asyncio.timeout_at(deadline)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if not timeout.expired():
            raise
        raise timed_out() from error


class EventStreamResponse(StreamingResponse):
    """A response of server-sent events that cleans up at the end, on failure and on disconnect.

    It sends comments while there are no events: proxies and clients close silent connections.
    A client that does not read what it is sent keeps nothing open for long after the deadline.

    Args:
        events: of the response.
        chunks: the events' source; closed at the end.
        on_close: called once, at the end.
        deadline: of the chunks, a time of the running loop's clock.
        keepalive_interval_s: longest silence before a comment.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        chunks: PrefetchedStream,
        on_close: Callable[[], None],
        deadline: float,
        keepalive_interval_s: float = KEEPALIVE_INTERVAL_S,
    ) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._events = events
        self._chunks = chunks
        self._on_close = on_close
        self._deadline = deadline
        self._keepalive_interval_s = keepalive_interval_s
        self._sent_at = 0.0  # of the loop's clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response.

        Raises:
            ClientDisconnect: the client is gone, or does not read.
        """
        timeout = asyncio.timeout_at(self._deadline + _LAST_EVENTS_S)
        try:
            async with timeout:
                await super().__call__(scope, receive, send)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise ClientDisconnect from error
        finally:
            self._on_close()
            await asyncio.shield(self._close())

    async def stream_response(self, send: Send) -> None:
        """Send headers, events and keep-alive comments."""
        loop = asyncio.get_running_loop()
        keepalive: asyncio.Task[None] | None = None

        async def timestamped_send(message: Message) -> None:
            nonlocal keepalive
            if not message.get("more_body", True) and keepalive is not None:
                keepalive.cancel()  # before the end: no comment may follow it
            await send(message)
            self._sent_at = loop.time()
            if message["type"] == "http.response.start":
                keepalive = asyncio.create_task(self._keep_alive(send))

        try:
            await super().stream_response(timestamped_send)
        finally:
            if keepalive is not None:
                keepalive.cancel()

    async def _keep_alive(self, send: Send) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0 if self._chunks.pending else self._sent_at + self._keepalive_interval_s
        while True:
            if loop.time() >= due:
                await send({"type": "http.response.body", "body": KEEPALIVE, "more_body": True})
                self._sent_at = loop.time()
            due = self._sent_at + self._keepalive_interval_s
            await asyncio.sleep(due - loop.time())

    async def _close(self) -> None:
        await self._events.aclose()
        await self._chunks.aclose()
