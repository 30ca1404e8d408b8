"""Run the prompts of one request on the target, whole or streamed, and cancel them cleanly.

A replica that dies, hangs or gives up is replaced by another that goes on
(:mod:`paceline.deploy.api.failover`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from paceline.actors.engine.request import GenerationChunk, GenerationRequest, merge_chunks
from paceline.deploy.api.failover import Failover, Failure, Resumption
from paceline.deploy.errors import ApiError, internal, overloaded

logger = logging.getLogger(__name__)

_LEAVING_S = 1.0


def as_api_error(error: Exception) -> ApiError:
    """What a failure behind the front door means for the client."""
    if isinstance(error, ApiError):
        return error
    logger.warning("a request failed behind the front door: %r", error)
    if isinstance(error, BackPressureError):
        return overloaded("The server is overloaded; try again.")
    if isinstance(error, DeploymentUnavailableError):
        return overloaded("The target is not available just now; try again.")
    return internal("The server failed on this request.")


def failure_of(error: Exception) -> Failure | None:
    """What an exception of a replica's stream says of the replica; None: nothing.

    Measured on Ray 2.60: a stream by gRPC ends with ActorUnavailableError within 20 ms of its
    replica's death, a stopped process gives nothing at all. The errors of gRPC itself, other
    than "unavailable", come unwrapped, and so does what the replica's own code raises.
    """
    if isinstance(error, RayTaskError):
        return Failure.BROKEN  # raised by the replica's own code
    if isinstance(error, BackPressureError | DeploymentUnavailableError):
        return None
    if isinstance(error, RayError | ReplicaUnavailableError | OSError):  # TimeoutError is one
        return Failure.GONE
    return Failure.GONE if type(error).__name__ == "AioRpcError" else Failure.BROKEN


def streaming(target: Any) -> Any:
    """The target's handle for answers, whole ones too.

    They go by gRPC, which costs half of what Ray's own calls do per chunk, and as streams: Serve
    does not carry the cancellation of a single gRPC call to the replica, and only a stream gives
    signs of life.
    """
    return target.options(stream=True, _by_reference=False)


async def _attempt(
    response: Any, state: Resumption
) -> AsyncGenerator[GenerationChunk | Failure, None]:
    """What one replica gives for a request; the failure, if there is one, comes last."""
    try:
        while not state.finished:
            piece: GenerationChunk | Failure | None = await _next(response, state.stall_timeout_s)
            if isinstance(piece, GenerationChunk):
                piece = state.take(piece, time.monotonic())
            if piece is not None:
                yield piece
            if isinstance(piece, Failure):
                return
    finally:
        if not state.finished:
            response.cancel()


async def _next(response: Any, timeout_s: float) -> GenerationChunk | Failure:
    """The next chunk of a replica, or what its absence means."""
    try:
        async with asyncio.timeout(timeout_s):
            chunk: GenerationChunk | None = await anext(response, None)
    except (asyncio.CancelledError, TaskCancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # Where a client leaves, Serve may cancel the calls for its request some turns of the loop
        # before that request: the cancellation then comes in here, and no replica has failed.
        await asyncio.sleep(_LEAVING_S)
        logger.warning("a replica has cancelled a stream")  # nobody here has
        return Failure.GONE
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        logger.warning("a replica is %s: %r", failure.name.lower(), error)
        return failure
    return Failure.GONE if chunk is None else chunk


async def _run_one(
    streams: Any, request: GenerationRequest, failover: Failover, whole: bool
) -> AsyncGenerator[GenerationChunk, None]:
    """The chunks of one answer, from as many replicas as it takes."""
    state = failover.begin(request, time.monotonic())
    while not state.finished:
        failure = Failure.GONE
        response = streams.generate.remote(state.request, whole)
        async with aclosing(_attempt(response, state)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Failure):
                    failure = piece
                else:
                    yield piece
        if not state.finished:
            await asyncio.sleep(state.fail(failure, time.monotonic()))


async def complete_all(
    streams: Any, requests: Sequence[GenerationRequest], failover: Failover
) -> list[GenerationChunk]:
    """Every answer whole, run at once; the first failure ends the others.

    Args:
        streams: the target's handle as :func:`streaming` makes it.
        requests: one per choice.
        failover: how long each looks for a replica; counts what failed.

    Raises:
        ApiError: where one of them failed.
    """
    try:
        if len(requests) == 1:
            return [await _complete(streams, requests[0], failover)]
        tasks: list[asyncio.Task[GenerationChunk]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                tasks.append(group.create_task(_complete(streams, request, failover)))
        return [task.result() for task in tasks]
    except ApiError:
        raise
    except ExceptionGroup as group_error:
        raise as_api_error(_first(group_error)) from group_error
    except Exception as error:
        raise as_api_error(error) from error


async def _complete(
    streams: Any, request: GenerationRequest, failover: Failover
) -> GenerationChunk:
    async with aclosing(_run_one(streams, request, failover, True)) as chunks:
        return merge_chunks([chunk async for chunk in chunks])


def _first(error: BaseException) -> Exception:
    """The first error of a nest of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


async def stream_all(
    streams: Any, requests: Sequence[GenerationRequest], failover: Failover
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """Pieces of every answer with the index of its choice, as they come.

    Closing the iterator cancels what still runs.

    Args:
        streams: the target's handle as :func:`streaming` makes it.
        requests: one per choice.
        failover: how long each looks for a replica; counts what failed.

    Raises:
        ApiError: where one of them failed; the others are cancelled.
    """
    try:
        if len(requests) == 1:
            async with aclosing(_run_one(streams, requests[0], failover, False)) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
        else:
            async with aclosing(_merged(streams, requests, failover)) as items:
                async for item in items:
                    yield item
    except ApiError:
        raise
    except Exception as error:
        raise as_api_error(error) from error


async def _merged(
    streams: Any, requests: Sequence[GenerationRequest], failover: Failover
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    queue: asyncio.Queue[tuple[int, GenerationChunk] | Exception | None] = asyncio.Queue()

    async def pump(index: int, request: GenerationRequest) -> None:
        end: Exception | None = internal("The server failed on this request.")
        try:
            async with aclosing(_run_one(streams, request, failover, False)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
            end = None
        except Exception as error:
            end = error
        finally:  # whatever ends it: the reader waits for this
            queue.put_nowait(end)

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
