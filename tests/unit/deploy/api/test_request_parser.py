"""Requests: what is served, what is refused, and which field is named."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from paceline.actors.router.policy import Route
from paceline.deploy.api.grammars import grammar_source
from paceline.deploy.api.prompt_encoder import check_token_ids
from paceline.deploy.api.request_parser import (
    MAX_PROMPT_ENTRIES,
    check_draft,
    check_prompt_entries,
    chose_length,
    engine_request,
    explicit_expert,
    parse_json,
    parse_options,
    requested_max_tokens,
    resolve_max_tokens,
    sampling_params,
)
from paceline.deploy.api.request_schemas import (
    CONTEXT_LENGTH,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    RequestModel,
    Speculative,
)
from paceline.deploy.api.responses_request import ResponsesRequest
from paceline.deploy.api.tools import shown_tools
from paceline.deploy.api.topic_admin import AddTopicRequest
from paceline.deploy.errors import ApiError

EXPERTS = ("general", "math", "sql")
USER = {"role": "user", "content": "hi"}
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
FUNCTION = "messages.0.tool_calls.0.function"


def subclasses(model: type[BaseModel]) -> set[type[BaseModel]]:
    return {model}.union(*map(subclasses, model.__subclasses__()))


REQUEST_MODELS = sorted(subclasses(RequestModel), key=lambda model: model.__name__)


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "paceline", "prompt": "hi"} | fields
    return parse_options(json.dumps(body).encode(), CompletionRequest, "paceline")


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "paceline", "messages": [USER]} | fields
    return parse_options(json.dumps(body).encode(), ChatCompletionRequest, "paceline")


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": 3}, "model", "invalid_type"),
        ({"flavour": "mint"}, "flavour", "unknown_parameter"),
        ({"speculative": {"drfat": "sql"}}, "speculative.drfat", "unknown_parameter"),
        ({"speculative": {"draft": 3}}, "speculative.draft", "invalid_type"),
        ({"speculative": "off"}, "speculative", "invalid_type"),
        (
            {"speculative": {"num_speculative_tokens": -1}},
            "speculative.num_speculative_tokens",
            "invalid_value",
        ),
        ({"max_tokens": -5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": -0.1}, "top_p", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"top_k": 2**31}, "top_k", "invalid_value"),
        ({"top_k": "5"}, "top_k", "invalid_type"),
        ({"top_k": True}, "top_k", "invalid_type"),
        ({"max_tokens": 2**63}, "max_tokens", "invalid_value"),
        ({"temperature": True}, "temperature", "invalid_type"),
        ({"temperature": "1"}, "temperature", "invalid_type"),
        ({"top_p": "1"}, "top_p", "invalid_type"),
        ({"seed": -(2**63) - 1}, "seed", "invalid_value"),
        ({"seed": 1.5}, "seed", "invalid_type"),
        (
            {"speculative": {"num_speculative_tokens": 33}},
            "speculative.num_speculative_tokens",
            "invalid_value",
        ),
        (
            {"speculative": {"num_speculative_tokens": "4"}},
            "speculative.num_speculative_tokens",
            "invalid_type",
        ),
        ({"n": "1"}, "n", "invalid_type"),
        ({"str": 1}, "str", "unknown_parameter"),
        ({"a[0]": 1}, "a[0]", "unknown_parameter"),
        ({"speculative": {"list[str]": 1}}, "speculative.list[str]", "unknown_parameter"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"seed": "lucky"}, "seed", "invalid_type"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["a", 1]}, "stop", "invalid_value"),
        ({"stop": ["a"] * 129}, "stop", "invalid_value"),
        ({"stop": ["a", "b" * 257]}, "stop", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_costs": True}},
            "stream_options.include_costs",
            "unknown_parameter",
        ),
        ({"store": "no"}, "store", "invalid_type"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_type"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"min_p": 1.1}, "min_p", "invalid_value"),
        ({"min_p": -0.1}, "min_p", "invalid_value"),
        ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
        ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
        ({"frequency_penalty": "1"}, "frequency_penalty", "invalid_type"),
        ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": -1}, "repetition_penalty", "invalid_value"),
        ({"repetition_penalty": 1000}, "repetition_penalty", "invalid_value"),
        ({"logit_bias": {"50": 101}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"50": True}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"50": "1"}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"007": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": {"²": 1}}, "logit_bias", "invalid_value"),
        ({"logit_bias": [1]}, "logit_bias", "invalid_value"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias", "invalid_value"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "invalid_value"),
        ({"stop_token_ids": [True]}, "stop_token_ids.0", "invalid_type"),
        ({"stop_token_ids": 5}, "stop_token_ids", "invalid_type"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids", "invalid_value"),
        ({"min_tokens": -1}, "min_tokens", "invalid_value"),
        ({"min_tokens": "3"}, "min_tokens", "invalid_type"),
    ],
)
@pytest.mark.parametrize("ask", [completion, chat])
def test_a_bad_field_is_named(ask: Any, fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("ask", "fields", "param"),
    [
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": 3}, "prompt"),
        (completion, {"prompt": ["a", 1]}, "prompt"),
        (completion, {"prompt": [[1], []]}, "prompt"),
        (completion, {"prompt": [-1]}, "prompt"),
        (completion, {"prompt": [True]}, "prompt"),
        (completion, {"prompt": ["a"] * 129}, "prompt"),
        (completion, {"echo": "yes"}, "echo"),
        (completion, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (completion, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (chat, {"echo": True}, "echo"),
        (completion, {"suffix": "end"}, "suffix"),
        (completion, {"best_of": 3}, "best_of"),
        (completion, {"best_of": 3, "n": 2}, "best_of"),
        (completion, {"best_of": 0}, "best_of"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": -1}, "logprobs"),
        (completion, {"messages": [USER]}, "messages"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": "hi"}, "messages"),
        (chat, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (chat, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        (chat, {"messages": [{"role": "clown", "content": "x"}]}, "messages.0.role"),
        (chat, {"messages": [USER, {"content": "x"}]}, "messages.1.role"),
        (chat, {"messages": [USER | {"mood": "good"}]}, "messages.0.mood"),
        (chat, {"messages": [USER | {"str": "good"}]}, "messages.0.str"),
        (chat, {"messages": [USER | {"content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        (chat, {"messages": [USER | {"refusal": "no"}]}, "messages.0.refusal"),
        (
            chat,
            {"messages": [USER | {"content": [{"type": "refusal"}]}]},
            "messages.0.content.0.text",
        ),
        (chat, {"messages": [USER | {"tool_calls": [CALL]}]}, "messages.0.tool_calls"),
        (chat, {"messages": [CALLING | {"tool_calls": [{"id": "x"}]}]}, FUNCTION),
        (chat, {"messages": [{"role": "tool"}]}, "messages.0.content"),
        (chat, {"chat_template": "{{ 1 }}"}, "chat_template"),
        (chat, {"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        (chat, {"documents": [{"text": "x"}]}, "documents"),
        (completion, {"bad_words": ["x"]}, "bad_words"),
        (completion, {"use_beam_search": True}, "use_beam_search"),
        (completion, {"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        (chat, {"max_completion_tokens": 2**63}, "max_completion_tokens"),
        (chat, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (chat, {"tools": [{"type": "function"}]}, "tools.0.function"),
        (chat, {"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type"),
        (chat, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        (chat, {"tools": [tool("a b")]}, "tools.0.function.name"),
        (chat, {"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
        (chat, {"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
        (chat, {"tools": [tool(), tool()]}, "tools"),
        (chat, {"tools": [tool(f"f{i}") for i in range(129)]}, "tools"),
        (chat, {"tools": [tool(description="x" * 2**17)]}, "tools"),
        (chat, {"tools": {}}, "tools"),
        (chat, {"tool_choice": "required"}, "tool_choice"),
        (chat, {"tools": [], "tool_choice": named("f")}, "tool_choice"),
        (chat, {"tools": [tool()], "tool_choice": named("g")}, "tool_choice"),
        (chat, {"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (chat, {"tools": [tool()], "tool_choice": "f"}, "tool_choice"),
        (chat, {"tools": [tool()], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (chat, {"response_format": {"type": "xml"}}, "response_format.type"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format"),
        (completion, {"response_format": {"type": "json_object"}}, "response_format"),
        (chat, {"structured_outputs": {}}, "structured_outputs"),
        (completion, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (chat, {"logprobs": 5}, "logprobs"),
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        (chat, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (chat, {"best_of": 1}, "best_of"),
        (chat, {"prompt": "hi"}, "prompt"),
    ],
)
def test_a_bad_field_of_one_endpoint_is_named(ask: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_message_part_that_is_no_text_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "text": "x"}]}])
    assert caught.value.param is not None
    assert caught.value.param.startswith("messages.0.content")


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": }', b"\xff\xfe", b"null", b"[]", b"3", b'"text"']
)
def test_a_body_that_is_no_json_object_is_a_400(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_options(body, CompletionRequest, "paceline")
    assert caught.value.status == 400
    assert caught.value.code in ("invalid_json", "invalid_type")
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {"model": "paceline", "prompt": "hi"}
    del body[missing]
    with pytest.raises(ApiError) as caught:
        parse_options(json.dumps(body).encode(), CompletionRequest, "paceline")
    assert (caught.value.param, caught.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    ("asked", "times", "param"),
    [
        (completion(prompt_logprobs=3), 1, "prompt_logprobs"),
        (completion(prompt_logprobs=3, n=8), 8, "prompt_logprobs"),
        (completion(logprobs=3, echo=True, n=2), 2, "logprobs"),
        (completion(logprobs=3, echo=True, prompt_logprobs=1), 1, "prompt_logprobs"),
        (chat(prompt_logprobs=3, n=8), 1, "prompt_logprobs"),  # once for all choices
    ],
)
def test_the_log_probabilities_of_prompts_have_a_limit(asked: Any, times: int, param: str) -> None:
    most = MAX_PROMPT_ENTRIES // times // 4
    check_prompt_entries(asked, [[1] * (most - 5), [1] * 5])
    with pytest.raises(ApiError, match="times n, times 4 entries") as caught:
        check_prompt_entries(asked, [[1] * (most - 5), [1] * 6])
    assert (caught.value.status, caught.value.param) == (400, param)


def test_without_log_probabilities_of_prompts_there_is_no_limit_to_them() -> None:
    check_prompt_entries(completion(logprobs=3), [[1] * (MAX_PROMPT_ENTRIES + 1)])


def test_another_model_is_not_found() -> None:
    with pytest.raises(ApiError) as caught:
        completion(model="gpt-9")
    assert caught.value.status == 404
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize(
    ("ask", "fields", "said"),
    [
        (completion, {"use_beam_search": True}, "leave it out or send false."),
        (chat, {"function_call": {"name": "f"}}, 'leave it out or send "none".'),
        (chat, {"echo": True}, "echo: Input should be false."),
        (chat, {"messages": [{"role": "user", "content": "", "audio": 1}]}, "should be null."),
    ],
)
def test_a_refusal_names_the_value_to_send_as_json(ask: Any, fields: Any, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(**fields)
    assert caught.value.message.endswith(said)


def test_neutral_values_of_what_is_not_served_are_taken() -> None:
    chat(n=1, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, logprobs=False,
         tools=[], tool_choice="none", parallel_tool_calls=False,
         response_format={"type": "text"}, top_logprobs=None,
         user="u", metadata={"a": "b"}, service_tier="auto")  # fmt: skip
    completion(n=None, echo=None, suffix=None, best_of=1, logprobs=None)


def test_what_clients_send_by_themselves_is_taken() -> None:
    """vLLM's defaults, and what cannot change the answer."""
    both: dict[str, Any] = {
        "priority": 3, "request_id": "r", "service_tier": "flex", "user": None, "bad_words": [],
        "spaces_between_special_tokens": False, "use_beam_search": False, "length_penalty": 1.0,
        "skip_special_tokens": True, "include_stop_str_in_output": False, "top_p": 0,
        "stream": True, "stop": [str(i) for i in range(128)],
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    assert sampling_params(completion(**both), 9) == sampling_params(chat(**both), 9)
    chat(top_logprobs=0, logprobs=False, add_generation_prompt=True, echo=False, prediction={},
         chat_template_kwargs={"enable_thinking": False}, include_reasoning=True,
         messages=[USER, CALLING, {"role": "tool", "content": "x", "tool_call_id": "x"}],
         verbosity="medium")  # fmt: skip


def test_what_the_docs_call_ignored_at_all_endpoints_is_taken_there() -> None:
    lines = (Path(__file__).parents[4] / "docs" / "api.md").read_text("utf-8").splitlines()
    (row,) = (line for line in lines if line.endswith("| accepted, without effect |"))
    for name, chat_alone in re.findall(r"`(\w+)`( \(chat\))?", row):
        endpoints = {CompletionRequest, ChatCompletionRequest, ResponsesRequest}
        takes = {endpoint for endpoint in endpoints if name in endpoint.model_fields}
        assert takes == ({ChatCompletionRequest} if chat_alone else endpoints), name


def test_an_upper_bound_is_cut_to_what_fits_and_a_chosen_length_is_not() -> None:
    assert not chose_length(chat(max_completion_tokens=5))
    assert chose_length(chat(max_completion_tokens=5, ignore_eos=True))
    assert chose_length(chat(max_completion_tokens=5, min_tokens=5))
    field = "max_completion_tokens"
    assert resolve_max_tokens(99, field, 10, 100, "messages", capped=True) == 90
    assert resolve_max_tokens(9, field, 10, 100, "messages", capped=True) == 9
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(9, field, 100, 100, "messages", capped=True)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1, 2], [3]], 2), ("", 1), (["", "a"], 2)],
)
def test_prompts_come_in_four_forms(prompt: Any, count: int) -> None:
    assert len(completion(prompt=prompt).prompts) == count


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "one two"


