"""Calls of tools over HTTP: real targets and grammars, templates in the models' own forms."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import tool_templates
from local_ingress import Handle, nothing_learns
from openai.types.responses import Response
from ray.exceptions import ActorUnavailableError
from tiny_models import save_tiny, tiny_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from paceline.actors.engine.request import FINISH_GRAMMAR, GenerationChunk, GenerationRequest
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.deploy.api.ingress import Ingress, IngressSettings

LLAMA3 = tool_templates.LLAMA3
SCHEMA = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"enum": [1, 2, 3]}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": f} for f in (WEATHER, {"name": "time", "strict": True})]
NAMED = {"type": "function", "function": {"name": "time"}}
BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "Weather?"}],
    "max_tokens": 300,
    "temperature": 0,
    "tools": TOOLS,
}


@dataclass
class Server:
    """A model folder and its target."""

    folder: Path
    target: TargetReplica

    def post(self, *bodies: dict[str, Any], target: Any = None) -> list[httpx.Response]:
        """The answers to chats, one after the other."""
        return self.ask("/v1/chat/completions", *(BODY | body for body in bodies), target=target)

    def ask(self, path: str, *bodies: dict[str, Any], target: Any = None) -> list[httpx.Response]:
        """The answers to requests, one after the other."""

        settings = IngressSettings("m", str(self.folder), None, ("general",), 1.0, 0.5, 8)
        ingress = Ingress(settings, Handle(target or self.target), None, nothing_learns())

        async def ask() -> list[httpx.Response]:
            transport = httpx.ASGITransport(ingress.api())
            url = "http://127.0.0.1"
            async with httpx.AsyncClient(transport=transport, base_url=url, timeout=60) as http:
                return [await http.post(path, json=body) for body in bodies]

        try:
            return asyncio.run(ask())
        finally:
            ingress._grammars.close()


def serve(root: Path, template: str, tags: str = "") -> Server:
    """A tiny target with a chat template; ``tags`` makes the calls' tags tokens of its own."""
    tokenizer = tiny_tokenizer()
    if tags:
        added = [AddedToken(t, special=tags == "special") for t in ("<tool_call>", "</tool_call>")]
        tokenizer.add_tokens(added, special_tokens=tags == "special")
    tokenizer.chat_template = template
    for name, seed, layers in (("target", 1, 2), ("draft", 2, 1)):
        size = len(tokenizer)
        save_tiny(root / name, seed, layers=layers, vocab=size, max_position_embeddings=4096)
        tokenizer.save_pretrained(root / name)
    settings = TargetSettings(
        str(root / "target"),
        {"general": str(root / "draft")},
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
    )
    return Server(root / "target", TargetReplica(settings))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((tool_templates.HERMES, ""), id="hermes"),
        pytest.param((tool_templates.HERMES, "added"), id="hermes-tokens", marks=pytest.mark.full),
        pytest.param((tool_templates.HERMES, "special"), id="hermes-special"),
        pytest.param((LLAMA3, ""), id="llama3", marks=pytest.mark.full),
    ],
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    served = serve(tmp_path_factory.mktemp("models"), *request.param)
    yield served
    served.target._loop.close()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = serve(tmp_path_factory.mktemp("models"), tool_templates.HERMES)
    yield served
    served.target._loop.close()


