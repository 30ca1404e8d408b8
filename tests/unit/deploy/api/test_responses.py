"""Answers: OpenAI's objects, vLLM's figures, server-sent events."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message
from tiny_models import tiny_tokenizer

from paceline.actors.engine.request import (
    GenerationChunk,
    SpeculativeStats,
    TokenLogprob,
    TokenSource,
)
from paceline.deploy.api.prompt_encoder import EchoedPrompt
from paceline.deploy.api.response_builder import (
    DONE,
    ResponseContext,
    UsageCounter,
    chunk_event,
    error_event,
    response_body,
    speculative_metrics,
)
from paceline.deploy.api.response_schemas import Delta
from paceline.deploy.api.streaming import (
    KEEPALIVE,
    EventStreamResponse,
    prefetch,
    sse_events,
    with_deadline,
)
from paceline.deploy.api.token_names import TokenName, TokenNames
from paceline.deploy.errors import ApiError, internal

STATS = SpeculativeStats("sql", 3, 4, 16, 6, (1, 1, 1, 1, 0), 0, 5, 4)
NAMES = TokenNames(tiny_tokenizer())
ANSWER = ResponseContext(
    "id-1", 1700000000, "paceline", False, False, topics=["sql"], prompts=[[5] * 5], names=NAMES
)
CHAT = dataclasses.replace(ANSWER, chat=True, token_ids=True)
LAST = GenerationChunk("b", (8, 9), "stop", STATS, num_cached_tokens=3)


def test_a_whole_completion_has_openai_s_fields() -> None:
    body = json.loads(response_body(ANSWER, [LAST]))
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert body["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.375,
        "acceptance_histogram": [1, 1, 1, 1, 0],
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 6,
        "num_draft_tokens": 16,
        "num_suffix_tokens": 5,
        "num_accepted_suffix_tokens": 4,
        "draft": "sql",
        "weight_version": 3,
        "topic": "sql",
    }


def test_a_whole_chat_answer_carries_token_ids_when_asked() -> None:
    body = json.loads(response_body(CHAT, [LAST]))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "b"}
    assert body["choices"][0]["token_ids"] == [8, 9]


def test_figures_of_several_choices_add_up() -> None:
    other = SpeculativeStats("math", 1, 2, 4, 2, (1, 0, 1), 0, 3, 1)
    both = speculative_metrics([(STATS, "sql"), (other, "math")])
    assert both is not None
    figures = both.speculative_decoding
    assert figures.acceptance_histogram == [2, 1, 2, 1, 0]
    assert figures.draft_acceptance_rate == 8 / 20
    assert figures.mean_acceptance_length == 1 + 8 / 6
    assert (figures.num_suffix_tokens, figures.num_accepted_suffix_tokens) == (8, 5)
    assert (figures.draft, figures.topic, figures.weight_version) == ("mixed", "mixed", None)


def test_no_speculation_divides_by_nothing() -> None:
    none = speculative_metrics([(SpeculativeStats("off", 0), "sql")])
    assert none is not None
    assert none.speculative_decoding.mean_acceptance_length == 0.0
    assert speculative_metrics([]) is None


SOURCES = (
    TokenSource("accepted", "sql", 3, 0.75, 0.5, None, 0),
    TokenSource("recovered", "sql", 3, 0.25, 0.125, 7, 1),
)


@pytest.mark.parametrize("answer", [ANSWER, CHAT])
def test_token_sources_are_returned_on_request(
    answer: ResponseContext,
) -> None:
    streamed = dataclasses.replace(LAST, token_sources=SOURCES)
    (choice,) = json.loads(response_body(answer, [streamed]))["choices"]
    assert choice["token_sources"] == [
        {
            "token": NAMES.name(8).text,
            "text_offset": 0,
            "source": "accepted",
            "draft": "sql",
            "weight_version": 3,
            "target_probability": 0.75,
            "acceptance_probability": 0.5,
            "rejected_token": None,
        },
        {
            "token": NAMES.name(9).text,
            "text_offset": 1,
            "source": "recovered",
            "draft": "sql",
            "weight_version": 3,
            "target_probability": 0.25,
            "acceptance_probability": 0.125,
            "rejected_token": NAMES.name(7).text,
        },
    ]
    (quiet,) = json.loads(response_body(answer, [LAST]))["choices"]
    assert "token_sources" not in quiet


def test_a_token_without_text_is_an_event_with_token_sources() -> None:
    async def pieces() -> AsyncIterator[tuple[int, GenerationChunk]]:
        yield 0, GenerationChunk("", (8,), token_sources=SOURCES[:1])
        yield 0, dataclasses.replace(LAST, token_ids=(), token_sources=())

    first, last = collect(ANSWER, pieces(), False)
    assert len(first["choices"][0]["token_sources"]) == 1
    assert last["choices"][0]["token_sources"] == []


def collect(
    answer: ResponseContext,
    pieces: AsyncIterator[tuple[int, GenerationChunk]],
    include_usage: bool,
    *,
    continuous: bool = False,
) -> list[Any]:
    context = dataclasses.replace(answer, include_usage=include_usage, continuous_usage=continuous)

    async def run() -> list[bytes]:
        return [event async for event in sse_events(context, pieces)]

    frames = asyncio.run(run())
    assert all(frame.startswith(b"data: ") and frame.endswith(b"\n\n") for frame in frames)
    assert frames[-1] == b"data: [DONE]\n\n"
    return [json.loads(frame[6:]) for frame in frames[:-1]]


async def two_pieces() -> AsyncIterator[tuple[int, GenerationChunk]]:
    yield 0, GenerationChunk("a", (7,))
    yield 0, LAST


def test_a_stream_opens_with_the_role_and_ends_with_reason_figures_and_usage() -> None:
    role, first, last, usage = collect(CHAT, two_pieces(), True)
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["delta"] == {"content": "a"}
    assert first["choices"][0]["token_ids"] == [7]
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["metrics"]["speculative_decoding"]["weight_version"] == 3
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 8
    assert all(event["object"] == "chat.completion.chunk" for event in (role, first, last, usage))


def test_a_completion_stream_has_no_role_and_no_usage_unless_asked() -> None:
    first, last = collect(ANSWER, two_pieces(), False)
    assert first["choices"][0]["text"] == "a"
    assert last["choices"][0]["text"] == "b"
    assert "usage" not in last


def test_usage_is_null_until_the_last_event_unless_it_is_continuous() -> None:
    *others, last = collect(CHAT, two_pieces(), True)
    assert [event["usage"] for event in others] == [None] * 3
    assert last["usage"]["completion_tokens"] == 3
    events = collect(CHAT, two_pieces(), True, continuous=True)
    assert [event["usage"]["completion_tokens"] for event in events] == [0, 1, 3, 3]
    assert all(event["usage"]["prompt_tokens"] == 5 for event in events)


def test_a_late_failure_is_an_event() -> None:
    async def broken() -> AsyncIterator[tuple[int, GenerationChunk]]:
        yield 0, GenerationChunk("a", (7,))
        raise internal("gone")

    _, failure = collect(ANSWER, broken(), True)
    assert failure["error"]["message"] == "gone"
    assert failure["error"]["type"] == "server_error"


def test_several_choices_count_their_prompt_once() -> None:
    answer = dataclasses.replace(
        ANSWER, topics=["sql", "math"], prompts=[[5] * 4, [6] * 5], num_choices=2
    )
    tally = UsageCounter(answer)
    for index, cached in enumerate([3, 5, 0, 4]):
        tally.add(index, GenerationChunk("x", (7,)))
        tally.add(index, dataclasses.replace(LAST, num_cached_tokens=cached, num_cut_tokens=2))
    usage = tally.usage()
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (9, 20, 29)
    assert usage.prompt_tokens_details.cached_tokens == 3 + 0
    assert [answer.topic(index) for index in range(4)] == ["sql", "sql", "math", "math"]


def with_logprobs(token_ids: tuple[int, ...], others: tuple[int, ...]) -> GenerationChunk:
    top = tuple((other, -0.5 - i) for i, other in enumerate(others))
    items = tuple(TokenLogprob(-1.5 - i, top, 4 + i) for i in range(len(token_ids)))
    return GenerationChunk("ab", token_ids, "stop", STATS, logprobs=items)


def test_logprobs_have_openai_s_chat_shape() -> None:
    a, b, c = (NAMES._backend.token_to_id(letter) for letter in "abc")
    body = json.loads(response_body(CHAT, [with_logprobs((a, b), (b, c))]))
    first = body["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -1.5, [97])
    assert first["top_logprobs"] == [
        {"token": "b", "logprob": -0.5, "bytes": [98]},
        {"token": "c", "logprob": -1.5, "bytes": [99]},
    ]
    assert body["choices"][0]["logprobs"]["refusal"] is None


def test_logprobs_have_openai_s_completion_shape() -> None:
    a, b, c = (NAMES._backend.token_to_id(letter) for letter in "abc")
    body = json.loads(response_body(ANSWER, [with_logprobs((a, b), (b, c))]))
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.5, -2.5],
        "top_logprobs": [{"b": -0.5, "c": -1.5, "a": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [4, 5],
    }


A, B, C = (NAMES._backend.token_to_id(letter) for letter in "abc")
PROMPT = (
    TokenLogprob(-0.25, ((B, -0.25), (C, -3.0)), rank=1),
    TokenLogprob(-4.0, ((A, -0.5),), 0, 3),
)
ECHO = dataclasses.replace(
    ANSWER,
    prompts=[[A, B, C]],
    echoes=[EchoedPrompt("abc", [A, B, C], [0, 1, 2])],
    prompt_logprobs=True,
)


def test_an_echo_comes_before_the_answer_with_its_logprobs() -> None:
    chunk = dataclasses.replace(with_logprobs((A, B), ()), prompt_logprobs=PROMPT)
    (choice,) = json.loads(response_body(ECHO, [chunk]))["choices"]
    assert choice["text"] == "abcab"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "a", "b"],
        "token_logprobs": [None, -0.25, -4.0, -1.5, -2.5],
        "top_logprobs": [
            None,
            {"b": -0.25, "c": -3.0},
            {"a": -0.5, "c": -4.0},
            {"a": -1.5},
            {"b": -2.5},
        ],
        "text_offset": [0, 1, 2, 3 + 4, 3 + 5],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {
            str(B): {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            str(C): {"logprob": -3.0, "rank": 2, "decoded_token": "c"},
        },
        {
            str(C): {"logprob": -4.0, "rank": 3, "decoded_token": "c"},
            str(A): {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]


def test_log_probabilities_of_a_prompt_are_built_once_for_all_its_choices() -> None:
    class Counting(TokenNames):
        def __init__(self) -> None:
            super().__init__(tiny_tokenizer())
            self.asked = 0
            self.name = self._counted  # type: ignore[assignment]

        def _counted(self, token_id: int) -> TokenName:
            self.asked += 1
            return self._name(token_id)

    prompts = [[A, B, C], [C, B, A]]
    echoes = [
        EchoedPrompt("abc", prompts[0], [0, 1, 2]),
        EchoedPrompt("cba", prompts[1], [0, 1, 2]),
    ]
    other = tuple(reversed(PROMPT))
    bodies, asked = {}, {}
    for n in (1, 5):
        names = Counting()
        context = dataclasses.replace(
            ECHO, prompts=prompts, echoes=echoes, names=names, num_choices=n, topics=["sql"] * 2
        )
        chunk = GenerationChunk("", (), "stop", STATS, logprobs=())
        chunks = [dataclasses.replace(chunk, prompt_logprobs=p) for p in (PROMPT, other)]
        whole = response_body(context, [each for each in chunks for _ in range(n)])
        bodies[n], asked[n] = json.loads(whole)["choices"], names.asked
    assert asked[5] == asked[1] > 0
    for i, choice in enumerate(bodies[5]):
        assert choice == bodies[1][i // 5] | {"index": i}


def test_a_streamed_echo_comes_once_with_the_first_event() -> None:
    async def pieces() -> AsyncIterator[tuple[int, GenerationChunk]]:
        first = with_logprobs((A,), ())
        yield (
            0,
            dataclasses.replace(
                first, finish_reason=None, speculative=None, prompt_logprobs=PROMPT
            ),
        )
        yield 0, with_logprobs((B,), ())

    first, last = (e["choices"][0] for e in collect(ECHO, pieces(), False))
    assert (first["text"], last["text"]) == ("abcab", "ab")
    assert first["logprobs"]["tokens"] == ["a", "b", "c", "a"]
    assert last["logprobs"]["tokens"] == ["b"]
    assert last["logprobs"]["text_offset"] == [3 + 4]


def test_a_chat_answer_has_the_prompt_s_logprobs_beside_its_choices() -> None:
    context = dataclasses.replace(ECHO, chat=True, echoes=(), num_choices=2)
    body = json.loads(
        response_body(context, [dataclasses.replace(LAST, prompt_logprobs=PROMPT)] * 2)
    )
    assert len(body["prompt_logprobs"]) == 3
    assert "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in json.loads(response_body(CHAT, [LAST]))


def test_the_impossible_has_openai_s_number() -> None:
    never = GenerationChunk("", (7,), logprobs=(TokenLogprob(float("-inf")),))
    for answer in (ANSWER, CHAT):
        assert b"-9999.0" in response_body(answer, [dataclasses.replace(never, speculative=STATS)])


@pytest.mark.parametrize("text", ["Zwölf Käse, naïve café ☕ 漢字", "SELECT name", "漢漢"])
def test_names_and_bytes_of_tokens_join_to_the_text(text: str) -> None:
    ids = tiny_tokenizer().encode(text, add_special_tokens=False)
    names = [NAMES.name(token) for token in ids]
    utf8 = [byte for name in names for byte in name.utf8 or ()]
    assert bytes(utf8).decode() == text
    for name in names:
        if name.partial:
            assert name.text == "".join(f"\\x{byte:02x}" for byte in name.utf8 or ())


def test_a_part_of_a_character_is_named_by_its_bytes() -> None:
    ids = tiny_tokenizer().encode("☕", add_special_tokens=False)
    items = tuple(TokenLogprob(-1.0) for _ in ids)
    chunk = GenerationChunk("☕", tuple(ids), "stop", STATS, logprobs=items)
    legacy = json.loads(response_body(ANSWER, [chunk]))["choices"][0]["logprobs"]["tokens"]
    content = json.loads(response_body(CHAT, [chunk]))["choices"][0]["logprobs"]["content"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == "☕"
    if len(ids) > 1:
        assert legacy[0].startswith("bytes:\\xe2")
        assert content[0]["token"].startswith("\\xe2")


def test_tokens_of_a_stream_come_with_their_logprobs_even_without_text() -> None:
    async def pieces() -> AsyncIterator[tuple[int, GenerationChunk]]:
        yield 0, GenerationChunk("", (7,), logprobs=(TokenLogprob(-1.0),))
        yield 0, dataclasses.replace(LAST, logprobs=(TokenLogprob(-2.0), TokenLogprob(-3.0)))

    first, last = collect(ANSWER, pieces(), False)
    assert first["choices"][0]["logprobs"]["token_logprobs"] == [-1.0]
    assert last["choices"][0]["logprobs"]["token_logprobs"] == [-2.0, -3.0]


def test_a_stream_ends_at_its_deadline_and_what_feeds_it_is_closed() -> None:
    closed = []

    async def slow(
        pause: float, before: float
    ) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        try:
            await asyncio.sleep(before)
            yield 0, GenerationChunk("a", (7,))
            await asyncio.sleep(pause)
            yield 0, LAST
        finally:
            closed.append(pause)

    async def frames(pause: float, seconds: float, before: float = 0.0) -> list[bytes]:
        deadline = asyncio.get_running_loop().time() + seconds
        pieces = await prefetch(with_deadline(slow(pause, before), deadline))
        return [event async for event in sse_events(ANSWER, pieces)]

    late = asyncio.run(frames(60, 0.05))
    assert json.loads(late[-2][6:])["error"]["code"] == "request_timeout"
    assert late[-1] == b"data: [DONE]\n\n"
    in_time = asyncio.run(frames(0, 60))
    assert json.loads(in_time[-2][6:])["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(ApiError) as caught:
        asyncio.run(frames(0, 0.05, before=60))
    assert (caught.value.status, caught.value.headers()) == (504, {"Retry-After": "1"})
    assert closed == [60, 0, 0]


BREAKS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@given(st.text(st.one_of(st.sampled_from(BREAKS), st.characters(codec="utf-8"))))
def test_an_event_is_one_line_whatever_its_text(text: str) -> None:
    piece = GenerationChunk(text, (7,))
    streamed = [
        chunk_event(ANSWER, 0, piece, first=True),
        chunk_event(CHAT, 0, piece, first=True, delta=Delta(content=text)),
        error_event(internal(text)),
    ]
    found = []
    for event in streamed:
        line, blank = event.decode().split("\n\n")
        assert (line.splitlines(), blank) == ([line], "")
        found.append(json.loads(line.removeprefix("data: ")))
    completion, chat, error = found
    assert completion["choices"][0]["text"] == text
    assert chat["choices"][0]["delta"].get("content", "") == text
    assert error["error"]["message"] == text


async def after(*seconds: float) -> AsyncGenerator[tuple[int, GenerationChunk], None]:
    """A piece after each wait; the last one ends the answer."""
    for pause in seconds[:-1]:
        await asyncio.sleep(pause)
        yield 0, GenerationChunk("a", (7,))
    await asyncio.sleep(seconds[-1])
    yield 0, LAST


async def sent(
    pieces: AsyncGenerator[tuple[int, GenerationChunk], None], leave_after_s: float | None = None
) -> tuple[list[Message], int]:
    """What a stream sends, with comments after 0.1 s of silence, and how often it was closed."""
    messages, closed = [], []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.sleep(60 if leave_after_s is None else leave_after_s)
        return {"type": "http.disconnect"}

    begun = await prefetch(pieces, 0.05)
    deadline = asyncio.get_running_loop().time() + 60.0
    events = sse_events(ANSWER, begun)
    stream = EventStreamResponse(events, begun, lambda: closed.append(1), deadline, 0.1)
    async with asyncio.timeout(20):
        await stream({"type": "http"}, receive, send)
    count = len(messages)
    await asyncio.sleep(0.25)
    assert len(messages) == count  # no comment comes after the end
    return messages, len(closed)


def test_headers_and_comments_come_while_a_stream_waits() -> None:
    messages, closed = asyncio.run(sent(after(0.35, 0.35)))
    head, first, *bodies, end = messages
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert first["body"] == KEEPALIVE
    assert not end["more_body"]
    kinds = [body["body"] == KEEPALIVE for body in bodies]
    assert kinds.count(False) == 3  # two pieces and [DONE]
    one, two = (index for index, comment in enumerate(kinds[:-1]) if not comment)
    assert one >= 1  # comments before the first piece
    assert two > one + 1  # and between the two
    assert closed == 1


def test_a_stream_that_flows_has_no_comments() -> None:
    messages, _ = asyncio.run(sent(after(*[0.0] * 20)))
    assert KEEPALIVE not in [message.get("body") for message in messages]


def test_a_client_that_does_not_read_is_left_after_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.deploy.api.streaming._LAST_EVENTS_S", 0.1)
    closed = []

    async def run() -> None:
        async def blocks(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive() -> Message:
            raise AssertionError

        begun = await prefetch(after(*[0.0] * 20))
        events, now = sse_events(ANSWER, begun), asyncio.get_running_loop().time()
        stream = EventStreamResponse(events, begun, lambda: closed.append(1), now + 0.1)
        scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
        with pytest.raises(ClientDisconnect):
            async with asyncio.timeout(5):
                await stream(scope, receive, blocks)

    asyncio.run(run())
    assert closed == [1]


def test_what_fails_while_a_stream_waits_is_an_event_and_then_the_end() -> None:
    async def failing() -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        await asyncio.sleep(0.3)
        raise internal("gone")
        yield 0, LAST

    messages, closed = asyncio.run(sent(failing()))
    *_, failure, done, end = [message.get("body", b"") for message in messages]
    assert json.loads(failure[6:])["error"]["message"] == "gone"
    assert (done, end, closed) == (DONE, b"", 1)


@pytest.mark.parametrize("leave_after_s", [0.0, 0.2])
def test_a_client_that_leaves_a_waiting_stream_ends_it(leave_after_s: float) -> None:
    ended = []

    async def waiting() -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        try:
            await asyncio.sleep(60)
            yield 0, LAST
        finally:
            ended.append(1)

    _, closed = asyncio.run(sent(waiting(), leave_after_s))
    assert (ended, closed) == ([1], 1)


def test_a_client_that_leaves_before_the_headers_ends_the_wait_too() -> None:
    ended = []

    async def waiting() -> AsyncGenerator[tuple[int, GenerationChunk], None]:
        try:
            await asyncio.sleep(60)
            yield 0, LAST
        finally:
            ended.append(1)

    async def disconnect() -> None:
        task = asyncio.create_task(prefetch(waiting(), 30))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(disconnect())
    assert ended == [1]
