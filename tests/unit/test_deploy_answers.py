"""Answers: OpenAI's objects, vLLM's figures, server-sent events."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from paceline.actors.decoding.request import GenerationChunk, SpeculativeStats
from paceline.deploy import answers
from paceline.deploy.errors import internal
from paceline.deploy.streams import events

STATS = SpeculativeStats("sql", 3, 4, 16, 6, (1, 1, 1, 1, 0))
ANSWER = answers.Answer("id-1", 1700000000, "paceline", chat=False, token_ids=False)
CHAT = answers.Answer("id-1", 1700000000, "paceline", chat=True, token_ids=True)
LAST = GenerationChunk("b", (8, 9), "stop", STATS, num_cached_tokens=3)


def test_a_whole_completion_has_openai_s_fields() -> None:
    body = json.loads(answers.whole(ANSWER, [LAST], ["sql"], 5))
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
        "draft": "sql",
        "weight_version": 3,
        "topic": "sql",
    }


def test_a_whole_chat_answer_carries_token_ids_when_asked() -> None:
    body = json.loads(answers.whole(CHAT, [LAST], ["sql"], 5))
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "b"}
    assert body["choices"][0]["token_ids"] == [8, 9]


def test_figures_of_several_choices_add_up() -> None:
    other = SpeculativeStats("math", 1, 2, 4, 2, (1, 0, 1))
    both = answers.metrics([(STATS, "sql"), (other, "math")])
    assert both is not None
    figures = both.speculative_decoding
    assert figures.acceptance_histogram == [2, 1, 2, 1, 0]
    assert figures.draft_acceptance_rate == 8 / 20
    assert figures.mean_acceptance_length == 1 + 8 / 6
    assert (figures.draft, figures.topic, figures.weight_version) == ("mixed", "mixed", None)


def test_no_speculation_divides_by_nothing() -> None:
    none = answers.metrics([(SpeculativeStats("off", 0), "sql")])
    assert none is not None
    assert none.speculative_decoding.mean_acceptance_length == 0.0
    assert answers.metrics([]) is None


def collect(
    answer: answers.Answer, pieces: AsyncIterator[tuple[int, GenerationChunk]], include_usage: bool
) -> list[Any]:
    async def run() -> list[bytes]:
        return [event async for event in events(answer, pieces, ["sql", "sql"], 5, include_usage)]

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


def test_a_late_failure_is_an_event() -> None:
    async def broken() -> AsyncIterator[tuple[int, GenerationChunk]]:
        yield 0, GenerationChunk("a", (7,))
        raise internal("gone")

    _, failure = collect(ANSWER, broken(), True)
    assert failure["error"]["message"] == "gone"
    assert failure["error"]["type"] == "server_error"
