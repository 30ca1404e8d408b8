"""Schemas of the generation requests: OpenAI's fields and Paceline's extensions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paceline.actors.engine.settings import MAX_SPECULATIVE_TOKENS

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
MAX_PROMPTS = 128
MAX_STOPS = 128
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 128
MAX_BIASES = 1024
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_TOOLS = 128
MAX_TOOLS_CHARS = 128 * 2**10  # of all tools, as JSON

CONTEXT_LENGTH = "context_length"  # key of pydantic's validation context, in tokens
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"

# Fields of OpenAI and vLLM that would change the answer, accepted at these values only.
NO_OP_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1.0),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "truncate_prompt_tokens": (None,),
    "logits_processors": (None, []),
    "vllm_xargs": (None, {}),
    "kv_transfer_params": (None,),
    "return_tokens_as_token_ids": (None, False),
    "chat_template": (None,),
    "documents": (None, []),
    "mm_processor_kwargs": (None, {}),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "verbosity": (None, "medium"),
    "background": (None, False),
    "truncation": (None, "disabled"),
    "web_search_options": (None,),
}


class RequestModel(BaseModel):
    """A part of a request: unknown fields and other types are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


ItemT = TypeVar("ItemT")
# A list of a request. It is refused at its first bad item: an error for each one of a large body
# would take gigabytes, and minutes of the event loop.
Items = Annotated[list[ItemT], Field(fail_fast=True)]


def null_as(default: Any) -> BeforeValidator:
    """Read null as the default: some clients send it for fields that are not set."""
    return BeforeValidator(lambda value: default if value is None else value)


Flag = Annotated[bool, null_as(False)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0, allow_inf_nan=False)]


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False
    include_obfuscation: Flag = False


class Speculative(RequestModel):
    """Paceline's extension: the draft model and the number of speculative tokens.

    ``draft`` is ``auto``, an expert (``sql``, ``general``), its first weights (``sql@0``) or
    ``off``.
    """

    draft: Annotated[str, null_as("auto")] = "auto"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)] | None = None


class StructuredOutputs(RequestModel):
    """vLLM's constraints of an answer, one of them: a JSON schema, a regex, texts, a grammar."""

    json_schema: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    regex: Annotated[str, Field(min_length=1)] | None = None
    choice: Annotated[Items[str], Field(min_length=1)] | None = None
    grammar: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self._given()) != 1:
            raise ValueError("must have one of json, regex, choice and grammar")
        return self

    def _given(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)

    @property
    def constraint(self) -> tuple[str, Any]:
        """The constraint's field and its value."""
        return self._given().popitem()


class JsonSchema(RequestModel):
    """OpenAI's named JSON schema.

    Answers follow it whether ``strict`` is true or not; if not, without the keywords that cannot be
    compiled.
    """

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    """OpenAI's format of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _one_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("the type json_schema needs a json_schema, an object with the schema")
        if self.type != "json_schema" and self.json_schema is not None:
            raise ValueError("json_schema belongs to the type json_schema")
        return self


class SamplingOptions(RequestModel):
    """Fields of all endpoints that generate.

    Those of type ``Any`` cannot change an answer here and are ignored, or are in `NO_OP_VALUES`.
    """

    model: str
    temperature: Annotated[float, Field(ge=0.0, le=2.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100.0, allow_inf_nan=False)] | None = (
        None
    )
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: (
        Annotated[
            Items[Annotated[int, Field(ge=0, le=INT32_MAX)]], Field(max_length=MAX_STOP_TOKENS)
        ]
        | None
    ) = None
    min_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    ignore_eos: Flag = False
    stream: bool | None = None
    speculative: Annotated[Speculative, null_as(Speculative())] = Field(default_factory=Speculative)
    store: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: Flag = False
    metadata: dict[str, str] | None = None
    user: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    service_tier: Any = None
    priority: Any = None
    request_id: Any = None
    spaces_between_special_tokens: Any = None
    use_beam_search: Any = None
    length_penalty: float | None = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    logits_processors: Any = None
    vllm_xargs: Any = None
    kv_transfer_params: Any = None
    return_tokens_as_token_ids: Any = None
    structured_outputs: StructuredOutputs | None = None

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
        if max(map(len, strings), default=0) > MAX_STOP_CHARS:
            raise ValueError(f"must be strings of at most {MAX_STOP_CHARS} characters")
        return strings

    @field_validator("logit_bias", mode="plain")
    @classmethod
    def _logit_bias(cls, bias: Any) -> dict[int, float] | None:
        if bias is None:
            return None
        if not isinstance(bias, dict) or not all(map(_is_bias, bias.items())):
            raise ValueError("must map token ids to numbers from -100 to 100")
        if len(bias) > MAX_BIASES:
            raise ValueError(f"must be at most {MAX_BIASES} tokens")
        return {int(token): float(value) for token, value in bias.items()}


class GenerationOptions(SamplingOptions):
    """Further fields of completions and chat completions."""

    max_tokens: Annotated[int, Field(ge=0, le=INT64_MAX)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Flag = False
    return_token_sources: Flag = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to report per prompt token; None for no log-probabilities."""
        return self.prompt_logprobs

    @property
    def echoes(self) -> bool:
        """Whether answers repeat their prompt."""
        return False

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")
        return self


