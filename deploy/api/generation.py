"""Run the prompts of a request on the target, complete or streamed, with failover.

See :mod:`paceline.deploy.api.failover` for replicas that die, hang or give up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ray.exceptions import RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)

from paceline.actors.cancellation import is_cancelled
from paceline.actors.engine.request import GenerationChunk, GenerationRequest, merge_chunks
from paceline.actors.engine.target_handle import ChunkStream, StreamingTarget, TargetHandle
from paceline.deploy.api.failover import Failover, Failure, ResumableRequest
from paceline.deploy.errors import ApiError, internal, overloaded

logger = logging.getLogger(__name__)


def as_api_error(error: Exception) -> ApiError:
    """The client's error for a failure of the target."""
    if isinstance(error, ApiError):
        return error
    logger.warning("a request failed on the target: %r", error)
    if isinstance(error, BackPressureError):
        return overloaded("The server is overloaded; try again.")
    if isinstance(error, DeploymentUnavailableError):
        return overloaded("The target is not available just now; try again.")
    return internal("The server failed on this request.")


def classify_failure(error: Exception) -> Failure | None:
    """The replica's failure for an exception of its stream; None if it is not the replica's.

    Measured on Ray 2.60: a gRPC stream ends with ActorUnavailableError within 20 ms of its
    replica's death, while a stopped process gives nothing at all. gRPC errors other than
    "unavailable" and exceptions of the replica's own code come unwrapped.
    """
    if isinstance(error, RayTaskError):
        return Failure.BROKEN  # raised by the replica's own code
    if isinstance(error, BackPressureError | DeploymentUnavailableError):
        return None
    if isinstance(error, RayError | ReplicaUnavailableError | OSError):  # TimeoutError is one
        return Failure.GONE
    return Failure.GONE if type(error).__name__ == "AioRpcError" else Failure.BROKEN


def streaming_handle(target: TargetHandle) -> StreamingTarget:
    """The target's handle for generation, for complete responses too.

    gRPC costs half as much per chunk as Ray's calls. Serve does not propagate the cancellation
    of a unary gRPC call to the replica, and only a stream has heartbeats.
    """
    return target.options(stream=True, _by_reference=False)


async def _attempt(
    response: ChunkStream, state: ResumableRequest
) -> AsyncGenerator[GenerationChunk | Failure, None]:
    """Chunks of one replica; a failure, if any, comes last."""
    try:
        while not state.finished:
            item: GenerationChunk | Failure | None = await _next_chunk(
                response, state.stall_timeout_s
            )
            if isinstance(item, GenerationChunk):
                item = state.on_chunk(item, time.monotonic())
            if item is not None:
                yield item
            if isinstance(item, Failure):
                return
    finally:
        if not state.finished:
            response.cancel()


async def _next_chunk(response: ChunkStream, timeout_s: float) -> GenerationChunk | Failure:
    """The next chunk of a replica, or its failure."""
    try:
        async with asyncio.timeout(timeout_s):
            chunk: GenerationChunk | None = await anext(response, None)
    except (asyncio.CancelledError, TaskCancelledError):
        if is_cancelled():
            raise
        logger.warning("a replica has cancelled a stream")
        return Failure.GONE
    except Exception as error:
        failure = classify_failure(error)
        if failure is None:
            raise
        logger.warning("a replica is %s: %r", failure.name.lower(), error)
        return failure
    return Failure.GONE if chunk is None else chunk


async def _run(
    handle: StreamingTarget, request: GenerationRequest, failover: Failover, whole: bool
) -> AsyncGenerator[GenerationChunk, None]:
    """The chunks of a request, from as many replicas as it needs."""
    state = failover.start(request, time.monotonic())
    while not state.finished:
        failure = Failure.GONE
        response = handle.generate.remote(state.request, whole)
        async with aclosing(_attempt(response, state)) as items:
            async for item in items:
                if isinstance(item, Failure):
                    failure = item
                else:
                    yield item
        if not state.finished:
            await asyncio.sleep(state.on_failure(failure, time.monotonic()))


async def complete_all(
    handle: StreamingTarget, requests: Sequence[GenerationRequest], failover: Failover
) -> list[GenerationChunk]:
    """Run requests concurrently to completion; the first failure cancels the others.

    Args:
        handle: see `streaming_handle`.
        requests: one per choice.
        failover: policy and counters.

    Raises:
        ApiError: a request failed.
    """
    try:
        if len(requests) == 1:
            return [await _complete(handle, requests[0], failover)]
        tasks: list[asyncio.Task[GenerationChunk]] = []
        async with asyncio.TaskGroup() as group:
            for request in requests:
                tasks.append(group.create_task(_complete(handle, request, failover)))
        return [task.result() for task in tasks]
    except ApiError:
        raise
    except ExceptionGroup as group_error:
        raise as_api_error(_first_error(group_error)) from group_error
    except Exception as error:
        raise as_api_error(error) from error


async def _complete(
    handle: StreamingTarget, request: GenerationRequest, failover: Failover
) -> GenerationChunk:
    async with aclosing(_run(handle, request, failover, True)) as chunks:
        return merge_chunks([chunk async for chunk in chunks])


def _first_error(error: BaseException) -> Exception:
    """The first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


async def stream_all(
    handle: StreamingTarget, requests: Sequence[GenerationRequest], failover: Failover
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """Run requests concurrently and yield their chunks with the index of the choice.

    Closing the iterator cancels what still runs.

    Args:
        handle: see `streaming_handle`.
        requests: one per choice.
        failover: policy and counters.

    Raises:
        ApiError: a request failed; the others are cancelled.
    """
    try:
        if len(requests) == 1:
            async with aclosing(_run(handle, requests[0], failover, False)) as chunks:
                async for chunk in chunks:
                    yield 0, chunk
        else:
            async with aclosing(_merged(handle, requests, failover)) as items:
                async for item in items:
                    yield item
    except ApiError:
        raise
    except Exception as error:
        raise as_api_error(error) from error


async def _merged(
    handle: StreamingTarget, requests: Sequence[GenerationRequest], failover: Failover
) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    queue: asyncio.Queue[tuple[int, GenerationChunk] | Exception | None] = asyncio.Queue()

    async def pump(index: int, request: GenerationRequest) -> None:
        end: Exception | None = internal("The server failed on this request.")
        try:
            async with aclosing(_run(handle, request, failover, False)) as chunks:
                async for chunk in chunks:
                    queue.put_nowait((index, chunk))
            end = None
        except Exception as error:
            end = error
        finally:  # the reader waits for this in every case
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