def test_limits_have_openai_s_defaults() -> None:
    assert requested_max_tokens(completion()) == (None, "max_tokens")
    assert requested_max_tokens(completion(max_tokens=5)) == (5, "max_tokens")
    assert requested_max_tokens(chat()) == (None, "max_tokens")
    assert requested_max_tokens(chat(max_tokens=5)) == (5, "max_tokens")
    both = chat(max_tokens=5, max_completion_tokens=7)
    assert requested_max_tokens(both) == (7, "max_completion_tokens")


@given(
    asked=st.none() | st.integers(1, 3000),
    prompt=st.integers(1, 3000),
    context=st.integers(1, 2000),
)
def test_a_limit_fits_or_the_right_field_is_named(
    asked: int | None, prompt: int, context: int
) -> None:
    if prompt + (asked or 1) > context:
        with pytest.raises(ApiError) as caught:
            resolve_max_tokens(asked, "max_tokens", prompt, context, "messages")
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == ("messages" if prompt >= context else "max_tokens")
    else:
        limit = resolve_max_tokens(asked, "max_tokens", prompt, context, "messages")
        assert 1 <= limit <= context - prompt
        assert asked is None or limit == asked


def test_the_default_max_tokens_shrinks_to_the_context() -> None:
    assert resolve_max_tokens(None, "max_tokens", 90, 100, "prompt", default=16) == 10
    assert resolve_max_tokens(None, "max_tokens", 10, 100, "prompt", default=16) == 16
    with pytest.raises(ApiError) as caught:
        resolve_max_tokens(None, "max_tokens", 100, 100, "prompt", default=16)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 9e-6])
