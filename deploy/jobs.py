"""What an HTTP request asks of the engine, and how it is read off the wire.

No ``from __future__ import annotations`` here: FastAPI reads the annotations.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect

from paceline.actors.decoding.request import GenerationRequest
from paceline.actors.routing.policy import Route
from paceline.deploy import translate
from paceline.deploy.errors import CLIENT_GONE, ApiError
from paceline.deploy.openai_types import GenerationOptions

MAX_BODY_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request: per prompt its token ids, its text for the router and its limit."""

    asked: GenerationOptions
    prompts: list[list[int]]
    texts: list[str]
    limits: list[int]
    chat: bool
    client: str


def requests_of(
    job: Job, answer_id: str, routes: list[Route], chosen: Callable[[Route, str], Route]
) -> list[GenerationRequest]:
    """One per choice, those to the first prompt first."""
    asked = job.asked
    store = asked.store is not False
    requests: list[GenerationRequest] = []
    for prompt, limit, route in zip(job.prompts, job.limits, routes, strict=True):
        for choice in range(asked.num_choices):
            sampling = translate.sampling_of(asked, limit, choice)
            name = f"{answer_id}-{len(requests)}"
            facts = prompt, sampling, chosen(route, name), asked.speculative, store
            origins = asked.return_token_origins
            requests.append(translate.generation_request(name, *facts, origins))
    return requests


def client_of(request: Request) -> str:
    """Who asks: by the API key where one is sent, else by the address."""
    address = request.client.host if request.client is not None else ""
    return request.headers.get("authorization") or address


def client_gone(error: Exception) -> bool:
    """Whether an exception says that the client has gone away, however Starlette or Ray puts it."""
    return isinstance(error, ClientDisconnect | TaskCancelledError)


async def read_body(request: Request, limit: int = MAX_BODY_BYTES) -> bytes:
    """The body, refused before it fills the memory.

    Raises:
        ApiError: 413 for more than ``limit`` bytes; 499 where the client goes away meanwhile.
    """
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise ApiError(413, f"The body is larger than {limit} bytes.")
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "The client went away.") from error
    return bytes(body)
