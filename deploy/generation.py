"""Run the prompts of one request on the target, whole or streamed, and cancel them cleanly."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from paceline.actors.decoding.request import (
    FINISH_ABORT,
    FINISH_ERROR,
    GenerationChunk,
    GenerationRequest,
)
from paceline.deploy.errors import ApiError, internal, overloaded

logger = logging.getLogger(__name__)


def as_api_error(error: Exception) -> ApiError:
    """What a failure behind the front door means for the client."""
    if isinstance(error, ApiError):
        return error
    logger.warning("a request failed behind the front door: %r", error)
    if isinstance(error, BackPressureError):
        return overloaded("The server is overloaded; try again.")
    unavailable = (DeploymentUnavailableError, ReplicaUnavailableError, RayActorError)
    if isinstance(error, unavailable):
        return overloaded("The target is not available just now; try again.")
    if isinstance(error, RayError):
        return internal("The target failed on this request.")
    return internal("The server failed on this request.")


def _checked(chunk: GenerationChunk) -> GenerationChunk:
    if chunk.finish_reason in (FINISH_ERROR, FINISH_ABORT):
        raise internal("The target gave up on this request.")
    return chunk


def streaming(target: Any) -> Any:
    """The target's handle for streams.

    They go by gRPC, which costs half of what Ray's own calls do per chunk. Whole answers go by
    Ray: Serve does not carry the cancellation of a single gRPC call to the replica.
    """
    return target.options(stream=True, _by_reference=False)


async def complete_all(target: Any, requests: Sequence[GenerationRequest]) -> list[GenerationChunk]:
    """Every answer whole, run at once; the first failure ends the others.

    Raises:
        ApiError: where one of them failed.
    """
    try:
        if len(requests) == 1:
            return [_checked(await target.complete.remote(requests[0]))]
        tasks: list[asyncio.Task[GenerationChunk]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                tasks.append(group.create_task(_complete(target, request)))
        return [task.result() for task in tasks]
    except ApiError:
        raise
    except ExceptionGroup as group_error:
        raise as_api_error(_first(group_error)) from group_error
    except Exception as error:
        raise as_api_error(error) from error


async def _complete(target: Any, request: GenerationRequest) -> GenerationChunk:
    return _checked(await target.complete.remote(request))


def _first(error: BaseException) -> Exception:
    """The first error of a nest of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


async def _stream_one(
    streams: Any, request: GenerationRequest
) -> AsyncGenerator[GenerationChunk, None]:
    response = streams.generate.remote(request)
    finished = False
    try:
        async for chunk in response:
            yield _checked(chunk)
            finished = chunk.finish_reason is not None
    finally:
        if not finished:
            response.cancel()


async def stream_all(
    streams: Any, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """Pieces of every answer with the index of its choice, as they come.

    Closing the iterator cancels what still runs.

    Args:
        streams: the target's handle as :func:`streaming` makes it.
        requests: one per choice.

    Raises:
        ApiError: where one of them failed; the others are cancelled.
    """
    try:
        if len(requests) == 1:
            async with aclosing(_stream_one(streams, requests[0])) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
        else:
            async with aclosing(_merged(streams, requests)) as items:
                async for item in items:
                    yield item
    except ApiError:
        raise
    except Exception as error:
        raise as_api_error(error) from error


async def _merged(
    streams: Any, requests: Sequence[GenerationRequest]
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    queue: asyncio.Queue[tuple[int, GenerationChunk] | Exception | None] = asyncio.Queue()

    async def pump(index: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(_stream_one(streams, request)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(i, request)) for i, request in enumerate(requests)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