def _is_bias(item: tuple[Any, Any]) -> bool:
    token, value = item
    # "007" and "7" would be one token twice.
    known = isinstance(token, str) and token.isascii() and token.isdigit() and len(token) <= 9
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return known and str(int(token)) == token and number and abs(value) <= 100


def prompt_too_long(context_length: int, prompt_tokens: int | str) -> str:
    """The message for a prompt that leaves no room for an answer."""
    return (
        f"This model's maximum context length is {context_length} tokens, with at least one for "
        f"the answer; the prompt has {prompt_tokens}."
    )


def _is_tokens(value: Any, context_length: int | None) -> bool:
    """Whether it is a list of token ids; one beyond the context length is not iterated."""
    if not (isinstance(value, list) and value and type(value[0]) is int):
        return False
    if context_length is not None and len(value) >= context_length:
        text = prompt_too_long(context_length, len(value))
        raise PydanticCustomError(CONTEXT_LENGTH_EXCEEDED, "{text}", {"text": text})
    return all(type(item) is int and 0 <= item < 2**31 for item in value)


def _is_prompts(value: list[Any], context_length: int | None) -> bool:
    """Whether it is a list of texts, or of lists of token ids."""
    if isinstance(value[0], str):
        return all(isinstance(item, str) for item in value)
    return all(_is_tokens(item, context_length) for item in value)


class CompletionRequest(GenerationOptions):
    """``POST /v1/completions``."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Any = None
    echo: Flag = False

    @field_validator("prompt", mode="plain")
    @classmethod
    def _prompt(cls, prompt: Any, info: ValidationInfo) -> Any:
        if isinstance(prompt, str):
            return prompt
        context_length = (info.context or {}).get(CONTEXT_LENGTH)
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
        if several and len(prompt) > MAX_PROMPTS:
            raise ValueError(f"must be at most {MAX_PROMPTS} prompts")
        is_valid = _is_prompts if several else _is_tokens
        if not is_valid(prompt, context_length):
            raise ValueError(
                "must be a string, a list of strings, a list of token ids "
                "or a list of lists of token ids, none of the lists empty"
            )
        return prompt

    @field_validator("best_of")
    @classmethod
    def _best_of(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        if best_of is not None and "n" in info.data and best_of != (info.data["n"] or 1):
            raise ValueError("must be equal to n: no choice is thrown away")
        return best_of

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((n for n in wanted if n is not None), default=None)

    @property
    def echoes(self) -> bool:
        return self.echo

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, in order."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


# The text of a part, or the refusal that an assistant gave: both are what was said.
PartText = Annotated[str, Field(validation_alias=AliasChoices("text", "refusal"))]


class TextPart(RequestModel):
    """A text part of a message's content."""

    type: Literal["text", "refusal"]
    text: PartText
    prompt_cache_breakpoint: Any = None
    cache_control: Any = None  # Anthropic's, which some clients send everywhere


class FunctionCall(RequestModel):
    """The function that an assistant called, with its arguments in JSON."""

    name: str
    arguments: Annotated[str | dict[str, Any], null_as("{}")] = "{}"
    parsed_arguments: Any = None  # OpenAI's client sends back what it read of them


class ToolCall(RequestModel):
    """A call in an assistant's turn."""

    id: str | None = None
    type: Annotated[Literal["function"], null_as("function")] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(RequestModel):
    """A message of a conversation.

    Fields of type None are accepted empty, as the assistant message of a response has them.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | Items[TextPart] | None, Field(validate_default=True)] = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    parsed: Any = None  # OpenAI's client sends back what it read of the content
    audio: None = None
    function_call: None = None
    annotations: Annotated[Items[Any], Field(max_length=0)] | None = None
    cache_control: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _content(cls, content: Any, info: ValidationInfo) -> Any:
        if content is None and info.data.get("role") == "assistant":
            return None
        if not isinstance(content, str | list):
            raise ValueError("must be a string or a list of text parts")
        return content

    @field_validator("tool_calls", "refusal")
    @classmethod
    def _of_assistants(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("role") not in ("assistant", None):
            raise ValueError("only messages of the assistant have it")
        return value

    @property
    def text(self) -> str:
        """The content as one string, or the refusal in its place; empty if there is neither."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content
        return text or self.refusal or ""


