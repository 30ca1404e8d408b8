"""Conversations as clients send them, through the target's own chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from tool_templates import HERMES

from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.request_parser import parse_options
from paceline.deploy.api.request_schemas import ChatCompletionRequest, CompletionRequest
from paceline.deploy.api.token_length import token_length
from paceline.deploy.api.token_names import TokenNames
from paceline.deploy.errors import ApiError

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/"}'}}
SHOW = (
    "{% for m in messages %}[{{ m.role }}{{ m.name or '' }}{{ m.tool_call_id or '' }}]"
    "{{ m.reasoning_content or '' }}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.path }})"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[go]{% endif %}"
    "{{ mood or '' }}{{ reasoning_effort or '' }}"
)


def encoder(template: str | None = None) -> PromptEncoder:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer.chat_template = template
    return PromptEncoder(tokenizer, len(tokenizer))


def prompt(*messages: Any, template: str | None = None, **fields: Any) -> str:
    """The text of the prompt that a conversation becomes, with its special tokens."""
    body = json.dumps({"model": "m", "messages": messages} | fields).encode()
    request = parse_options(body, ChatCompletionRequest, "m")
    return str(tiny_tokenizer().decode(encoder(template).encode_chat(request.messages, request)))


@pytest.mark.parametrize("empty", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_s_turn_may_have_no_content(empty: dict[str, Any]) -> None:
    text = prompt(USER, {"role": "assistant"} | empty, USER)
    assert text == "<s><|user|>hi<|assistant|></s><|user|>hi<|assistant|>"


def test_calls_and_results_of_tools_reach_the_template() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "name": "ls", "content": "bin etc"}
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    shown = "[user]hi[assistant]ls(/)[toollsc1]bin etc[go]"
    assert prompt(USER, call, result, template=SHOW) == shown
    del result["name"]  # as OpenAI's clients send it
    assert prompt(USER, call, result, template=SHOW) == shown


def test_a_template_of_its_own_for_tools_is_used_with_tools() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": HERMES}
    own = PromptEncoder(tokenizer, len(tokenizer))
    assert own.template_tools.format is not None
    calls = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL]}
    tools = [{"type": "function", "function": {"name": "ls"}}]
    body = json.dumps({"model": "m", "messages": [USER, calls], "tools": tools}).encode()
    request = parse_options(body, ChatCompletionRequest, "m")
    shown = own.decode(own.encode_chat(request.messages, request, tools=request.tools or ()))
    hidden = own.decode(own.encode_chat(request.messages, request), skip_special_tokens=False)
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
    assert shown.startswith("<|im_start|>system\n# Tools\n")
    assert f"Wait.\n{call}<|im_end|>" in shown
    assert f"<|assistant|>Wait.\n{call}</s>" in hidden


def test_a_template_without_tool_calls_gets_them_as_text() -> None:
    calls = {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]}
    said = prompt(USER, calls, {"role": "tool", "content": "bin"})
    call = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
    assert f"<|assistant|>Wait.\n{call}\n{call}</s>" in said
    assert said.endswith("bin<|assistant|>")


@pytest.mark.parametrize("arguments", ["", "{", "[1", {"path": "/"}])
def test_arguments_that_are_no_json_are_passed_on_as_they_are(arguments: Any) -> None:
    call = {"function": {"name": "ls", "arguments": arguments}}
    said = prompt(USER, {"role": "assistant", "tool_calls": [call]})
    assert json.dumps({} if arguments == "" else arguments) in said


@pytest.mark.parametrize("template", [None, HERMES])
@pytest.mark.parametrize("arguments", [r'{"path": "\ud800"}', r'{"\udfff": 1}', r'"\ud800"'])
def test_arguments_with_half_a_character_are_passed_on_as_they_are(
    template: str | None, arguments: str
) -> None:
    call = {"function": {"name": "ls", "arguments": arguments}}
    said = prompt(USER, {"role": "assistant", "tool_calls": [call]}, template=template)
    assert json.dumps(arguments) in said


def test_reasoning_in_the_history_reaches_the_template() -> None:
    turn = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    assert prompt(USER, turn, template=SHOW) == "[user]hi[assistant]2+24[go]"


def test_template_options_reach_the_template() -> None:
    options = {"chat_template_kwargs": {"mood": "good", "enable_thinking": False}}
    assert prompt(USER, template=SHOW, **options) == "[user]hi[go]good"
    assert prompt(USER, template=SHOW, reasoning_effort="low") == "[user]hi[go]low"


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "conversation", "tools", "tokenizer_kwargs"]
)
def test_template_options_are_the_template_s_alone(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompt(USER, chat_template_kwargs={name: "{{ 1 }}"})
    assert (caught.value.status, caught.value.param) == (400, "chat_template_kwargs")


def test_a_final_assistant_turn_is_continued_only_when_asked() -> None:
    turns = USER, {"role": "assistant", "content": "The answer is"}
    assert prompt(*turns).endswith("The answer is</s><|assistant|>")
    assert prompt(*turns, add_generation_prompt=False).endswith("The answer is</s>")
    for explicit in (None, False):
        options = {"continue_final_message": True, "add_generation_prompt": explicit}
        assert prompt(*turns, **options).endswith("<|assistant|>The answer is")
    with pytest.raises(ApiError) as caught:
        prompt(*turns, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.param == "continue_final_message"


def test_special_tokens_are_the_template_s_or_the_tokenizer_s() -> None:
    tokenizer = tiny_tokenizer()
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    own = PromptEncoder(tokenizer, len(tokenizer))

    def completion(**fields: Any) -> list[int]:
        body = json.dumps({"model": "m", "prompt": "hi"} | fields).encode()
        return own.encode_prompts(parse_options(body, CompletionRequest, "m"))[0]

    def chat(**fields: Any) -> list[int]:
        body = json.dumps({"model": "m", "messages": [USER]} | fields).encode()
        asked = parse_options(body, ChatCompletionRequest, "m")
        return own.encode_chat(asked.messages, asked)

    assert completion() == [1, *completion(add_special_tokens=False)]
    assert chat().count(1) == 1
    assert chat(add_special_tokens=True) == [1, *chat()]


@pytest.mark.parametrize(
    "prompt",
    [
        "SELECT name",
        "Zwölf Käse, naïve café ☕ 漢字",
        "<s><|user|>hi</s>",
        [1, 3, 70, 71, 2],
        "\U0001f600",
    ],
)
def test_an_echo_has_every_token_s_text_at_its_offset(prompt: Any) -> None:
    tokenizer = tiny_tokenizer()
    own = PromptEncoder(tokenizer, len(tokenizer))
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    (token_ids,) = own.encode_prompts(parse_options(body, CompletionRequest, "m"))
    echo = own.echo(prompt, token_ids)
    assert echo.text == (prompt if isinstance(prompt, str) else tokenizer.decode(token_ids))
    assert echo.token_ids == token_ids
    assert echo.text_offsets == sorted(echo.text_offsets)
    for token, offset in zip(token_ids, echo.text_offsets, strict=True):
        name = TokenNames(tokenizer).name(token)
        assert name.partial or echo.text[offset:].startswith(name.text)


def test_tokens_that_the_tokenizer_adds_have_no_part_in_an_echoed_text() -> None:
    tokenizer = tiny_tokenizer()
    own = PromptEncoder(tokenizer, len(tokenizer))
    plain = own.echo("hi", tokenizer.encode("hi"))
    added = own.echo("hi", [1, *tokenizer.encode("hi")])
    assert added.text == plain.text == "hi"
    assert added.text_offsets == [0, *plain.text_offsets]


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, context = encoder(), 100
    length = token_length(tiny_tokenizer().backend_tokenizer)
    assert length is not None

    def completion(*prompts: str) -> CompletionRequest:
        body = json.dumps({"model": "m", "prompt": prompts}).encode()
        return parse_options(body, CompletionRequest, "m")

    def chat(text: str) -> ChatCompletionRequest:
        body = json.dumps({"model": "m", "messages": [USER, {"role": "user", "content": text}]})
        return parse_options(body.encode(), ChatCompletionRequest, "m")

    fits = own.encode_prompts(completion("<assistant>" * 10, "a"), context)
    assert fits == own.encode_prompts(completion("<assistant>" * 10, "a"))

    text = "a" * length.chars * context
    conversation = chat(text)
    assert len(own.encode_chat(conversation.messages, conversation)) > context  # as /tokenize
    monkeypatch.setattr(own, "encode_text", lambda *_: pytest.fail("it was encoded"))
    with pytest.raises(ApiError, match="at least 100") as refused:
        own.encode_prompts(completion(text, "a"), context)
    assert (refused.value.param, refused.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(ApiError, match="context length") as refused:
        own.encode_chat(conversation.messages, conversation, "input", context_length=context)
    assert (refused.value.param, refused.value.code) == ("input", "context_length_exceeded")
