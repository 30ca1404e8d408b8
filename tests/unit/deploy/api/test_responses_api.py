"""The Responses API: a thin mapping on chat, read by the openai package's own types."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import (
    ParsedResponseFunctionToolCall,
    ParsedResponseOutputMessage,
    ParsedResponseOutputText,
    Response,
    ResponseFunctionToolCallParam,
    ResponseStreamEvent,
)
from openai.types.responses.response_input_param import FunctionCallOutput
from pydantic import BaseModel, TypeAdapter
from tiny_models import tiny_tokenizer

from paceline.actors.engine.request import GenerationChunk, SpeculativeStats, TokenLogprob
from paceline.deploy.api.request_parser import parse_options, sampling_params
from paceline.deploy.api.request_schemas import ChatMessage
from paceline.deploy.api.response_builder import ResponseContext
from paceline.deploy.api.responses_builder import ResponsesBuilder
from paceline.deploy.api.responses_request import (
    FunctionCallItem,
    FunctionCallOutputItem,
    ResponsesRequest,
)
from paceline.deploy.api.token_names import TokenNames
from paceline.deploy.api.tool_calls import ToolSyntax
from paceline.deploy.api.tool_formats import HERMES
from paceline.deploy.errors import ApiError, internal

CONTEXT = ResponseContext(
    "resp_1", 1700000000, "m", True, False, ["sql"], [[5] * 7], TokenNames(tiny_tokenizer())
)
LAST = GenerationChunk(
    "b", (8, 9), "stop", SpeculativeStats("sql", 3, 4, 16, 6, (1, 1, 1, 1, 0)), num_cached_tokens=3
)
LAST_EMPTY = dataclasses.replace(LAST, text="", token_ids=(8,))
TOOL = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c0", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c0", "output": "bin"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def asked(**fields: Any) -> ResponsesRequest:
    body = json.dumps({"model": "m", "input": "hi"} | fields).encode()
    return parse_options(body, ResponsesRequest, "m")


def conversation(*items: Any, **fields: Any) -> list[tuple[str, str]]:
    return [(m.role, m.text) for m in asked(input=[*items], **fields).messages()]


def test_text_and_instructions_are_a_conversation() -> None:
    messages = asked(instructions="Be brief.").messages()
    assert [(m.role, m.text) for m in messages] == [("system", "Be brief."), ("user", "hi")]


def test_a_history_comes_back_as_it_was_answered() -> None:
    """Output items as clients dump them, with ids, status and parts."""
    part = {"type": "output_text", "text": "4", "annotations": [], "logprobs": []}
    answer = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
              "content": [part], "phase": None}  # fmt: skip
    question = {"role": "user", "content": [{"type": "input_text", "text": "2+2"}]}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    assert conversation(question, thought, answer, question) == [
        ("user", "2+2"),
        ("assistant", "4"),
        ("user", "2+2"),
    ]


def test_calls_of_functions_are_one_turn_and_their_results_follow() -> None:
    calls = [
        {"type": "function_call", "call_id": f"c{i}", "name": "ls", "arguments": "{}", "id": "fc"}
        for i in range(2)
    ]
    text = {"role": "assistant", "content": "Wait."}
    parts = RESULT | {
        "output": [{"type": "input_text", "text": "et"}, {"type": "text", "text": "c"}]
    }
    messages: list[ChatMessage] = asked(
        input=[{"role": "user", "content": "hi"}, text, *calls, RESULT, parts]
    ).messages()
    assert [m.role for m in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[3].text == "etc"
    assert messages[1].text == "Wait."
    assert [call.id for call in messages[1].tool_calls or ()] == ["c0", "c1"]
    assert (messages[2].tool_call_id, messages[2].text) == ("c0", "bin")


@pytest.mark.parametrize("by_alias", [False, True])
def test_a_history_comes_back_as_openai_s_client_dumps_what_it_parsed(by_alias: bool) -> None:
    part = ParsedResponseOutputText[Any](
        type="output_text", text="{}", annotations=[], parsed={"x": 1}
    )
    answer = ParsedResponseOutputMessage[Any](
        id="msg_1", type="message", role="assistant", status="completed", content=[part]
    )
    call = ParsedResponseFunctionToolCall.model_validate(
        CALL | {"parsed_arguments": {"x": 1}, "async": False}
    )
    dumped = [item.model_dump(by_alias=by_alias) for item in (answer, call)]
    assert dumped[0]["content"][0]["parsed"] == dumped[1]["parsed_arguments"] == {"x": 1}
    (turn,) = asked(input=dumped).messages()
    assert (turn.text, [call.id for call in turn.tool_calls or ()]) == ("{}", ["c0"])


def test_the_fields_of_openai_s_items_are_read_or_refused_by_name() -> None:
    kinds: dict[type[BaseModel], Any] = {
        FunctionCallItem: ResponseFunctionToolCallParam,
        FunctionCallOutputItem: FunctionCallOutput,
    }
    for kind, theirs in kinds.items():
        named = set(kind.model_json_schema()["properties"])
        assert theirs.__annotations__.keys() <= named


def test_a_result_keeps_its_function_s_name() -> None:
    result = asked(input=[RESULT | {"name": "f", "namespace": None, "caller": None}])
    assert result.messages()[0].name == "f"


def test_sampling_fields_are_those_of_chat() -> None:
    options = asked(
        temperature=0.5, top_p=0.9, stop=["x"], ignore_eos=True, seed=3, logit_bias={"5": -1},
        store=False, speculative={"draft": "off"}, top_logprobs=2, reasoning={"effort": "low"},
        chat_template_kwargs={"a": 1},
    ).chat_options()  # fmt: skip
    sampling = sampling_params(options, 9)
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 3)
    assert (sampling.stop, sampling.ignore_eos, sampling.logprobs) == (("x",), True, 2)
    assert sampling.logit_bias == ((5, -1.0),)
    assert (options.store, options.speculative.draft) == (False, "off")
    assert (options.reasoning_effort, options.chat_template_kwargs) == ("low", {"a": 1})
    plain = asked().chat_options()
    assert sampling_params(plain, 9) == sampling_params(asked(include=[]).chat_options(), 9)
    wanted = asked(include=["message.output_text.logprobs"]).chat_options()
    assert sampling_params(wanted, 9).logprobs == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": [3]}, "input.0"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0.content"),
        ({"input": [{"role": "clown", "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input.0.mood"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]},
            "input.0.content.0.type",
        ),
        ({"input": [CALL | {"namespace": "n"}]}, "input.0.namespace"),
        ({"input": [CALL | {"async": True}]}, "input.0.async"),
        ({"input": [CALL | {"async_": True}]}, "input.0.async_"),
        ({"input": [CALL | {"is_async": False}]}, "input.0.is_async"),
        ({"input": [RESULT | {"namespace": "n"}]}, "input.0.namespace"),
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "tools.0.name"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL | {"parameters": {"type": "string"}}]}, "tools.0.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools.0.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        (
            {"input": [RESULT | {"output": [{"type": "input_image", "text": "x"}]}]},
            "input.0.output.0.type",
        ),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, "include.1"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        asked(**fields).messages()
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("kind", ["item_reference", "web_search_call", 3])
def test_of_another_item_the_error_says_what_is_read(kind: Any) -> None:
    with pytest.raises(ApiError, match="no conversation is kept here") as caught:
        asked(input=[{"role": "user", "content": "hi"}, {"type": kind, "id": "x"}])
    message = caught.value.message
    assert message.startswith("Invalid value for input.1: its type is none of message, function_")
    assert (caught.value.param, caught.value.code) == ("input.1", "invalid_value")


def test_a_format_without_its_schema_says_that_it_is_missing() -> None:
    with pytest.raises(ApiError, match=r"text\.format: the type json_schema needs a schema"):
        asked(text={"format": {"type": "json_schema", "name": "x"}})


def test_what_clients_send_by_themselves_is_taken() -> None:
    asked(tools=[TOOL | {"defer_loading": False}])
    asked(
        input=[
            {
                "role": "user",
                "content": [
                    {
                        "type": "input_text",
                        "text": "hi",
                        "prompt_cache_breakpoint": {"mode": "explicit"},
                    }
                ],
            }
        ]
    )
    asked(tools=[], tool_choice="auto", parallel_tool_calls=True, truncation="disabled",
          service_tier="auto", user="u", metadata={"a": "b"}, previous_response_id=None,
          stream=True, stream_options={"include_obfuscation": False}, background=False,
          include=["reasoning.encrypted_content"], text={"format": {"type": "text"}},
          reasoning={"effort": None, "summary": "auto"}, prompt_cache_key="k")  # fmt: skip


def test_a_format_is_chats_and_comes_back() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}}
    form = {"type": "json_schema", "name": "city", "schema": schema, "strict": True}
    request = asked(text={"format": form, "verbosity": "medium"})
    response_format = request.chat_options().response_format
    assert response_format is not None
    assert response_format.json_schema is not None
    assert response_format.json_schema.json_schema == schema
    body = json.loads(ResponsesBuilder(CONTEXT, request).body())
    assert body["text"] == {"format": form}
    assert Response.model_validate(body).text is not None
    plain = asked()
    assert plain.chat_options().response_format is None
    assert json.loads(ResponsesBuilder(CONTEXT, plain).body())["text"]["format"]["type"] == "text"


def test_a_whole_response_has_openai_s_shape() -> None:
    builder = ResponsesBuilder(CONTEXT, asked(instructions="Be brief.", store=False))
    builder.add(LAST)
    body = json.loads(builder.body())
    response = Response.model_validate(body)
    assert response.output_text == "b"
    assert (response.status, response.instructions) == ("completed", "Be brief.")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (7, 2)
    assert response.usage.input_tokens_details.cached_tokens == 3
    assert body["store"] is False
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] == 16


def test_an_answer_that_is_cut_is_incomplete() -> None:
    builder = ResponsesBuilder(CONTEXT, asked(max_output_tokens=2))
    builder.add(dataclasses.replace(LAST, finish_reason="length"))
    body = json.loads(builder.body())
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


def events(builder: ResponsesBuilder, *chunks: GenerationChunk | ApiError) -> list[Any]:
    async def pieces() -> AsyncIterator[tuple[int, GenerationChunk]]:
        for chunk in chunks:
            if isinstance(chunk, ApiError):
                raise chunk
            yield 0, chunk

    async def run() -> list[bytes]:
        return [event async for event in builder.events(pieces())]

    found = []
    for number, frame in enumerate(asyncio.run(run())):
        kind, data = frame.decode().rstrip("\n").split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {fields['type']}"
        assert fields["sequence_number"] == number
        found.append(EVENT.validate_python(fields))
    return found


def test_a_stream_has_openai_s_events_in_order() -> None:
    found = events(ResponsesBuilder(CONTEXT, asked()), GenerationChunk("a", (7,)), LAST)
    assert [event.type for event in found] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in found[4:6]) == found[6].text == "ab"
    last = found[-1].response
    assert (last.output_text, last.usage.output_tokens) == ("ab", 3)
    assert found[0].response.status == "in_progress"
    assert found[0].response.output == []
    assert last.output[0].id == found[2].item.id == found[4].item_id


def test_a_streamed_answer_that_is_cut_says_so_and_has_its_logprobs() -> None:
    chunk = dataclasses.replace(
        LAST, finish_reason="length", logprobs=(TokenLogprob(-1.0, ((8, -1.0),)),) * 2
    )
    found = events(ResponsesBuilder(CONTEXT, asked(top_logprobs=1)), chunk)
    assert found[-1].type == "response.incomplete"
    assert [entry.logprob for entry in found[4].logprobs] == [-1.0, -1.0]
    assert len(found[-1].response.output[0].content[0].logprobs) == 2


def test_a_late_failure_is_an_event() -> None:
    found = events(ResponsesBuilder(CONTEXT, asked()), GenerationChunk("a", (7,)), internal("gone"))
    assert found[-1].type == "response.failed"
    assert found[-1].response.error.message == "gone"
    assert found[-1].response.status == "failed"


CALLING = dataclasses.replace(CONTEXT, tools=ToolSyntax(HERMES, frozenset({"f", "g"})))
CALLS = (
    'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def test_calls_are_items_of_their_own_in_a_whole_response_and_in_a_stream() -> None:
    choice = {"type": "function", "name": "f"}
    fields: dict[str, Any] = {
        "tools": [TOOL, TOOL | {"name": "g", "strict": True}],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    builder = ResponsesBuilder(CALLING, asked(**fields))
    builder.add(dataclasses.replace(LAST, text=CALLS))
    whole = Response.model_validate_json(builder.body())
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.output_text == "Wait."
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(c.name, c.arguments, c.status) for c in calls] == [
        ("f", '{"a": 1}', "completed"),
        ("g", "{}", "completed"),
    ]
    assert len({item.id for item in whole.output} | {c.call_id for c in calls}) == 5
    assert (whole.parallel_tool_calls, whole.status) == (False, "completed")
    echoed = json.loads(builder.body())
    assert (echoed["tool_choice"], [t["name"] for t in echoed["tools"]]) == (choice, ["f", "g"])

    chunks = [GenerationChunk(char, (7,)) for char in CALLS]
    found = events(ResponsesBuilder(CALLING, asked(stream=True, **fields)), *chunks, LAST_EMPTY)
    assert [item.model_dump() for item in found[-1].response.output] == [
        item.model_dump() for item in whole.output
    ]
    kinds = [key for key, _ in itertools.groupby(event.type for event in found)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *[
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ]
        * 2,
        "response.completed",
    ]
    deltas = [e for e in found if e.type == "response.function_call_arguments.delta"]
    assert "".join(e.delta for e in deltas if e.item_id == calls[0].id) == '{"a": 1}'
    assert {e.output_index for e in deltas} == {1, 2}


def test_without_a_call_a_response_with_tools_is_a_message() -> None:
    for text in ("Hi.\n", ""):
        chunks = [GenerationChunk(char, (7,)) for char in text]
        found = events(ResponsesBuilder(CALLING, asked(stream=True)), *chunks, LAST_EMPTY)
        (message,) = found[-1].response.output
        assert (message.type, found[-1].response.output_text) == ("message", text)
        builder = ResponsesBuilder(CALLING, asked())
        builder.add(dataclasses.replace(LAST, text=text))
        assert Response.model_validate_json(builder.body()).output_text == text


def test_a_streamed_call_that_a_stop_string_cuts_is_incomplete() -> None:
    chunks = [GenerationChunk(char, (7,)) for char in CALLS[: CALLS.index("}")]]
    found = events(ResponsesBuilder(CALLING, asked(stream=True)), *chunks, LAST_EMPTY)
    (done,) = (event.item for event in found[-2:] if event.type == "response.output_item.done")
    message, call = found[-1].response.output
    assert (message.status, call.status, call.arguments) == ("completed", "incomplete", '{"a": 1')
    assert done == call


def test_a_message_before_a_call_has_the_log_probabilities_of_its_own_tokens() -> None:
    def logprob(at: int) -> TokenLogprob:
        return TokenLogprob(-float(at), (), at)

    starts = range(len(CALLS))
    builder = ResponsesBuilder(CALLING, asked(top_logprobs=0))
    builder.add(
        dataclasses.replace(
            LAST,
            text=CALLS,
            token_ids=(7,) * len(CALLS),
            logprobs=tuple(map(logprob, starts)),
        )
    )
    whole = json.loads(builder.body())["output"][0]["content"][0]["logprobs"]
    assert [entry["logprob"] for entry in whole] == [0.0, -1.0, -2.0, -3.0, -4.0]
    chunks = [GenerationChunk(CALLS[at], (7,), logprobs=(logprob(at),)) for at in starts]
    last = dataclasses.replace(LAST_EMPTY, logprobs=(logprob(len(CALLS)),))
    found = events(ResponsesBuilder(CALLING, asked(stream=True)), *chunks, last)
    streamed = found[-1].response.output[0].content[0].logprobs
    assert [entry.logprob for entry in streamed] == [0.0, -1.0, -2.0, -3.0, -4.0]