class FunctionDefinition(RequestModel):
    """A function that answers may call.

    ``parameters`` is the JSON schema of its arguments, an object; without it there are none.
    """

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None and schema.get("type", "object") != "object":
            raise ValueError("must be a JSON schema of the type 'object'")
        return schema


def _function_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "function":
        raise ValueError(f"{kind!r} is not served; 'function' is")
    return kind


FunctionType = Annotated[Literal["function"], BeforeValidator(_function_type)]


class Tool(RequestModel):
    """A tool: a function."""

    type: FunctionType
    function: FunctionDefinition
    cache_control: Any = None


class FunctionName(RequestModel):
    """The name of a function."""

    name: str


class NamedTool(RequestModel):
    """The choice of one function, which the answer then calls."""

    type: FunctionType
    function: FunctionName


ToolMode = Literal["none", "auto", "required"]


def choice_type(choice: Any) -> str:
    """Tell a mode from a tool."""
    return "mode" if isinstance(choice, str) else "tool"


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("mode")] | Annotated[NamedTool, Tag("tool")],
    Discriminator(choice_type),
]


def check_tools(functions: Sequence[FunctionDefinition]) -> None:
    """Refuse functions with one name, and too much text.

    Raises:
        ValueError: says which.
    """
    names = [function.name for function in functions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two functions have the name {twice[0]!r}")
    if sum(len(function.model_dump_json()) for function in functions) > MAX_TOOLS_CHARS:
        raise ValueError(f"must have at most {MAX_TOOLS_CHARS} characters")


def _checked_tools(tools: list[Tool]) -> list[Tool]:
    check_tools([tool.function for tool in tools])
    return tools


Tools = Annotated[Items[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_checked_tools)]


def check_tool_choice(choice: str | None, names: Collection[str], *, named: bool) -> None:
    """Refuse a choice that the tools do not allow.

    Args:
        choice: a mode, or the name of a function; None if there is no choice.
        names: of the functions.
        named: whether the choice is a function.

    Raises:
        ValueError: says why.
    """
    if not names and (named or choice == "required"):
        raise ValueError("there are no tools to choose from")
    if named and choice not in names:
        raise ValueError(f"no tool has the name {choice!r}")


class ChatTemplateOptions(RequestModel):
    """How a conversation becomes a prompt."""

    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @field_validator("continue_final_message")
    @classmethod
    def _one_end(cls, continues: bool, info: ValidationInfo) -> bool:
        if continues and info.data.get("add_generation_prompt"):
            raise ValueError("contradicts add_generation_prompt")
        return continues


class ChatCompletionRequest(GenerationOptions, ChatTemplateOptions):
    """``POST /v1/chat/completions``."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] | None = None
    chat_template: Any = None
    documents: Any = None
    mm_processor_kwargs: Any = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    function_call: Any = None
    response_format: ResponseFormat | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    include_reasoning: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @field_validator("tool_choice")
    @classmethod
    def _tool_choice(cls, choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if "tools" in info.data:  # and valid
            names = [tool.function.name for tool in info.data["tools"] or ()]
            chosen = choice.function.name if isinstance(choice, NamedTool) else choice
            check_tool_choice(chosen, names, named=isinstance(choice, NamedTool))
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top and not info.data.get("logprobs", True):
            raise ValueError("needs logprobs to be true")
        return top

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(ChatTemplateOptions):
    """``POST /tokenize``: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[
        Annotated[Items[ChatMessage], Field(min_length=1)] | None, Field(validate_default=True)
    ] = None
    tools: Tools | None = None
    return_token_strs: Flag = False

    @field_validator("messages")
    @classmethod
    def _one_text(
        cls, messages: list[ChatMessage] | None, info: ValidationInfo
    ) -> list[ChatMessage] | None:
        if (messages is None) == (info.data.get("prompt") is None):
            raise ValueError("must be there, or prompt, and not both")
        return messages


class DetokenizeRequest(RequestModel):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Items[Annotated[int, Field(ge=0, le=INT32_MAX)]]
