"""Parse and validate the HTTP requests of both generation endpoints.

`RequestParser` turns a request into a `ParsedRequest`, `engine_requests` turns that into the
engine's requests. `parse_json` validates every JSON body of the API and gives the error of an
invalid one OpenAI's shape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from paceline.actors.engine.request import DRAFT_OFF, GenerationRequest, SamplingParams
from paceline.actors.router.policy import Route
from paceline.deploy.api.admission import ConcurrencyLimiter
from paceline.deploy.api.auth import ApiKey, check_json, request_key
from paceline.deploy.api.fair_executor import FairExecutor
from paceline.deploy.api.grammars import GrammarSource, grammar_source
from paceline.deploy.api.prompt_encoder import EchoedPrompt, PromptEncoder, last_user_message
from paceline.deploy.api.request_schemas import (
    CONTEXT_LENGTH,
    CONTEXT_LENGTH_EXCEEDED,
    NO_OP_VALUES,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationOptions,
    SamplingOptions,
    Speculative,
    prompt_too_long,
)
from paceline.deploy.api.responses_request import ResponsesRequest
from paceline.deploy.api.sampling_defaults import with_defaults
from paceline.deploy.api.tool_calls import ToolSyntax
from paceline.deploy.api.tools import RequestTools, request_tools
from paceline.deploy.errors import CLIENT_GONE, ApiError, invalid_value

MAX_BODY_BYTES = 8 * 2**20
MAX_PROMPT_ENTRIES = 2**18  # log-probabilities of prompts in a response, about 70 bytes each
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's
# What each endpoint of conversations calls messages, the answer's format, and a schema in there.
_CHAT_FIELDS = ("messages", "response_format", "response_format.json_schema.schema")
_RESPONSES_FIELDS = ("input", "text.format", "text.format.schema")
DRAFT_AUTO = "auto"
# Below this temperature the most probable token has all the mass that float32 can tell apart, and
# dividing the logits by it may overflow: sampling is greedy.
GREEDY_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6  # keeps the most probable token alone, and is above zero in float32
_LARGE_BODY_BYTES = 64 * 2**10
_BODY_THREADS = 2  # for large bodies: one client takes one, so that the other is for the others
_MAX_PROBLEMS = 1000  # of a body that are looked through for the first: each takes microseconds

ResultT = TypeVar("ResultT")
ModelT = TypeVar("ModelT", bound=BaseModel)
OptionsT = TypeVar("OptionsT", bound=SamplingOptions)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request for one or several prompts.

    Attributes:
        options: the request's fields.
        prompts: token ids of every prompt.
        router_texts: of every prompt, the text that the router classifies.
        max_tokens: of every prompt, the most tokens of an answer.
        chat: True for ``/v1/chat/completions``.
        client: API key or address, see `client_key`.
        echoes: of every prompt, what its answers repeat; empty if they do not.
        grammar: source of the grammar of all answers, if they have one.
        responses: the request as ``/v1/responses`` got it; None at other endpoints.
        key: the client's API key, None if the server has none.
        tools: how answers call tools; None if they do not.
    """

    options: GenerationOptions
    prompts: list[list[int]]
    router_texts: list[str]
    max_tokens: list[int]
    chat: bool
    client: str
    echoes: tuple[EchoedPrompt, ...] = ()
    grammar: GrammarSource | None = None
    responses: ResponsesRequest | None = None
    key: ApiKey | None = None
    tools: ToolSyntax | None = None


