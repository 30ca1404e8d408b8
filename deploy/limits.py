"""How many tokens an answer may have. Pure."""

from __future__ import annotations

from paceline.deploy.errors import ApiError
from paceline.deploy.openai_chat import ChatCompletionRequest
from paceline.deploy.openai_types import TOO_LONG, CompletionRequest, too_long

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