def test_next_to_no_temperature_is_greedy(temperature: float) -> None:
    assert sampling_params(completion(temperature=temperature), 9).greedy


def test_a_usual_temperature_is_kept_and_a_tiny_top_p_stays_above_zero_in_float32() -> None:
    assert sampling_params(completion(temperature=0.01), 9).temperature == 0.01
    assert sampling_params(completion(top_p=1e-300), 9).top_p == 1e-6
    assert sampling_params(completion(top_p=0.01), 9).top_p == 0.01


@pytest.mark.parametrize(
    "field",
    sorted(
        (ask, name)
        for ask, kind in (("completion", CompletionRequest), ("chat", ChatCompletionRequest))
        for name, facts in kind.model_fields.items()
        if not facts.is_required()
    ),
    ids=".".join,
)
def test_null_is_the_default_of_every_optional_field(field: tuple[str, str]) -> None:
    ask, name = field
    given, bare = ({"completion": completion, "chat": chat}[ask](**f) for f in ({name: None}, {}))
    assert sampling_params(given, 9) == sampling_params(bare, 9)
    for same in ("speculative", "ignore_eos", "return_token_ids"):
        assert getattr(given, same) == getattr(bare, same)


def test_null_is_the_default_inside_objects_too() -> None:
    asked = chat(
        stream=True,
        stream_options={"include_usage": None, "include_obfuscation": None},
        speculative={"draft": None, "num_speculative_tokens": None},
    )
    assert asked.stream_options is not None
    assert asked.stream_options.include_usage is False
    assert asked.speculative == Speculative()


