"""Answers with OpenAI's field names, and Paceline's extensions to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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


class CompletionLogprobs(_Answer):
    """Per token of a completion; ``text_offset`` counts characters of the choice's text.

    ``top_logprobs`` holds the most probable tokens and the chosen one.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TopLogprob(_Answer):
    """A token that could have stood here; ``bytes`` are its own where it is part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None  # OpenAI's word


class ChatTokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """Per token of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenOriginEntry(_Answer):
    """Where a token of the answer comes from; see ``TokenOrigin`` of the engine for the words.

    ``rejected_token`` is the text of the draft's token that a recovered one stands for.
    """

    token: str
    text_offset: int
    origin: Literal["accepted", "recovered", "bonus", "plain"]
    draft: str | None
    weight_version: int | None
    target_probability: float
    acceptance_probability: float | None
    rejected_token: str | None


class CompletionChoice(_Answer):
    """A completed prompt, or a piece of one in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_origins: list[TokenOriginEntry] | None = Field(default=None, exclude_if=_is_none)


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
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_origins: list[TokenOriginEntry] | None = Field(default=None, exclude_if=_is_none)


class ChatChunkChoice(_Answer):
    """A piece of the answer to a conversation."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = Field(default=None, exclude_if=_is_none)
    token_origins: list[TokenOriginEntry] | None = Field(default=None, exclude_if=_is_none)


class Envelope(_Answer):
    """The object around the choices, whole answers and pieces alike."""

    id: str
    object: Literal["text_completion", "chat.completion", "chat.completion.chunk"]
    created: int
    model: str
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]
    usage: Usage | None = Field(default=None, exclude_if=_is_none)
    metrics: Metrics | None = Field(default=None, exclude_if=_is_none)


class ModelCard(_Answer):
    """The served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["paceline"] = "paceline"
    max_model_len: int


class ModelList(_Answer):
    """All models that are served: one."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorDetail(_Answer):
    """What was wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    """Every failure."""

    error: ErrorDetail