def choices(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def check_calls(choice: dict[str, Any]) -> list[str]:
    """The functions that a choice calls; its calls must follow the schemas."""
    calls = choice["message"]["tool_calls"]
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        empty: dict[str, Any] = {"type": "object", "maxProperties": 0}
        jsonschema.validate(arguments, SCHEMA if call["function"]["name"] == "weather" else empty)
        assert (call["type"], call["id"][:5]) == ("function", "call_")
        assert len(call["id"]) <= 40
    assert len({call["id"] for call in calls}) == len(calls)
    return [call["function"]["name"] for call in calls]


def streamed(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def put_together(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The choice of a stream, as OpenAI's clients put it together."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: list[dict[str, Any]] = []
    finish_reason, logprobs = None, []
    for choice in (c for event in events for c in event["choices"] if c["index"] == index):
        finish_reason = finish_reason or choice["finish_reason"]
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        if text := choice["delta"].get("content"):
            message["content"] = (message["content"] or "") + text
        for delta in choice["delta"].get("tool_calls", ()):
            if delta["index"] == len(calls):
                assert {"id", "type"} < delta.keys()
                assert delta["function"]["arguments"] == ""
                calls.append({k: v for k, v in delta.items() if k != "index"})
            else:
                assert delta["index"] == len(calls) - 1
                assert delta.keys() == {"index", "function"}
                calls[-1]["function"]["arguments"] += delta["function"]["arguments"]
    if calls:
        message["tool_calls"] = calls
    return {"message": message, "finish_reason": finish_reason, "logprobs": logprobs}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": ""} for call in message.get("tool_calls", ())]
    return message | {"tool_calls": calls}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seed"])
def test_a_required_call_is_valid_and_the_same_with_drafts_and_without(
    server: Server, sampling: dict[str, Any]
) -> None:
    body = sampling | {"tool_choice": "required", "parallel_tool_calls": False}
    drafted = body | {"speculative": {"draft": "general", "num_speculative_tokens": 4}}
    plain, with_draft = server.post(body | {"speculative": {"draft": "off"}}, drafted)
    (choice,), (other,) = choices(plain), choices(with_draft)
    assert len(check_calls(choice)) == 1
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert without_ids(choice["message"]) == without_ids(other["message"])
    usage = plain.json()["usage"]
    assert usage["completion_tokens"] > 20
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_required_calls_are_as_many_as_the_template_can_show_again(server: Server) -> None:
    """Otherwise the next turn of the conversation would be refused."""
    script = Script(server.target, "")
    server.post({"tool_choice": "required"}, target=script)
    shows_several = server.folder.joinpath("chat_template.jinja").read_text() != LLAMA3
    assert (" call)*" in script.requests[0].grammar) == shows_several


def test_a_named_function_is_called_once(server: Server) -> None:
    ((choice,),) = map(choices, server.post({"tool_choice": NAMED}))
    assert check_calls(choice) == ["time"]
    assert choice["finish_reason"] == "tool_calls"


def test_streams_say_what_whole_answers_say_with_log_probabilities(server: Server) -> None:
    body = {"tool_choice": "required", "parallel_tool_calls": False, "n": 2, "temperature": 1.0,
            "seed": 1, "logprobs": True}  # fmt: skip
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, stream = server.post(body, body | usage)
    events = streamed(stream)
    assert events[-1]["usage"]["completion_tokens"] == whole.json()["usage"]["completion_tokens"]
    ids = set()
    for index, choice in enumerate(choices(whole)):
        own = put_together(events, index)
        assert without_ids(own["message"]) == without_ids(choice["message"])
        assert own["finish_reason"] == choice["finish_reason"] == "tool_calls"
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in own["logprobs"]] == tokens
        assert "weather" in "".join(tokens) or "time" in "".join(tokens)
        ids |= {call["id"] for call in own["message"]["tool_calls"]}
    assert len(ids) == 2


class Script:
    """Gives an answer that no tiny model would; the rest is a real target's."""

    def __init__(self, target: TargetReplica, *chunks: str, finish_reason: str = "stop") -> None:
        self.status, self._chunks, self._finish = target.status, chunks, finish_reason
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest, _: bool) -> AsyncIterator[GenerationChunk]:
        self.requests.append(request)
        for chunk in self._chunks:
            yield GenerationChunk(chunk, (1,))
        yield GenerationChunk("", (2,), self._finish)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C", "days": 2}}\n</tool_call>'


def test_with_auto_text_before_a_call_is_content(hermes: Server) -> None:
    script = Script(hermes.target, *f"I look.\n{CALL}\n{CALL}")
    one = {"parallel_tool_calls": False}
    bodies: list[dict[str, Any]] = [{}, {"tool_choice": "auto"}, one, one | {"stream": True}]
    *whole, stream = hermes.post(*bodies, target=script)
    for answer, count in zip(whole, (2, 2, 1), strict=True):
        (choice,) = choices(answer)
        assert choice["message"]["content"] == "I look."
        assert check_calls(choice) == ["weather"] * count
        assert choice["finish_reason"] == "tool_calls"
    message = put_together(streamed(stream))["message"]
    assert without_ids(message) == without_ids(choices(whole[2])[0]["message"])
    assert {request.grammar for request in script.requests} == {""}


@pytest.fixture(scope="module", params=["added", pytest.param("special", marks=pytest.mark.full)])
def tagged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    served = serve(tmp_path_factory.mktemp("models"), tool_templates.HERMES, request.param)
    yield served
    served.target._loop.close()


@pytest.mark.parametrize("several", [True, False])
def test_with_auto_calls_of_strict_functions_follow_their_schemas(
    tagged: Server, several: bool
) -> None:
    """The tag's logit is raised: text may be anything, and a tag begins a call."""
    tag = PreTrainedTokenizerFast.from_pretrained(tagged.folder).convert_tokens_to_ids(
        "<tool_call>"
    )
    functions = [WEATHER | {"strict": True}, {"name": "time", "strict": True}]
    body = {
        "tools": [{"type": "function", "function": function} for function in functions],
        "parallel_tool_calls": several,
        "max_tokens": 400,
    }
    biased = body | {"logit_bias": {tag: 100}}
    free, called, stream = tagged.post(body | {"max_tokens": 20}, biased, biased | {"stream": True})
    assert "tool_calls" not in choices(free)[0]["message"]
    (choice,) = choices(called)
    if several:  # without an end: the last one is cut
        assert choice["finish_reason"] == "length"
        *whole, _ = choice["message"]["tool_calls"]
        choice = choice | {"message": {"tool_calls": whole}}
    else:
        assert choice["finish_reason"] == "tool_calls"
    assert len(check_calls(choice)) > 1 if several else len(check_calls(choice)) == 1
    message = put_together(streamed(stream))["message"]
    assert without_ids(message) == without_ids(choices(called)[0]["message"])


def test_only_strict_functions_are_refused_for_keywords_that_are_not_known(hermes: Server) -> None:
    schema = SCHEMA | {"properties": SCHEMA["properties"] | {"tags": {"uniqueItems": True}}}
    for strict in (None, False, True):
        function = WEATHER | {"parameters": schema, "strict": strict}
        tools = [{"type": "function", "function": function}]
        (answer,) = hermes.post({"tools": tools, "tool_choice": "required"})
        if strict:
            assert answer.status_code == 400
            assert "uniqueItems" in answer.json()["error"]["message"]
        else:
            assert choices(answer)[0]["finish_reason"] in ("tool_calls", "length")


def test_with_auto_a_bad_call_and_a_plain_text_are_content(hermes: Server) -> None:
    for text in (CALL.replace("{", "[", 1), CALL.replace('"C"', ""), "Mild.\n"):
        ((choice,),) = map(choices, hermes.post({}, target=Script(hermes.target, text)))
        assert choice["message"] == {"role": "assistant", "content": text}
        assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_at_the_limit_says_so(hermes: Server) -> None:
    script = Script(hermes.target, CALL[:55], finish_reason="length")
    whole, stream = hermes.post({}, {"stream": True}, target=script)
    (choice,) = choices(whole)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"unit": "', "length")
    own = put_together(streamed(stream))
    assert without_ids(own["message"]) == without_ids(choice["message"])
    assert own["finish_reason"] == "length"


def test_a_streamed_call_that_a_stop_string_cuts_is_not_to_be_run(hermes: Server) -> None:
    text = f"{CALL}\n{CALL[:55]}"
    (stream,) = hermes.post({"stream": True}, target=Script(hermes.target, *text))
    own = put_together(streamed(stream))
    whole, cut = (call["function"]["arguments"] for call in own["message"]["tool_calls"])
    assert (whole, cut) == ('{"unit": "C", "days": 2}', '{"unit": "')
    assert own["finish_reason"] == "stop"


def test_a_grammar_that_cannot_go_on_names_its_field(hermes: Server) -> None:
    script = Script(hermes.target, "{", finish_reason=FINISH_GRAMMAR)
    form = {"tools": None, "response_format": {"type": "json_object"}}
    bodies: list[dict[str, Any]] = [{"tool_choice": "required"}, form, form | {"stream": True}]
    *whole, stream = hermes.post(*bodies, target=script)
    errors = [answer.json()["error"] for answer in whole]
    errors.append(streamed(stream)[-1]["error"])
    assert [error["param"] for error in errors] == ["tools", "response_format", "response_format"]


def test_choice_none_shows_no_tools_and_reads_no_calls(hermes: Server) -> None:
    script = Script(hermes.target, CALL)
    (none,) = hermes.post({"tool_choice": "none"}, target=script)
    assert choices(none)[0]["message"] == {"role": "assistant", "content": CALL}
    prompt = tiny_tokenizer().decode(script.requests[0].prompt_token_ids)
    assert prompt == "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n"
    hermes.post({}, target=script)
    prompt = tiny_tokenizer().decode(script.requests[1].prompt_token_ids)
    shown = {"type": "function", "function": WEATHER}
    assert f"<tools>\n{json.dumps(shown)}\n" in prompt
    assert "strict" not in prompt


def test_a_format_of_the_answer_leaves_the_model_the_choice(hermes: Server) -> None:
    schema = {"type": "object", "properties": {"mild": {"type": "boolean"}}, "required": ["mild"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    script = Script(hermes.target, CALL)
    body = {"response_format": form}
    hermes.post(body, body | {"tool_choice": "required"}, target=script)
    free, required = (request.grammar for request in script.requests)
    assert "text | calls" in free
    assert "mild" not in required
    (answer,) = hermes.post(body | {"parallel_tool_calls": False})
    (choice,) = choices(answer)
    if choice["message"]["content"] is None:
        assert check_calls(choice)
    else:
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": [{"type": "function", "function": WEATHER | {"parameters": {
            "type": "object", "properties": {"a": {"type": "nothing"}}}}}],
          "tool_choice": "required"}, "tools", "the parameters of 'weather'"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "tool_choice 'none'"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "no tools"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_says_why(
    hermes: Server, body: dict[str, Any], param: str, reason: str
) -> None:
    (answer,) = hermes.post(body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert reason in error["message"]
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [(None, "knows no tools"), (tool_templates.OTHER, "in a form that is not read here")],
    ids=["no tools", "another form"],
)
def test_a_template_without_tools_refuses_them_but_not_choice_none(
    target: TargetReplica, target_folder: Path, tmp_path: Path, template: str | None, reason: str
) -> None:
    folder = target_folder
    if template is not None:
        folder = save_tiny(tmp_path, 1, vocab=len(tiny_tokenizer()), max_position_embeddings=4096)
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)
    plain = Server(folder, target)
    refused, none = plain.post({}, {"tool_choice": "none", "max_tokens": 3})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools")
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_value")
    assert reason in error["message"]
    assert choices(none)[0]["message"]["role"] == "assistant"