@pytest.mark.parametrize("model", REQUEST_MODELS, ids=lambda model: model.__name__)
def test_null_is_taken_for_the_optional_fields_of_every_object(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        if not field.is_required():
            kind: Any = Annotated[(field.annotation, name, *field.metadata)]
            TypeAdapter(kind).validate_python(None)


@pytest.mark.parametrize("kind", ["text", "json_object", "json_schema"])
def test_a_schema_of_null_is_none(kind: str) -> None:
    form: dict[str, Any] = {"type": kind, "name": None, "schema": None, "strict": None}
    body = json.dumps({"model": "m", "input": "a", "text": {"format": form}}).encode()
    if kind == "json_schema":
        with pytest.raises(ApiError) as caught:
            parse_options(body, ResponsesRequest, "m")
        assert caught.value.param == "text.format"
        asked = chat(response_format={"type": kind, "json_schema": {"name": "x", "schema": None}})
    else:
        asked = parse_options(body, ResponsesRequest, "m").chat_options()
    bare: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        bare["json_schema"] = {"name": "x"}
    assert grammar_source(asked) == grammar_source(chat(response_format=bare))


def test_a_message_that_the_client_has_parsed_may_come_back() -> None:
    """OpenAI's client sends its own ``parsed`` and ``parsed_arguments`` along."""
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"x": 1}}
    parsed = CALLING | {"parsed": {"x": 1}, "tool_calls": [CALL | {"function": function}]}
    calls = chat(messages=[USER, parsed]).messages[1].tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.arguments) == ("f", "{}")


