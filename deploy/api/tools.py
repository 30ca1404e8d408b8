"""The tools of a request: what the chat template shows of them, and how answers may call them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.deploy.api.request_schemas import (
    ChatCompletionRequest,
    FunctionDefinition,
    NamedTool,
    Tool,
)
from paceline.deploy.api.tool_calls import ToolSyntax
from paceline.deploy.api.tool_formats import PROBE, ToolFormat, lenient, shown_format
from paceline.deploy.errors import ApiError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class TemplateTools:
    """What a model's chat template knows of tools.

    Attributes:
        known: whether prompts show tools.
        format: of the model's calls, None if it is not read here.
        tokens: ids of the parts of the format that are tokens of the vocabulary.
        special: whether some of them are special tokens, which texts leave out.
        several: whether the template shows all calls of a turn; Llama 3's refuses a second one.
    """

    known: bool = False
    format: ToolFormat | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    special: bool = False
    several: bool = False


def template_tools(tokenizer: PreTrainedTokenizerBase) -> TemplateTools:
    """Find out what a chat template does with tools, by having it render one and a call."""
    tool = Tool(type="function", function=FunctionDefinition(name=PROBE))
    question = {"role": "user", "content": "a"}
    calls = [
        {
            "type": "function",
            "id": f"call0000{i}",
            "function": {"name": name, "arguments": {"a": "b"}},
        }
        for i, name in enumerate((f"{PROBE}_call", f"{PROBE}_again"))
    ]
    turns = [{"role": "assistant", "content": "", "tool_calls": calls[: i + 1]} for i in range(2)]
    shown = _render(tokenizer, [question], [tool])
    if PROBE not in shown:
        return TemplateTools()
    one, two = (_render(tokenizer, [question, turn], [tool]) for turn in turns)
    found = shown_format(shown + one)
    if found is None:
        return TemplateTools(known=True)
    before, _, behind = found.written
    parts = {
        token_id: token
        for token_id, token in tokenizer.added_tokens_decoder.items()
        if token.content in (*before, *behind)
    }
    tokens = {token.content: token_id for token_id, token in parts.items()}
    special = any(token.special for token in parts.values())
    several = f"{PROBE}_again" in two
    return TemplateTools(True, found, tokens, special, several)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], tools: Sequence[Tool]
) -> str:
    """What a template makes of messages; empty if it refuses them."""
    try:
        shown = shown_tools(tools)
        return str(tokenizer.apply_chat_template(messages, tools=shown, tokenize=False))
    except Exception as error:  # a template is a program by the model's authors
        logger.info("the chat template refuses a call of a tool: %r", error)
        return ""


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates read them."""
    return [_shown(tool.function) for tool in tools]


def _shown(function: FunctionDefinition) -> dict[str, Any]:
    shown = {
        "name": function.name,
        "description": function.description or "",
        "parameters": _NO_PARAMETERS if function.parameters is None else function.parameters,
    }
    return {"type": "function", "function": shown}


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools that the answers to a request may call.

    Attributes:
        tools: that the prompt shows; none with ``tool_choice`` "none".
        syntax: of the calls in the answers, None if they have none.
        functions: of which an answer has to call one; empty if it need not.
        template: of the model.
        strict: whether calls that need not come follow the schemas of functions that are strict.
    """

    tools: tuple[Tool, ...] = ()
    syntax: ToolSyntax | None = None
    functions: tuple[FunctionDefinition, ...] = ()
    template: TemplateTools = field(default_factory=TemplateTools)
    strict: bool = False

    def grammar_source(self, text_schemas: Sequence[Any]) -> dict[str, Any]:
        """The arguments of calls_grammar.

        Args:
            text_schemas: JSON schema of answers that call nothing; none if they have to call, or
                may have any text.
        """
        assert self.syntax is not None
        functions = self.functions or [tool.function for tool in self.tools]
        free_text = not (self.functions or text_schemas)
        return {
            "form": self.syntax.format.name,
            "functions": [
                [f.name, _argument_schema(f) if f.strict or not free_text else {"type": "object"}]
                for f in functions
            ],
            "several": self.syntax.several and self.template.several,
            "tokens": self.template.tokens,
            "text_schema": text_schemas[0] if text_schemas else None,
            "free_text": free_text,
        }


def _argument_schema(function: FunctionDefinition) -> dict[str, Any]:
    if function.parameters is None:
        return _NO_PARAMETERS
    schema = {"type": "object"} | function.parameters
    return schema if function.strict else lenient(schema)


def request_tools(options: ChatCompletionRequest, template: TemplateTools) -> RequestTools:
    """Decide how the answers to a request may call its tools.

    Raises:
        ApiError: 400 naming ``tools`` if the template knows none or its calls are not read here.
    """
    tools, choice = tuple(options.tools or ()), options.tool_choice
    if not tools or choice == "none":
        return RequestTools()
    check_known(template)
    if template.format is None:
        raise _not_served("this model writes calls in a form that is not read here")
    functions = tuple(tool.function for tool in tools)
    names = frozenset(function.name for function in functions)
    several = options.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    if isinstance(choice, NamedTool):
        functions = tuple(f for f in functions if f.name == choice.function.name)
    elif choice != "required":
        functions = ()
    syntax = ToolSyntax(template.format, names, several)
    # Where a tag of several tokens begins, text and calls cannot be told apart.
    strict = template.format.tag in template.tokens and any(t.function.strict for t in tools)
    return RequestTools(tools, syntax, functions, template, strict)


def check_known(template: TemplateTools) -> None:
    """Refuse tools that the chat template would leave out.

    Raises:
        ApiError: 400 naming ``tools``.
    """
    if not template.known:
        raise _not_served(
            "this model's chat template knows no tools. Leave them out, or send tool_choice 'none'"
        )


def _not_served(reason: str) -> ApiError:
    text = f"Tools are not served: {reason}."
    return ApiError(400, text, param="tools", code="unsupported_value")