class Dying:
    """A target's replicas, of which the first ones die after some chunks."""

    def __init__(self, target: TargetReplica, *after: int) -> None:
        self.status, self._target, self._after = target.status, target, list(after)

    async def generate(
        self, request: GenerationRequest, whole: bool
    ) -> AsyncIterator[GenerationChunk]:
        left = self._after.pop(0) if self._after else -1
        async for chunk in self._target.generate(request, whole):
            if left == 0:
                raise ActorUnavailableError("gone", b"\0" * 16)
            left -= 1
            yield chunk


def test_replicas_that_die_in_a_call_neither_repeat_nor_lose_a_piece_of_it(server: Server) -> None:
    body = {"tool_choice": "required", "parallel_tool_calls": False, "stream": True,
            "speculative": {"draft": "off"}}  # fmt: skip
    (undisturbed,) = server.post(body)
    whole = put_together(streamed(undisturbed))
    for after in ((1,), (8, 3), (12, 1, 5, 2)):
        dying = Dying(server.target, *after)
        (stream,) = server.post(body, target=dying)
        assert dying._after == []
        own = put_together(streamed(stream))
        assert without_ids(own["message"]) == without_ids(whole["message"])
        assert own["finish_reason"] == "tool_calls"


def test_tools_are_tokenized_as_a_chat_shows_them(hermes: Server) -> None:
    chat = {"messages": BODY["messages"], "tools": TOOLS}
    (counted,) = hermes.ask("/tokenize", chat)
    (answer,) = hermes.post({"max_tokens": 1})
    assert counted.json()["count"] == answer.json()["usage"]["prompt_tokens"]