def test_a_refusal_is_read_as_the_assistant_s_text() -> None:
    part = {"type": "refusal", "refusal": "I can't."}
    said = [
        {"refusal": "I can't."},
        {"content": None, "refusal": "I can't."},
        {"content": "", "refusal": "I can't."},
        {"content": [], "refusal": "I can't."},
        {"content": [part]},
        {"content": "I can't.", "refusal": "No."},
    ]
    messages = chat(messages=[{"role": "assistant"} | fields for fields in said]).messages
    assert [message.text for message in messages] == ["I can't."] * len(said)
    items = [{"role": "assistant", "content": [{"type": "output_text", "text": "Oh. "}, part]}]
    body = json.dumps({"model": "m", "input": items}).encode()
    (message,) = parse_options(body, ResponsesRequest, "m").messages()
    assert message.text == "Oh. I can't."


def test_hints_for_a_cache_are_taken_wherever_clients_put_them() -> None:
    anthropic, mark = {"type": "ephemeral"}, {"mode": "explicit"}
    part = {"type": "text", "text": "hi", "cache_control": anthropic}
    message = USER | {"content": [part | {"prompt_cache_breakpoint": mark}]}
    asked = chat(
        messages=[message | {"cache_control": anthropic}],
        tools=[tool() | {"cache_control": anthropic}],
        prompt_cache_options={"mode": "explicit"},
    )
    assert asked.messages[0].text == "hi"
    assert shown_tools(asked.tools or ()) == shown_tools(chat(tools=[tool()]).tools or ())


