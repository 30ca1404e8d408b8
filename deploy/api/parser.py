"""From HTTP requests for answers to checked jobs.

No ``from __future__ import annotations`` here: FastAPI reads the annotations.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect

from paceline.actors.engine.request import GenerationRequest, SamplingParams
from paceline.actors.router.policy import Route
from paceline.deploy.api.prompts import PromptEncoder, question
from paceline.deploy.api.requests import (
    CONTEXT,
    NEUTRAL,
    TOO_LONG,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
    Speculative,
    too_long,
)
from paceline.deploy.errors import CLIENT_GONE, ApiError

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
            sampling = sampling_of(asked, limit, choice)
            name = f"{answer_id}-{len(requests)}"
            facts = prompt, sampling, chosen(route, name), asked.speculative, store
            origins = asked.return_token_origins
            requests.append(generation_request(name, *facts, origins))
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


DEFAULT_COMPLETION_TOKENS = 16


def max_tokens_of(request: CompletionRequest | ChatCompletionRequest) -> tuple[int | None, str]:
    """The asked limit, None where there is none, and the name of the field that gives it."""
    if isinstance(request, ChatCompletionRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens, "max_completion_tokens"
    return request.max_tokens, "max_tokens"


def fit_limit(
    asked: int | None,
    field: str,
    prompt_tokens: int,
    context: int,
    param: str,
    default: int | None = None,
) -> int:
    """How many tokens may be generated.

    Args:
        asked: the request's limit, None where it has none.
        field: the request's name for it.
        prompt_tokens: length of the prompt.
        context: the most tokens that prompt and answer may have together.
        param: the request's field that holds the prompt.
        default: without a limit, at most so many; None for as many as fit.

    Raises:
        ApiError: 400 ``context_length_exceeded`` naming the prompt where it alone is too
            long, else the limit.
    """
    room = context - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            too_long(context, prompt_tokens),
            param=param,
            code=TOO_LONG,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ApiError(
            400,
            f"This model's maximum context length is {context} tokens; {prompt_tokens} in the "
            f"prompt and {asked} asked for by {field} are more.",
            param=field,
            code="context_length_exceeded",
        )
    return asked


DRAFT_AUTO = "auto"
DRAFT_OFF = "off"
# Below it the likeliest token has all the mass that float32 can tell apart: greedy, and no
# logits that overflow when they are divided by it.
GREEDY_BELOW = 1e-5
# The likeliest token alone, and still above zero in float32.
LEAST_TOP_P = 1e-6

RequestT = TypeVar("RequestT", bound=GenerationOptions)


def parse(
    body: bytes, kind: type[RequestT], model_name: str, context: int | None = None
) -> RequestT:
    """Read and check a request body.

    Args:
        body: JSON as it came.
        kind: CompletionRequest or ChatCompletionRequest.
        model_name: the one model that is served.
        context: tokens that prompt and answer may have together; a longer list of token ids is
            refused unread.

    Raises:
        ApiError: 400 for what is malformed, unknown, out of range or not served yet; 404 for
            another model.
    """
    try:
        request = kind.model_validate_json(body, context={CONTEXT: context})
    except ValidationError as error:
        raise _explain(error) from error
    _refuse_unsupported(request)
    check_model(request.model, model_name)
    return request


def check_model(asked: str, model_name: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404 ``model_not_found``.
    """
    if asked != model_name:
        raise ApiError(
            404,
            f"The model {asked!r} does not exist; this server has {model_name!r}.",
            param="model",
            code="model_not_found",
        )


def _explain(error: ValidationError) -> ApiError:
    """The first problem that pydantic found, in OpenAI's words."""
    every = error.errors(include_url=False)
    # Both branches of a union complain; the one that got further is what was meant.
    first = max((e for e in every if e["loc"][:3] == every[0]["loc"][:3]), key=_depth)
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {message}.", code="invalid_json")
    if not first["loc"] and kind == "model_type":
        return ApiError(400, "The body must be a JSON object.", code="invalid_type")
    param = _field(first["loc"])
    if kind == TOO_LONG:
        return ApiError(400, message, param=param, code=TOO_LONG)
    if kind == "extra_forbidden":
        text, code = f"Unrecognized request argument supplied: {param}.", "unknown_parameter"
    elif kind == "missing":
        text, code = f"Missing required parameter: {param}.", "missing_required_parameter"
    elif kind.endswith("_type"):
        text, code = f"Invalid type for {param}: {message}.", "invalid_type"
    else:
        text, code = f"Invalid value for {param}: {message}.", "invalid_value"
    return ApiError(400, text, param=param, code=code)


def _depth(error: ErrorDetails) -> int:
    return len(error["loc"])


def _field(loc: tuple[int | str, ...]) -> str:
    """The dotted name of the request field that pydantic means."""
    if not loc:  # the one rule over several fields
        return "stream_options"
    if loc[0] == "messages" and loc[2:3] == ("content",):
        # What follows is the union's branch ("list[TextPart]"): our word, not the request's.
        loc = loc[:3] + loc[4:]
    return ".".join(map(str, loc))


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # 1 == True and 0 == False in Python; a request's types are meant.
    return any(type(value) is type(item) and value == item for item in neutral)


