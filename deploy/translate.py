"""From the bytes of a request to what the engine is asked: pure functions, no Ray.

Whatever is wrong with a request becomes an :class:`ApiError` that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from paceline.actors.decoding.request import GenerationRequest, SamplingParams
from paceline.actors.routing.policy import Route
from paceline.deploy.errors import ApiError
from paceline.deploy.openai_types import (
    CONTEXT,
    NEUTRAL,
    TOO_LONG,
    GenerationOptions,
    Speculative,
)

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


def check_token_ids(token_ids: Collection[int], vocab_size: int, param: str = "prompt") -> None:
    """Refuse ids that the target does not have.

    Raises:
        ApiError: 400 naming ``param``.
    """
    largest = max(token_ids, default=0)
    if largest >= vocab_size:
        raise ApiError(
            400,
            f"Invalid value for {param}: token id {largest} is not below the vocabulary's "
            f"{vocab_size}.",
            param=param,
            code="invalid_value",
        )


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