def test_an_answer_s_message_may_come_back_as_the_client_dumped_it() -> None:
    answer = {"role": "assistant", "content": "4", "refusal": None, "annotations": None,
              "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip
    asked = chat(messages=[USER, answer, answer | {"annotations": [], "tool_calls": []}, USER])
    assert [message.text for message in asked.messages] == ["hi", "4", "4", "hi"]


@pytest.mark.parametrize(
    ("draft", "expert"),
    [("law", "law"), ("general", "general"), ("auto", None), ("off", None), ("law@0", None)],
)
def test_only_an_expert_s_own_name_names_it(draft: str, expert: str | None) -> None:
    assert explicit_expert(draft) == expert


def test_sampling_takes_openai_s_defaults_and_words() -> None:
    plain = sampling_params(completion(), 16)
    assert (plain.temperature, plain.top_p, plain.top_k, plain.seed) == (1.0, 1.0, 0, None)
    assert plain.stop == ()
    full = sampling_params(
        completion(temperature=0, top_p=0.5, top_k=-1, seed=-3, stop="x", ignore_eos=True), 9
    )
    assert (full.temperature, full.top_p, full.top_k, full.seed) == (0.0, 0.5, 0, -3)
    assert (full.stop, full.ignore_eos, full.max_tokens) == (("x",), True, 9)
    assert full.greedy
    assert sampling_params(completion(stop=["a", "b"]), 9).stop == ("a", "b")


def test_every_sampling_field_reaches_the_engine() -> None:
    fields: dict[str, Any] = {
        "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -0.5,
        "repetition_penalty": 1.2, "min_tokens": 3, "logit_bias": {"5": -100, "7": 2},
        "stop_token_ids": [9, 8], "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    sampling = sampling_params(completion(**fields, logprobs=4, n=2, best_of=2), 9, choice_index=1)
    assert sampling.has_penalties
    assert sampling.logit_bias == ((5, -100.0), (7, 2.0))
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((9, 8), 3)
    assert (sampling.skip_special_tokens, sampling.include_stop) == (False, True)
    assert (sampling.min_p, sampling.logprobs, sampling.choice) == (0.1, 4, 1)
    penalties = sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty
    assert penalties == (1.2, 0.5, -0.5)
    assert not sampling_params(completion(), 9).has_penalties


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": None, "top_logprobs": None}, None),
    ],
)
def test_chat_asks_for_logprobs_in_two_fields(fields: dict[str, Any], count: int | None) -> None:
    assert sampling_params(chat(**fields), 9).logprobs == count


def test_more_tokens_than_the_answer_may_have_are_refused() -> None:
    with pytest.raises(ApiError) as caught:
        sampling_params(completion(min_tokens=10), 9)
    assert caught.value.param == "min_tokens"
    assert sampling_params(completion(min_tokens=9), 9).min_tokens == 9


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"prompt_logprobs": 2}, 2),
        ({"prompt_logprobs": 0}, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 2}, 3),
    ],
)
def test_an_echo_with_logprobs_asks_for_those_of_the_prompt(
    fields: dict[str, Any], count: int | None
) -> None:
    assert sampling_params(completion(**fields), 9).prompt_logprobs == count
    # Computed once for all choices of a prompt, unless each has a stream of its own.
    assert sampling_params(completion(**fields, n=2), 9, 1).prompt_logprobs is None
    if "prompt_logprobs" not in fields:
        streamed = completion(**fields, n=2, stream=True)
        assert sampling_params(streamed, 9, 1).prompt_logprobs == count


def test_no_tokens_are_asked_for_where_the_prompt_s_own_are_told() -> None:
    assert completion(max_tokens=0, echo=True).max_tokens == 0
    assert chat(max_tokens=0, prompt_logprobs=1).max_tokens == 0
    assert resolve_max_tokens(0, "max_tokens", 10, 100, "prompt") == 0


@pytest.mark.parametrize("draft", ["auto", "off", "sql", "sql@0", "general", "general@0"])
def test_known_drafts_pass(draft: str) -> None:
    check_draft(draft, EXPERTS)


@pytest.mark.parametrize("draft", ["", "poetry", "sql@1", "off@0", "auto@0", "@0", "SQL"])
def test_unknown_drafts_are_refused(draft: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_draft(draft, EXPERTS)
    assert caught.value.param == "speculative.draft"


def test_auto_takes_the_topic_s_expert_and_a_named_draft_keeps_the_topic() -> None:
    sampling = sampling_params(completion(), 16)
    sql = Route("sql", "code")
    auto = engine_request("r", [1, 2], sampling, sql, Speculative(), True)
    assert (auto.topic, auto.draft, auto.store) == ("sql", "code", True)
    assert auto.num_speculative_tokens is None
    frozen = Speculative(draft="general@0", num_speculative_tokens=3)
    twin = engine_request("r", [1, 2], sampling, sql, frozen, False)
    assert (twin.topic, twin.draft, twin.num_speculative_tokens) == ("sql", "general@0", 3)
    assert not twin.store


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    check_token_ids([0, 99], 100)
    with pytest.raises(ApiError, match="100 is not below"):
        check_token_ids([0, 100], 100)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    field=st.sampled_from(sorted(ChatCompletionRequest.model_fields)),
    value=json_values,
)
def test_any_value_of_any_field_is_taken_or_refused_in_openai_s_shape(
    field: str, value: Any
) -> None:
    refused = None
    try:
        chat(**{field: value})
    except ApiError as error:
        refused = error
    if refused is not None and refused.code != "invalid_json":  # NaN is no JSON
        assert refused.status in (400, 404)
        assert (refused.param or "").split(".")[0] in (field, "stream_options")