def test_the_responses_api_calls_functions_too(server: Server) -> None:
    functions = [{"type": "function"} | tool["function"] for tool in TOOLS]
    body: dict[str, Any] = {
        "model": "m",
        "input": "Weather?",
        "tools": functions,
        "tool_choice": {"type": "function", "name": "weather"},
        "temperature": 0,
    }
    path = "/v1/responses"
    whole, stream = (server.ask(path, b)[0] for b in (body, body | {"stream": True}))
    assert whole.status_code == 200, whole.text
    (call,) = Response.model_validate(whole.json()).output
    assert call.type == "function_call"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    last = json.loads(stream.text.rsplit("data: ", 1)[1])
    assert last["type"] == "response.completed"
    assert last["response"]["output"][0]["arguments"] == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Mild."}
    history = [{"role": "user", "content": "Weather?"}, call.to_dict(), result]
    more = {"input": history, "tool_choice": "auto", "max_output_tokens": 5}
    assert server.ask(path, body | more)[0].status_code == 200


def test_responses_and_tokenize_refuse_tools_that_the_template_does_not_know(
    target: TargetReplica, target_folder: Path
) -> None:
    body = {"model": "m", "input": "a", "tools": [{"type": "function", "name": "f"}]}
    plain = Server(target_folder, target)
    for path, asked in (("/v1/responses", body), ("/tokenize", BODY | {"model": "m"})):
        fields = {k: v for k, v in asked.items() if k not in ("max_tokens", "temperature")}
        (answer,) = plain.ask(path, fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