class BodyWorkers:
    """Runs work on the bodies of requests, of large ones on threads.

    Args:
        limiter: counts a large body as a sequence of its client until the work is done.
    """

    def __init__(self, limiter: ConcurrencyLimiter) -> None:
        self._limiter = limiter
        self._executor = FairExecutor(_BODY_THREADS, "paceline-bodies")

    async def run(self, client: str, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Return the result of work on a client's body of ``size`` bytes.

        Raises:
            ApiError: a large body is over a limit, see `ConcurrencyLimiter.acquire`.
        """
        if size <= _LARGE_BODY_BYTES:
            return work()
        return await self._executor.run(client, work, self._limiter.acquire(1, client))


class RequestParser:
    """Parses and validates requests.

    Args:
        model_name: the served model's name.
        encoder: turns prompts into token ids.
        context_length: most tokens that prompt and answer may have together.
        defaults: of sampling parameters, see `default_sampling_params`; others are OpenAI's.
        workers: parse the bodies.
    """

    def __init__(
        self,
        model_name: str,
        encoder: PromptEncoder,
        context_length: int,
        defaults: Mapping[str, float],
        workers: BodyWorkers,
    ) -> None:
        self._model_name = model_name
        self._encoder = encoder
        self._context_length = context_length
        self._defaults = defaults
        self._workers = workers

    async def parse_completion(self, request: Request) -> ParsedRequest:
        """Parse a request to ``/v1/completions``.

        Raises:
            ApiError: see `parse_options`, `resolve_max_tokens` and `read_body`.
        """
        return await self._parse(request, self._completion)

    async def parse_chat(self, request: Request) -> ParsedRequest:
        """Parse a request to ``/v1/chat/completions``; raises as `parse_completion`."""
        return await self._parse(request, self._chat)

    async def parse_responses(self, request: Request) -> ParsedRequest:
        """Parse a request to ``/v1/responses``; raises as `parse_completion`."""
        return await self._parse(request, self._responses)

    async def _parse(
        self, request: Request, parse: Callable[[bytes, str], ParsedRequest]
    ) -> ParsedRequest:
        body, key = await read_body(request), request_key(request)
        client = client_key(request, key)
        parsed = await self._workers.run(client, len(body), lambda: parse(body, client))
        return parsed if key is None else _with_key(parsed, key)

    def _completion(self, body: bytes, client: str) -> ParsedRequest:
        context = self._context_length
        options = parse_options(body, CompletionRequest, self._model_name, context)
        options = with_defaults(options, self._defaults)
        prompts = self._encoder.encode_prompts(options, context)
        max_tokens, field = requested_max_tokens(options)
        limits = [
            resolve_max_tokens(
                max_tokens, field, len(prompt), context, "prompt", DEFAULT_COMPLETION_TOKENS
            )
            for prompt in prompts
        ]
        check_prompt_entries(options, prompts)
        texts = [self._encoder.decode(p) for p in prompts]
        echoes = map(self._encoder.echo, options.prompts, prompts) if options.echo else ()
        grammar = grammar_source(options)
        return ParsedRequest(
            options, prompts, texts, limits, False, client, tuple(echoes), grammar=grammar
        )

    def _chat(self, body: bytes, client: str) -> ParsedRequest:
        options = parse_options(body, ChatCompletionRequest, self._model_name)
        options = with_defaults(options, self._defaults)
        length = requested_max_tokens(options)
        capped = length[1] == "max_completion_tokens" and not chose_length(options)
        return self._conversation(options, client, length, capped=capped)

    def _responses(self, body: bytes, client: str) -> ParsedRequest:
        asked = parse_options(body, ResponsesRequest, self._model_name)
        asked = with_defaults(asked, self._defaults)
        options = asked.chat_options()
        length = asked.max_output_tokens, "max_output_tokens"
        capped = not chose_length(options)
        return self._conversation(options, client, length, capped=capped, responses=asked)

    def _conversation(
        self,
        options: ChatCompletionRequest,
        client: str,
        length: tuple[int | None, str],
        *,
        capped: bool,
        responses: ResponsesRequest | None = None,
    ) -> ParsedRequest:
        """A request of messages; errors name the fields of its own endpoint.

        Args:
            options: as of ``/v1/chat/completions``.
            client: see `client_key`.
            length: the most tokens of an answer, and the field that says them.
            capped: see `resolve_max_tokens`.
            responses: the request as ``/v1/responses`` got it.
        """
        messages, text_format, schema = _CHAT_FIELDS if responses is None else _RESPONSES_FIELDS
        tools = request_tools(options, self._encoder.template_tools)
        context = self._context_length
        prompt = self._encoder.encode_chat(
            options.messages, options, messages, tools.tools, context
        )
        limit = resolve_max_tokens(*length, len(prompt), context, messages, capped=capped)
        check_prompt_entries(options, [prompt])
        return ParsedRequest(
            self._shows_calls(options, tools),
            [prompt],
            [last_user_message(options.messages)],
            [limit],
            chat=True,
            client=client,
            grammar=grammar_source(options, text_format, schema, tools),
            responses=responses,
            tools=tools.syntax,
        )

    @staticmethod
    def _shows_calls(options: ChatCompletionRequest, tools: RequestTools) -> ChatCompletionRequest:
        """The request, with special tokens in its texts if calls are written with them."""
        if tools.syntax is None or not tools.template.special:
            return options
        return options.model_copy(update={"skip_special_tokens": False})


def _with_key(parsed: ParsedRequest, key: ApiKey) -> ParsedRequest:
    """The request with its API key, and that one's defaults for fields that it leaves out."""
    options, responses = parsed.options, parsed.responses
    if options.store is None:
        default = {"store": key.store}
        options = options.model_copy(update=default)
        responses = None if responses is None else responses.model_copy(update=default)
    return replace(parsed, options=options, responses=responses, key=key)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the body, and stop as soon as it is too large.

    Raises:
        ApiError: 413 for more than ``max_bytes``; 415 for a web page's that is not JSON; 499 if the
            client disconnects.
    """
    if "origin" in request.headers:
        check_json(request)
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > max_bytes:
                raise ApiError(413, f"The body is larger than {max_bytes} bytes.")
    except ClientDisconnect as error:
        raise ApiError(CLIENT_GONE, "The client went away.") from error
    return bytes(body)


def client_key(request: Request, key: ApiKey | None) -> str:
    """The client for per-client limits: its API key, however its header is spelled.

    On a server without keys it is what the client says to be authorized by, else its address.
    """
    if key is not None:
        return key.id
    address = request.client.host if request.client is not None else ""
    return request.headers.get("authorization") or address


def parse_json(body: bytes, model: type[ModelT], context: dict[str, Any] | None = None) -> ModelT:
    """Validate a JSON body.

    Args:
        body: as received.
        model: the body's schema.
        context: pydantic's validation context.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    try:
        return model.model_validate_json(body, context=context)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> ApiError:
    """The first problem that pydantic found, in OpenAI's error shape."""
    if (count := error.error_count()) > _MAX_PROBLEMS:
        text = f"The body has {count} fields that are unknown or have invalid values."
        return ApiError(400, text, code="invalid_value")
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    # Every branch of a union reports a problem; the deepest one is the branch that was meant.
    first = max(
        (p for p in problems if p["loc"][:3] == problems[0]["loc"][:3]), key=lambda p: len(p["loc"])
    )
    kind, loc, reason = first["type"], first["loc"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return ApiError(400, f"The body is not valid JSON: {reason}.", code="invalid_json")
    if not loc and kind == "model_type":
        return ApiError(400, "The body must be a JSON object.", code="invalid_type")
    param = _param(loc)
    reason = reason.replace("be False", "be false")  # pydantic's literals are Python's
    if kind == CONTEXT_LENGTH_EXCEEDED:
        return ApiError(400, reason, param=param, code=kind)
    if kind == "extra_forbidden":
        text, code = f"Unrecognized request argument supplied: {param}.", "unknown_parameter"
    elif kind == "missing":
        text, code = f"Missing required parameter: {param}.", "missing_required_parameter"
    elif kind.endswith("_type"):
        text, code = f"Invalid type for {param}: {reason}.", "invalid_type"
    else:
        text, code = f"Invalid value for {param}: {reason}.", "invalid_value"
    return ApiError(400, text, param=param, code=code)


def _param(loc: tuple[int | str, ...]) -> str:
    """The dotted name of a request field, from pydantic's location."""
    if not loc:  # of the model validator, which is about several fields
        return "stream_options"
    if loc[0] == "input":
        loc = loc[:2] + loc[3:]  # without the item's type
    if loc[0] == "tool_choice":
        loc = loc[:1] + loc[2:]  # without the name of the union's branch
    if loc[0] in ("messages", "input") and loc[2:3] in (("content",), ("output",)):
        loc = loc[:3] + loc[4:]  # without the name of the union's branch ("list[TextPart]")
    return ".".join(map(str, loc))


def parse_options(
    body: bytes, model: type[OptionsT], model_name: str, context_length: int | None = None
) -> OptionsT:
    """Validate the body of a generation request.

    Args:
        body: as received.
        model: CompletionRequest, ChatCompletionRequest or ResponsesRequest.
        model_name: the served model's name.
        context_length: in tokens; a longer list of token ids is refused without iterating it.

    Raises:
        ApiError: 400 for what is malformed, unknown, out of range or not supported; 404 for
            another model.
    """
    options = parse_json(body, model, {CONTEXT_LENGTH: context_length})
    _check_no_ops(options)
    if isinstance(options, GenerationOptions):
        _check_prompt_logprobs(options)
    check_model(options.model, model_name)
    return options


def _check_no_ops(options: SamplingOptions) -> None:
    for name in sorted(options.model_fields_set & NO_OP_VALUES.keys()):
        value, accepted = getattr(options, name), NO_OP_VALUES[name]
        # By type too: 1 == True and 0 == False in Python.
        if any(type(value) is type(item) and value == item for item in accepted):
            continue
        only = next((item for item in accepted if item is not None), None)
        rest = "leave it out" if only is None else f"leave it out or send {json.dumps(only)}"
        text = f"This value of {name} is not supported yet: {rest}."
        raise ApiError(400, text, param=name, code="unsupported_value")


def _check_prompt_logprobs(options: GenerationOptions) -> None:
    if options.stream and options.prompt_logprobs is not None:
        text = "prompt_logprobs are not streamed: leave stream out, or use echo and logprobs."
        raise ApiError(400, text, param="prompt_logprobs", code="unsupported_value")
    if options.max_tokens == 0 and not (options.echoes or options.prompt_logprobs is not None):
        raise invalid_value("max_tokens", "0 needs echo or prompt_logprobs")


def check_prompt_entries(options: GenerationOptions, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse more log-probabilities of prompts than a response may have.

    Args:
        options: the request's fields.
        prompts: token ids of every prompt.

    Raises:
        ApiError: 400 naming ``prompt_logprobs``, or ``logprobs`` if those of an echo are too many.
    """
    wanted = options.num_prompt_logprobs
    if wanted is None:
        return
    times = 1 if isinstance(options, ChatCompletionRequest) else options.num_choices
    count = sum(map(len, prompts)) * times * (wanted + 1)
    if count > MAX_PROMPT_ENTRIES:
        param = "logprobs" if options.prompt_logprobs is None else "prompt_logprobs"
        reason = (
            f"the prompts' tokens, times n, times {wanted + 1} entries for each, are {count}, "
            f"more than the {MAX_PROMPT_ENTRIES} that a response may have"
        )
        raise invalid_value(param, reason)


def check_model(requested: str, model_name: str) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404 ``model_not_found``.
    """
    if requested != model_name:
        raise ApiError(
            404,
            f"The model {requested!r} does not exist; this server has {model_name!r}.",
            param="model",
            code="model_not_found",
        )


def requested_max_tokens(
    options: CompletionRequest | ChatCompletionRequest,
) -> tuple[int | None, str]:
    """The requested limit of tokens, if any, and the field that gives it."""
    if isinstance(options, ChatCompletionRequest) and options.max_completion_tokens is not None:
        return options.max_completion_tokens, "max_completion_tokens"
    return options.max_tokens, "max_tokens"


def chose_length(options: GenerationOptions) -> bool:
    """Whether a request's limit of tokens is the length that its client wants.

    Otherwise it is an upper bound, which libraries fill with a default of their own.
    """
    return options.ignore_eos or bool(options.min_tokens)


def resolve_max_tokens(
    requested: int | None,
    field: str,
    prompt_tokens: int,
    context_length: int,
    prompt_field: str,
    default: int | None = None,
    *,
    capped: bool = False,
) -> int:
    """The most tokens that may be generated for a prompt.

    Args:
        requested: the request's limit, None if it has none.
        field: the request's field of that limit.
        prompt_tokens: length of the prompt.
        context_length: most tokens that prompt and answer may have together.
        prompt_field: the request's field that holds the prompt.
        default: limit of a request without one; None for as many as fit.
        capped: whether a limit that does not fit means as many as fit.

    Raises:
        ApiError: 400 ``context_length_exceeded`` naming the prompt if it alone is too long,
            else the limit.
    """
    available = context_length - prompt_tokens
    if available < 1:
        text = prompt_too_long(context_length, prompt_tokens)
        raise ApiError(400, text, param=prompt_field, code=CONTEXT_LENGTH_EXCEEDED)
    if requested is None:
        return available if default is None else min(default, available)
    if requested > available and capped:
        return available
    if requested > available:
        raise ApiError(
            400,
            f"This model's maximum context length is {context_length} tokens; {prompt_tokens} in "
            f"the prompt and {requested} asked for by {field} are more.",
            param=field,
            code=CONTEXT_LENGTH_EXCEEDED,
        )
    return requested


def query_number(text: str | None, param: str) -> float:
    """A number of the query string, 0 if it is missing.

    Raises:
        ApiError: 400 naming ``param``.
    """
    try:
        number = float(text or 0.0)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise invalid_value(param, "it must be a number")
    return number


def check_draft(draft: str, experts: Collection[str]) -> None:
    """Refuse a draft that is not served.

    Raises:
        ApiError: 400 naming ``speculative.draft``.
    """
    if draft in (DRAFT_AUTO, DRAFT_OFF) or draft.removesuffix("@0") in experts:
        return
    known = ", ".join((DRAFT_AUTO, DRAFT_OFF, *experts))
    raise invalid_value(
        "speculative.draft",
        f"{draft!r} is none of {known} (an expert's first weights are its name with '@0')",
    )


def explicit_expert(draft: str) -> str | None:
    """The expert that a request names; None for ``auto``, ``off`` and first weights."""
    return None if draft in (DRAFT_AUTO, DRAFT_OFF) or draft.endswith("@0") else draft


def sampling_params(
    options: GenerationOptions, max_tokens: int, choice_index: int = 0
) -> SamplingParams:
    """The engine's sampling parameters, with OpenAI's defaults.

    Args:
        options: the request's fields.
        max_tokens: the most tokens of this answer.
        choice_index: index among the answers to one prompt.

    Raises:
        ApiError: 400 naming ``min_tokens`` if it is more than ``max_tokens``.
    """
    min_tokens = options.min_tokens or 0
    if min_tokens > max_tokens:
        reason = f"{min_tokens} is more than the {max_tokens} that the answer may have"
        raise invalid_value("min_tokens", reason)
    of_prompt = options.num_prompt_logprobs
    if choice_index and not options.stream:
        of_prompt = None  # a whole response takes those of the prompt's first choice
    stop = options.stop or ()
    repetition = options.repetition_penalty
    temperature = 1.0 if options.temperature is None else options.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if temperature < GREEDY_TEMPERATURE else temperature,
        top_p=1.0 if options.top_p is None else max(options.top_p, MIN_TOP_P),
        top_k=max(options.top_k or 0, 0),
        seed=options.seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        ignore_eos=options.ignore_eos,
        skip_special_tokens=options.skip_special_tokens is not False,
        include_stop=options.include_stop_str_in_output,
        min_p=options.min_p or 0.0,
        choice=choice_index,
        repetition_penalty=1.0 if repetition is None else repetition,
        frequency_penalty=options.frequency_penalty or 0.0,
        presence_penalty=options.presence_penalty or 0.0,
        logit_bias=tuple((options.logit_bias or {}).items()),
        min_tokens=min_tokens,
        stop_token_ids=tuple(options.stop_token_ids or ()),
        logprobs=options.num_logprobs,
        prompt_logprobs=of_prompt,
    )


def engine_request(
    request_id: str,
    prompt_token_ids: Collection[int],
    sampling: SamplingParams,
    route: Route,
    speculative: Speculative,
    store: bool,
    token_sources: bool = False,
    grammar: str = "",
    grammar_param: str | None = None,
) -> GenerationRequest:
    """The engine's request; draft ``auto`` becomes the route's expert."""
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=sampling,
        topic=route.topic,
        draft=route.draft if speculative.draft == DRAFT_AUTO else speculative.draft,
        num_speculative_tokens=speculative.num_speculative_tokens,
        store=store,
        replayed=route.classified,
        token_sources=token_sources,
        grammar=grammar,
        grammar_param=grammar_param,
    )


def engine_requests(
    parsed: ParsedRequest,
    response_id: str,
    routes: list[Route],
    adjust_route: Callable[[Route, str], Route],
    grammar: str = "",
) -> list[GenerationRequest]:
    """The engine's requests, one per choice, those of the first prompt first.

    Args:
        parsed: the client's request.
        response_id: prefix of the request ids.
        routes: topic and expert of every prompt.
        adjust_route: gives the final route from the prompt's route and the request id.
        grammar: of the answers, compiled from the request's source; empty if there is none.
    """
    options = parsed.options
    requests: list[GenerationRequest] = []
    for prompt, limit, route in zip(parsed.prompts, parsed.max_tokens, routes, strict=True):
        for choice_index in range(options.num_choices):
            request_id = f"{response_id}-{len(requests)}"
            requests.append(
                engine_request(
                    request_id,
                    prompt,
                    sampling_params(options, limit, choice_index),
                    adjust_route(route, request_id),
                    options.speculative,
                    store=options.store is not False,
                    token_sources=options.return_token_sources,
                    grammar=grammar,
                    grammar_param=None if parsed.grammar is None else parsed.grammar.param,
                )
            )
    return requests
