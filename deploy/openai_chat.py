"""Chat requests with OpenAI's field names; see :mod:`paceline.deploy.openai_types`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from paceline.deploy.openai_types import (
    INT64_MAX,
    MAX_LOGPROBS,
    GenerationOptions,
    RequestModel,
)


class TextPart(RequestModel):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(RequestModel):
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
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
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

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs to be true")
        return top

    @property
    def num_logprobs(self) -> int | None:
        """See GenerationOptions."""
        return (self.top_logprobs or 0) if self.logprobs else None
