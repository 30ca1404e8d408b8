"""The Responses API: a thin mapping on chat, read by the openai package's own types."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tiny_models import tiny_tokenizer

from paceline.actors.engine.request import GenerationChunk, SpeculativeStats, TokenLogprob
from paceline.deploy.api.request_parser import parse_options, sampling_params
from paceline.deploy.api.request_schemas import ChatMessage
from paceline.deploy.api.response_builder import ResponseContext
from paceline.deploy.api.responses_builder import ResponsesBuilder
from paceline.deploy.api.responses_request import ResponsesRequest
from paceline.deploy.api.token_names import TokenNames
from paceline.deploy.errors import ApiError, internal

CONTEXT = ResponseContext(
    "resp_1", 1700000000, "m", True, False, ["sql"], [[5] * 7], TokenNames(tiny_tokenizer())
)
LAST = GenerationChunk(
    "b", (8, 9), "stop", SpeculativeStats("sql", 3, 4, 16, 6, (1, 1, 1, 1, 0)), num_cached_tokens=3
)
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
    result = {"type": "function_call_output", "call_id": "c0", "output": "bin"}
    text = {"role": "assistant", "content": "Wait."}
    messages: list[ChatMessage] = asked(
        input=[{"role": "user", "content": "hi"}, text, *calls, result]
    ).messages()
    assert [m.role for m in messages] == ["user", "assistant", "tool"]
    assert messages[1].text == "Wait."
    assert [call.id for call in messages[1].tool_calls or ()] == ["c0", "c1"]
    assert (messages[2].tool_call_id, messages[2].text) == ("c0", "bin")


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
    assert sampling_params(plain, 9) == sampling_params(asked(include=["x"]).chat_options(), 9)
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
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
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


def test_what_clients_send_by_themselves_is_taken() -> None:
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
