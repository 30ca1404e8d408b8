"""Requests and answers with OpenAI's field names, and Paceline's extensions to them.

Every request field that OpenAI documents is declared, so that one which is not served yet is
refused by name (:mod:`paceline.deploy.translate`) and not as an unknown field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_PROMPTS = 128
MAX_STOPS = 4


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _or(default: Any) -> BeforeValidator:
    """Clients that write all their fields send null for those that are not set."""
    return BeforeValidator(lambda value: default if value is None else value)


Flag = Annotated[bool, _or(False)]


class StreamOptions(_Request):
    """What a stream carries besides the text."""

    include_usage: Flag = False
    include_obfuscation: Flag = False


class Speculative(_Request):
    """Paceline's extension: which draft proposes, and how many tokens a round.

    ``draft`` is ``auto``, an expert (``sql``, ``general``), its first weights (``sql@0``) or
    ``off``.
    """

    draft: Annotated[str, _or("auto")] = "auto"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=32)] | None = None


class GenerationOptions(_Request):
    """Fields that both endpoints share; ``Any`` marks those of which one value is served."""

    model: str
    max_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    ignore_eos: Flag = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative: Annotated[Speculative, _or(Speculative())] = Field(default_factory=Speculative)
    store: bool | None = None
    return_token_ids: Flag = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    n: Any = 1
    presence_penalty: Any = 0
    frequency_penalty: Any = 0
    logit_bias: Any = None
    logprobs: Any = None
    service_tier: Any = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, stop: Any) -> Any:
        strings = [stop] if isinstance(stop, str) else stop
        if strings is None:
            return None
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise ValueError("must be a string or a list of strings, none of them empty")
        if len(strings) > MAX_STOPS:
            raise ValueError(f"must be at most {MAX_STOPS} strings")
        return strings

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(item) is int and 0 <= item < 2**31 for item in value)
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(s, str) for s in value)


class CompletionRequest(GenerationOptions):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    suffix: Any = None
    echo: Any = False
    best_of: Any = 1

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, prompt: Any) -> Any:
        several = isinstance(prompt, list) and bool(prompt) and all(map(_is_tokens, prompt))
        if not (isinstance(prompt, str) or _is_texts(prompt) or _is_tokens(prompt) or several):
            raise ValueError(
                "must be a string, a list of strings, a list of token ids "
                "or a list of lists of token ids, none of the lists empty"
            )
        if isinstance(prompt, list) and not _is_tokens(prompt) and len(prompt) > MAX_PROMPTS:
            raise ValueError(f"must be at most {MAX_PROMPTS} prompts")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice, in order."""
        if isinstance(self.prompt, str) or _is_tokens(self.prompt):
            return [self.prompt]  # type: ignore[list-item]  # a str or a list[int], just seen
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(_Request):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(_Request):
    """One message of a conversation.

    An assistant's message may come back as the client got it: with the fields that are empty in
    every answer of this server, so long as they are empty.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise ValueError("must be a string or a list of text parts")
        return content

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatCompletionRequest(GenerationOptions):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


def _is_none(value: object) -> bool:
    return value is None


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(_Answer):
    """``cached_tokens`` of the prompt had been computed for an earlier request."""

    cached_tokens: int


class Usage(_Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeMetrics(_Answer):
    """vLLM's object, and which draft at which weights, for which topic."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    draft: str
    weight_version: int | None
    topic: str


class Metrics(_Answer):
    """Figures of one request."""

    speculative_decoding: SpeculativeMetrics


class CompletionChoice(_Answer):
    """A completed prompt, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)


class AssistantMessage(_Answer):
    """The whole answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class Delta(_Answer):
    """A piece of the answer."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)


class ChatChoice(_Answer):
    """The answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: str | None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(_Answer):
    """A piece of the answer to a conversation."""

    index: int
    delta: Delta
    logprobs: None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)


class Envelope(_Answer):
    """The object around the choices, whole answers and pieces alike."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    metrics: Metrics | None = Field(default=None, exclude_if=_is_none)
