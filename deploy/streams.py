"""Server-sent events: a stream of chunks as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.actors.decoding.request import GenerationChunk
from paceline.deploy import answers
from paceline.deploy.errors import ApiError

Pieces = AsyncGenerator[tuple[int, GenerationChunk], None]


async def events(
    answer: answers.Answer,
    pieces: AsyncIterator[tuple[int, GenerationChunk]],
    topics: Sequence[str],
    prompt_tokens: int,
    include_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of an answer, ``[DONE]`` included; a late failure becomes an error event.

    Args:
        answer: what every event repeats.
        pieces: index of the choice and chunk, as they come.
        topics: topic of every choice.
        prompt_tokens: for the usage.
        include_usage: True to end with an event of the token counts.
    """
    completion_tokens = cached_tokens = 0
    opened: set[int] = set()
    try:
        async for index, chunk in pieces:
            if answer.chat and index not in opened:
                opened.add(index)
                yield answers.opening_event(answer, index)
            completion_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                cached_tokens += chunk.num_cached_tokens
            if chunk.text or chunk.finish_reason is not None or answer.token_ids:
                yield answers.piece_event(answer, index, chunk, topics[index])
    except ApiError as error:
        yield answers.error_event(error)
    else:
        if include_usage:
            yield answers.usage_event(answer, prompt_tokens, completion_tokens, cached_tokens)
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
