"""OpenAI's Responses API as chat: the request, and the conversation that it stands for.

No conversation is kept here: ``input`` has the whole history.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from paceline.deploy.api.request_schemas import (
    INT64_MAX,
    MAX_LOGPROBS,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatMessage,
    ChatTemplateOptions,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    FunctionType,
    Items,
    JsonSchema,
    NamedTool,
    PartText,
    RequestModel,
    ResponseFormat,
    SamplingOptions,
    StreamOptions,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMode,
    check_tool_choice,
    check_tools,
    choice_type,
    null_as,
)
from paceline.deploy.errors import invalid_value

LOGPROBS = "message.output_text.logprobs"  # of ``include``
# Some clients always ask for encrypted reasoning: no answer has any.
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ContentPart(RequestModel):
    """A text part of a message, sent or answered."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: PartText
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None  # OpenAI's client sends back what it read of the text
    prompt_cache_breakpoint: Any = None


class MessageItem(RequestModel):
    """A message; an answered one has ``id`` and ``status``."""

    type: Annotated[Literal["message"], null_as("message")] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Items[ContentPart]
    id: Any = None
    status: Any = None
    phase: Any = None


class FunctionCallItem(RequestModel):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None  # OpenAI's client sends back what it read of them
    id: Any = None
    status: Any = None
    caller: Any = None
    namespace: None = None
    # OpenAI's client dumps its own name of the field.
    is_async: Literal[False] | None = Field(None, validation_alias=AliasChoices("async", "async_"))


class FunctionCallOutputItem(RequestModel):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Items[ContentPart]
    id: Any = None
    status: Any = None
    caller: Any = None
    name: str | None = None
    namespace: None = None


class ReasoningItem(RequestModel):
    """Another model's reasoning: its summary and content are not read."""

    type: Literal["reasoning"]
    id: Any = None
    summary: Any = None
    content: Any = None
    encrypted_content: Any = None
    status: Any = None


def _item_type(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return "message" if kind is None else str(kind)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _item_type,
        custom_error_type="unknown_item",
        custom_error_message="its type is none of message, function_call, function_call_output and "
        "reasoning; no conversation is kept here, so send an item itself and no item_reference to "
        "it (clients do with store: false)",
    ),
]


def _as_items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class Reasoning(RequestModel):
    """How much a model reasons: ``effort`` is a variable of the chat template."""

    effort: str | None = None
    summary: Any = None
    generate_summary: Any = None


class TextFormat(JsonSchema):
    """Chat's ``response_format``, without its inner object."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type json_schema needs a schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("schema belongs to the type json_schema")
        return self

    @property
    def response_format(self) -> ResponseFormat:
        """The same to chat completions."""
        schema = self if self.type == "json_schema" else None
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(RequestModel):
    """The form of the answer."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class _TypedFunction(RequestModel):
    type: FunctionType  # before the name: another type is the first problem


class FunctionTool(FunctionDefinition, _TypedFunction):
    """A function that answers may call."""

    defer_loading: Literal[False] | None = None


class NamedFunction(FunctionName, _TypedFunction):
    """The choice of one function, which the answer then calls."""


FunctionChoice = Annotated[
    Annotated[ToolMode, Tag("mode")] | Annotated[NamedFunction, Tag("tool")],
    Discriminator(choice_type),
]


class ResponsesRequest(SamplingOptions, ChatTemplateOptions):
    """``POST /v1/responses``."""

    input: Annotated[Items[InputItem], Field(min_length=1), BeforeValidator(_as_items)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: Items[Included] | None = None
    stream_options: StreamOptions | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: None = None
    truncation: Any = None
    max_tool_calls: Any = None
    background: Any = None
    tools: Annotated[Items[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FunctionChoice | None = None
    parallel_tool_calls: bool | None = None

    @field_validator("previous_response_id", "conversation")
    @classmethod
    def _no_conversations(cls, name: Any) -> Any:
        if name is not None:
            raise ValueError("no conversation is kept here; send the whole history as input")
        return name

    @field_validator("tools")
    @classmethod
    def _tools(cls, tools: list[FunctionTool] | None) -> list[FunctionTool] | None:
        check_tools(tools or ())
        return tools

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice(
        cls, choice: FunctionChoice | None, info: ValidationInfo
    ) -> FunctionChoice | None:
        if "tools" in info.data:  # and valid
            names = [tool.name for tool in info.data["tools"] or ()]
            chosen = choice.name if isinstance(choice, NamedFunction) else choice
            check_tool_choice(chosen, names, named=isinstance(choice, NamedFunction))
        return choice

    @property
    def text_format(self) -> dict[str, Any]:
        """The format of the answer, as sent."""
        if self.text is None or self.text.format is None:
            return {"type": "text"}
        return self.text.format.model_dump(by_alias=True, exclude_unset=True)

    def messages(self) -> list[ChatMessage]:
        """The conversation.

        Raises:
            ApiError: 400 naming ``input`` if it has no message.
        """
        found: list[ChatMessage] = []
        if self.instructions is not None:
            found.append(ChatMessage(role="system", content=self.instructions))
        for item in self.input:
            if isinstance(item, MessageItem):
                found.append(ChatMessage(role=item.role, content=_text(item.content)))
            elif isinstance(item, FunctionCallItem):
                function = FunctionCall(name=item.name, arguments=item.arguments)
                call = ToolCall(id=item.call_id, function=function)
                turn = ChatMessage(role="assistant")
                if found and found[-1].role == "assistant":
                    turn = found.pop()
                calls = [*(turn.tool_calls or ()), call]
                found.append(turn.model_copy(update={"tool_calls": calls}))
            elif isinstance(item, FunctionCallOutputItem):
                text, name, call_id = _text(item.output), item.name, item.call_id
                found.append(
                    ChatMessage(role="tool", content=text, name=name, tool_call_id=call_id)
                )
        if not found:
            raise invalid_value("input", "it has no message")
        return found

    def chat_options(self) -> ChatCompletionRequest:
        """The same request to chat completions.

        Raises:
            ApiError: see `messages`.
        """
        shared = SamplingOptions.model_fields.keys() | ChatTemplateOptions.model_fields.keys()
        values = {name: getattr(self, name) for name in shared & self.model_fields_set}
        if self.reasoning is not None and self.reasoning.effort is not None:
            values["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            values["response_format"] = self.text.format.response_format
        choice: ToolChoice | None
        if isinstance(self.tool_choice, NamedFunction):
            choice = NamedTool(type="function", function=FunctionName(name=self.tool_choice.name))
        else:
            choice = self.tool_choice
        return ChatCompletionRequest.model_construct(
            messages=self.messages(),
            max_completion_tokens=self.max_output_tokens,
            logprobs=bool(self.top_logprobs) or LOGPROBS in (self.include or ()),
            top_logprobs=self.top_logprobs,
            tools=[Tool.model_construct(type="function", function=f) for f in self.tools or ()],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            **values,
        )


def _text(content: str | list[ContentPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