@given(st.binary(max_size=64))
def test_no_bytes_get_past_the_parser_unrefused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_options(body, ChatCompletionRequest, "paceline")
    assert caught.value.status == 400


def sequences(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists, sets and tuples in a core schema of pydantic's, in unions and models too."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "set", "frozenset", "tuple", "generator"):
            yield schema
        for key, inner in schema.items():
            if key not in ("metadata", "serialization"):
                yield from sequences(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from sequences(inner)


@pytest.mark.parametrize(
    "model", [*REQUEST_MODELS, AddTopicRequest], ids=lambda model: model.__name__
)
def test_every_list_of_a_request_ends_at_its_first_bad_item_or_is_short(
    model: type[BaseModel],
) -> None:
    for found in sequences(model.__pydantic_core_schema__):
        assert found.get("fail_fast") or found.get("max_length") is not None, found


def test_the_lists_of_requests_are_found() -> None:
    lists = list(sequences(ChatCompletionRequest.__pydantic_core_schema__))
    assert len(lists) >= 6  # messages, their parts, calls and annotations, tools, stop, ...


BAD = 20_000


@pytest.mark.parametrize(
    ("model", "fields", "param"),
    [
        (ChatCompletionRequest, {"messages": [{}] * BAD}, "messages.0.role"),
        (
            ChatCompletionRequest,
            {"messages": [USER | {"content": [{}] * BAD}]},
            "messages.0.content.0.type",
        ),
        (
            ChatCompletionRequest,
            {"messages": [CALLING | {"tool_calls": [1] * BAD}]},
            "messages.0.tool_calls.0",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "structured_outputs": {"choice": [1] * BAD}},
            "structured_outputs.choice.0",
        ),
        (ResponsesRequest, {"input": [1] * BAD}, "input.0"),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": [1] * BAD}]},
            "input.0.content.0",
        ),
        (ResponsesRequest, {"input": "a", "include": [1] * BAD}, "include.0"),
        (DetokenizeRequest, {"tokens": [""] * BAD}, "tokens.0"),
    ],
)
def test_of_many_bad_items_the_first_is_named_and_the_others_are_no_errors(
    model: Any, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": "m"} | fields).encode()
    with pytest.raises(ValidationError) as found:
        model.model_validate_json(body)
    assert found.value.error_count() <= 4  # of the union's branches, and an item's fields
    with pytest.raises(ApiError) as caught:
        parse_json(body, model)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("place", ["body", "metadata"])
def test_a_body_of_many_bad_fields_is_refused_without_naming_them(place: str) -> None:
    fields = {str(i): 1 for i in range(BAD)}
    with pytest.raises(ApiError, match=f"has {BAD} fields") as caught:
        chat(**(fields if place == "body" else {"metadata": fields}))
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    assert len(str(caught.value)) < 100


def test_a_stop_string_may_be_so_long() -> None:
    assert completion(stop="b" * 256).stop == ["b" * 256]


class Unread(list[int]):
    """A list that fails if it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError("walked through")


@pytest.mark.parametrize("several", [False, True])
def test_a_list_longer_than_the_context_is_refused_unread(several: bool) -> None:
    tokens: list[Any] = Unread([1] * 10)
    body = {"model": "m", "prompt": [tokens] if several else tokens}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body, context={CONTEXT_LENGTH: 10})
    assert caught.value.errors()[0]["type"] == "context_length_exceeded"
    with pytest.raises(ValidationError, match="walked through"):
        CompletionRequest.model_validate(body, context={CONTEXT_LENGTH: 11})


def test_a_prompt_of_too_many_tokens_is_named_as_one_of_too_much_text_is() -> None:
    said = []
    for fails in (
        lambda: parse_options(b'{"model": "m", "prompt": [1, 2, 3]}', CompletionRequest, "m", 3),
        lambda: resolve_max_tokens(None, "max_tokens", 3, 3, "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            fails()
        said.append(caught.value.body())
    assert said[0] == said[1]
    assert said[0]["error"]["code"] == "context_length_exceeded"
    assert said[0]["error"]["param"] == "prompt"