def _refuse_unsupported(request: GenerationOptions) -> None:
    for field in sorted(request.model_fields_set & NEUTRAL.keys()):
        neutral = NEUTRAL[field]
        if not _is_neutral(getattr(request, field), neutral):
            only = next((item for item in neutral if item is not None), None)
            rest = "leave it out" if only is None else f"leave it out or send {only!r}"
            text = f"This value of {field} is not supported yet: {rest}."
            if field == "echo":
                text = "echo is off: answers do not repeat the prompt. Leave it out or send false."
            raise ApiError(
                400,
                text,
                param=field,
                code="unsupported_value",
            )


def number_of(text: str | None, param: str) -> float:
    """A number in a query, 0 where there is none.

    Raises:
        ApiError: 400 naming ``param``.
    """
    try:
        number = float(text or 0.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        text = f"Invalid value for {param}: it must be a number."
        raise ApiError(400, text, param=param, code="invalid_value")
    return number


def check_draft(draft: str, experts: Collection[str]) -> None:
    """Refuse a draft that is not served.

    Raises:
        ApiError: 400 naming ``speculative.draft``.
    """
    if draft in (DRAFT_AUTO, DRAFT_OFF) or draft.removesuffix("@0") in experts:
        return
    known = ", ".join((DRAFT_AUTO, DRAFT_OFF, *experts))
    raise ApiError(
        400,
        f"Invalid value for speculative.draft: {draft!r} is none of {known} (an expert's first "
        "weights are its name with '@0').",
        param="speculative.draft",
        code="invalid_value",
    )


def named_expert(draft: str) -> str | None:
    """The expert that a request names itself; None for ``auto``, ``off`` and first weights."""
    return None if draft in (DRAFT_AUTO, DRAFT_OFF) or draft.endswith("@0") else draft


def sampling_of(request: GenerationOptions, max_tokens: int, choice: int = 0) -> SamplingParams:
    """The request's sampling fields with OpenAI's defaults.

    A temperature below `GREEDY_BELOW` is 0; a top_p is at least `LEAST_TOP_P`.

    Args:
        request: see GenerationOptions.
        max_tokens: the most tokens of this answer.
        choice: index among the answers to one prompt.

    Raises:
        ApiError: 400 naming ``min_tokens`` where they are more than ``max_tokens``.
    """
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"Invalid value for min_tokens: {min_tokens} is more than the {max_tokens} that the "
            "answer may have.",
            param="min_tokens",
            code="invalid_value",
        )
    stop = request.stop or ()
    repetition = request.repetition_penalty
    temperature = 1.0 if request.temperature is None else request.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if request.top_p is None else max(request.top_p, LEAST_TOP_P),
        top_k=max(request.top_k or 0, 0),
        seed=request.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=request.ignore_eos,
        min_p=request.min_p or 0.0,
        choice=choice,
        repetition_penalty=1.0 if repetition is None else repetition,
        frequency_penalty=request.frequency_penalty or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        logit_bias=tuple((request.logit_bias or {}).items()),
        min_tokens=min_tokens,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logprobs=request.num_logprobs,
    )


def generation_request(
    request_id: str,
    prompt_token_ids: Collection[int],
    sampling: SamplingParams,
    route: Route,
    speculative: Speculative,
    store: bool,
    origins: bool = False,
) -> GenerationRequest:
    """What the engine is asked. ``auto`` takes the route's expert; the topic is always its."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling,
        topic=route.topic,
        draft=route.draft if speculative.draft == DRAFT_AUTO else speculative.draft,
        num_speculative_tokens=speculative.num_speculative_tokens,
        store=store,
        origins=origins,
    )


_LONG_BODY_BYTES = 64 * 2**10


class JobReader:
    """Reads and checks requests; a long one on a thread of its own."""

    def __init__(self, model_name: str, encoder: PromptEncoder, context: int) -> None:
        """Take what requests are checked by.

        Args:
            model_name: the one model that is served.
            encoder: of prompts.
            context: tokens that prompt and answer may have together.
        """
        self._model_name = model_name
        self._encoder = encoder
        self._context = context

    async def completion(self, request: Request) -> Job:
        """OpenAI's legacy completions.

        Raises:
            ApiError: see `parse`, `fit_limit` and `read_body`.
        """
        return await self._read(request, self._completion)

    async def chat(self, request: Request) -> Job:
        """OpenAI's chat completions; raises as :meth:`completion`."""
        return await self._read(request, self._chat)

    async def _read(self, request: Request, make: Callable[[bytes, str], Job]) -> Job:
        body = await read_body(request)
        if len(body) > _LONG_BODY_BYTES:
            return await asyncio.to_thread(make, body, client_of(request))
        return make(body, client_of(request))

    def _completion(self, body: bytes, client: str) -> Job:
        asked = parse(body, CompletionRequest, self._model_name, self._context)
        prompts = self._encoder.completion(asked)
        limit, field = max_tokens_of(asked)
        default = DEFAULT_COMPLETION_TOKENS
        limits = [
            fit_limit(limit, field, len(prompt), self._context, "prompt", default)
            for prompt in prompts
        ]
        texts = [self._encoder.plain_text(prompt) for prompt in prompts]
        return Job(asked, prompts, texts, limits, chat=False, client=client)

    def _chat(self, body: bytes, client: str) -> Job:
        asked = parse(body, ChatCompletionRequest, self._model_name)
        prompt = self._encoder.chat(asked)
        limit, field = max_tokens_of(asked)
        limit = fit_limit(limit, field, len(prompt), self._context, "messages")
        return Job(asked, [prompt], [question(asked)], [limit], chat=True, client=client)
