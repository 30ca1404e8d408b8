"""Server-sent events: a stream of chunks as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.actors.decoding.request import GenerationChunk
from paceline.deploy import answers
from paceline.deploy.errors import ApiError, timed_out
from paceline.deploy.monitoring.outcomes import note_failure

Pieces = AsyncGenerator[tuple[int, GenerationChunk], None]


async def events(
    answer: answers.Answer,
    pieces: AsyncIterator[tuple[int, GenerationChunk]],
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, ``[DONE]`` included; a late failure becomes an error event.

    Args:
        answer: what every event repeats.
        pieces: index of the choice and chunk, as they come.
        include_usage: True to end with an event of the token counts.
    """
    tally = answers.Tally(answer)
    opened: set[int] = set()
    try:
        async for index, chunk in pieces:
            if answer.chat and index not in opened:
                opened.add(index)
                yield answers.opening_event(answer, index)
            tally.add(index, chunk)
            told = answer.token_ids or chunk.logprobs is not None or chunk.origins is not None
            tokens = bool(chunk.token_ids) and told
            if chunk.text or chunk.finish_reason is not None or tokens:
                yield answers.piece_event(answer, index, chunk)
    except ApiError as error:
        note_failure(error.status)
        yield answers.error_event(error)
    else:
        if include_usage:
            yield answers.usage_event(answer, tally.usage())
    yield answers.DONE


async def started(pieces: Pieces) -> Pieces:
    """The same pieces, of which the first has already come.

    A request that fails at once can so be answered by its HTTP status.

    Raises:
        ApiError: where the first piece is a failure.
    """
    first = await anext(pieces)

    async def rest() -> Pieces:
        try:
            yield first
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()

    return rest()


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
    """A stream of events that tidies up however it ends: read out, failed or client gone."""

    def __init__(
        self, content: AsyncGenerator[bytes, None], pieces: Pieces, on_close: Callable[[], None]
    ) -> None:
        """Stream ``content``; at the end close ``pieces`` behind it and call ``on_close``."""
        super().__init__(
            content,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._content = content
        self._pieces = pieces
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
            await asyncio.shield(self._close())

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
