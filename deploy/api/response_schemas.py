"""Schemas of the responses: OpenAI's fields and Paceline's extensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation


def _is_none(value: object) -> bool:
    return value is None


class _ResponseModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class PromptTokensDetails(_ResponseModel):
    """``cached_tokens`` come from the prefix cache."""

    cached_tokens: int


class Usage(_ResponseModel):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class SpeculativeMetrics(_ResponseModel):
    """vLLM's speculation metrics, with draft, weight version and topic.

    Suffixes' tokens are in the two ``suffix`` fields alone.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_suffix_tokens: int
    num_accepted_suffix_tokens: int
    draft: str
    weight_version: int | None
    topic: str


class Metrics(_ResponseModel):
    """Metrics of one request."""

    speculative_decoding: SpeculativeMetrics


class CompletionLogprobs(_ResponseModel):
    """Per token of a completion.

    ``top_logprobs`` holds the most probable tokens and the chosen one, ``text_offset`` counts
    characters of the choice's text. The first token of an echoed prompt has no probability.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: SkipValidation[list[dict[str, float] | None]]  # choices share their prompt's
    text_offset: list[int]


@dataclass(slots=True)  # a model takes several times as long to build, and prompts have very many
class PromptLogprob:
    """vLLM's entry of a token at a position of the prompt; the most probable has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


# By token id; None for the first token. Not copied: the choices of a prompt share one list.
PromptLogprobs = SkipValidation[list[dict[int, PromptLogprob] | None]]


class TopLogprob(_ResponseModel):
    """An alternative token; ``bytes`` are None if the tokenizer does not give them."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A token of the response."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_ResponseModel):
    """Per token of a chat message."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenSourceEntry(_ResponseModel):
    """The source of a token, see the engine's ``TokenSource``.

    ``rejected_token`` is the text of the draft token that a recovered one replaces.
    """

    token: str
    text_offset: int
    source: Literal["accepted", "recovered", "bonus", "forced", "plain"]
    draft: str | None
    weight_version: int | None
    target_probability: float
    acceptance_probability: float | None
    rejected_token: str | None


class CompletionChoice(_ResponseModel):
    """A completion, or a chunk of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=_is_none)
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_sources: list[TokenSourceEntry] | None = Field(default=None, exclude_if=_is_none)


class CalledFunction(_ResponseModel):
    """A function and its arguments, a JSON text."""

    name: str
    arguments: str


class MessageToolCall(_ResponseModel):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(_ResponseModel):
    """A complete chat message; ``content`` is None if it has calls alone."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: list[MessageToolCall] | None = Field(default=None, exclude_if=_is_none)


class FunctionDelta(_ResponseModel):
    """A chunk of a called function: its name, or what follows of the arguments."""

    name: str | None = Field(default=None, exclude_if=_is_none)
    arguments: str


class ToolCallDelta(_ResponseModel):
    """A chunk of a call; the first one has id, type and the function's name."""

    index: int
    id: str | None = Field(default=None, exclude_if=_is_none)
    type: Literal["function"] | None = Field(default=None, exclude_if=_is_none)
    function: FunctionDelta


class Delta(_ResponseModel):
    """A chunk of a chat message."""

    role: Literal["assistant"] | None = Field(default=None, exclude_if=_is_none)
    content: str | None = Field(default=None, exclude_if=_is_none)
    tool_calls: list[ToolCallDelta] | None = Field(default=None, exclude_if=_is_none)


class ChatChoice(_ResponseModel):
    """A complete chat choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_sources: list[TokenSourceEntry] | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(_ResponseModel):
    """A chunk of a chat choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_sources: list[TokenSourceEntry] | None = Field(default=None, exclude_if=_is_none)


class GenerationResponse(_ResponseModel):
    """A generation response, complete or a chunk."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    metrics: Metrics | None = Field(default=None, exclude_if=_is_none)
    prompt_logprobs: PromptLogprobs | None = Field(default=None, exclude_if=_is_none)


class UsageChunk(GenerationResponse):
    """A chunk of a stream with ``include_usage``: its usage is null except in the last one."""

    usage: Usage | None = None


class ModelCard(_ResponseModel):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["paceline"] = "paceline"
    max_model_len: int
    default_sampling_params: dict[str, float]


class ModelList(_ResponseModel):
    """The served models: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(_ResponseModel):
    """vLLM's answer to ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(_ResponseModel):
    """vLLM's answer to ``/detokenize``."""

    prompt: str


class ErrorDetail(_ResponseModel):
    """The error and the request field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(_ResponseModel):
    """The body of every error."""

    error: ErrorDetail
