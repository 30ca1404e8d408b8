"""Every sampling field over HTTP, read by the openai package's own types."""

from collections.abc import Iterable
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.completion_choice import Logprobs
from tiny_models import tiny_tokenizer

pytestmark = pytest.mark.cluster

MODEL = "paceline"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "List all files"}]
FOUR = {"num_speculative_tokens": 4}
RULES: dict[str, Any] = {
    "frequency_penalty": 0.6,
    "presence_penalty": 0.4,
    "logit_bias": {"70": 2, "71": -100},
}
OWN_RULES: dict[str, Any] = {"repetition_penalty": 1.2, "min_p": 0.02, "min_tokens": 5}


def strict(answer: Any, kind: type[Any]) -> Any:
    """The same answer through the package's type with nothing of a wrong type let through."""
    return kind.model_validate(answer.model_dump(), strict=False)


def chat(client: openai.OpenAI, own: dict[str, Any] | None = None, **fields: Any) -> ChatCompletion:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        extra_body={"return_token_ids": True} | (own or {}),
        **({"max_tokens": 16, "temperature": 0} | fields),
    )
    return strict(answer, ChatCompletion)  # type: ignore[no-any-return]


def text_of(choice: Choice) -> str:
    return str(choice.message.content)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seeded"])
def test_rules_give_the_same_text_with_speculation_and_without(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    answers = [
        chat(client, {"speculative": speculative} | OWN_RULES, max_tokens=40, **RULES, **fields)
        for speculative in (FOUR, {"draft": "off"}, FOUR | {"draft": "sql@0"})
    ]
    texts = {text_of(answer.choices[0]) for answer in answers}
    assert len(texts) == 1
    plain = chat(client, max_tokens=40, **fields)
    assert texts != {text_of(plain.choices[0])}


def test_a_ban_and_a_push_decide(client: openai.OpenAI) -> None:
    free: Any = chat(client, {"ignore_eos": True}).choices[0]
    banned = free.token_ids[0]
    without: Any = chat(client, {"ignore_eos": True}, logit_bias={str(banned): -100}).choices[0]
    assert banned not in without.token_ids
    pushed: Any = chat(client, {"ignore_eos": True}, logit_bias={"77": 100}).choices[0]
    assert set(pushed.token_ids) == {77}


def test_several_choices_share_a_prompt(client: openai.OpenAI) -> None:
    """Choice 0 of a seed is what n = 1 gives; the others have seeds of their own."""
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 11}
    one = chat(client, **fields)
    three = chat(client, n=3, **fields)
    again = chat(client, n=3, **fields)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert text_of(three.choices[0]) == text_of(one.choices[0])
    assert len({text_of(choice) for choice in three.choices}) == 3
    assert [text_of(c) for c in again.choices] == [text_of(c) for c in three.choices]
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == sum(
        len(choice.token_ids)  # type: ignore[attr-defined]
        for choice in three.choices
    )


def test_several_choices_of_several_prompts_are_numbered_prompt_by_prompt(
    client: openai.OpenAI,
) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 1.0, "seed": 2}
    prompts = ["SELECT name", "List all"]
    both = client.completions.create(prompt=prompts, n=2, best_of=2, **options)
    strict(both, Completion)
    alone = [client.completions.create(prompt=prompt, n=2, **options) for prompt in prompts]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    expected = [choice.text for answer in alone for choice in answer.choices]
    assert [choice.text for choice in both.choices] == expected
    assert both.usage is not None
    total = sum(answer.usage.prompt_tokens for answer in alone if answer.usage)
    assert both.usage.prompt_tokens == total


def test_a_stream_of_several_choices_says_what_the_whole_answer_says(
    client: openai.OpenAI,
) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "n": 2, "seed": 4, "max_tokens": 12}
    whole = client.chat.completions.create(**fields)
    stream: Iterable[ChatCompletionChunk] = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    texts, usage = ["", ""], None
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = event.usage or usage
    assert texts == [text_of(choice) for choice in whole.choices]
    assert usage is not None
    assert whole.usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens


def check_chat_logprobs(logprobs: ChoiceLogprobs | None, text: str, top: int) -> list[float]:
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.refusal is None
    utf8 = b"".join(bytes(item.bytes or ()) for item in logprobs.content)
    # Special tokens have names, but no part in the text; a stop may cut the last one's.
    named = utf8.replace(b"</s>", b"").decode(errors="replace")
    assert named.startswith(text)
    assert len(named) - len(text) < len(logprobs.content[-1].token)
    for item in logprobs.content:
        assert len(item.top_logprobs) == top
        values = [other.logprob for other in item.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert item.logprob <= 0
    return [item.logprob for item in logprobs.content]


@pytest.mark.parametrize("stop", [None, [" "]], ids=["whole", "stopped"])
def test_chat_logprobs_whole_and_streamed(client: openai.OpenAI, stop: list[str] | None) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0,
        "logprobs": True, "top_logprobs": 3, "stop": stop, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    answer = strict(client.chat.completions.create(**fields), ChatCompletion)
    choice = answer.choices[0]
    whole = check_chat_logprobs(choice.logprobs, text_of(choice), 3)
    greedy = [item.top_logprobs[0].logprob for item in choice.logprobs.content]
    assert whole == greedy
    streamed: list[float] = []
    text = ""
    for event in client.chat.completions.create(**fields, stream=True):
        piece = event.choices[0]
        text += piece.delta.content or ""
        if piece.logprobs is not None:
            streamed += [item.logprob for item in piece.logprobs.content or ()]
    assert text == text_of(choice)
    assert streamed == pytest.approx(whole, abs=1e-4)


def check_logprobs(choice: CompletionChoice, top: int) -> Logprobs:
    logprobs = choice.logprobs
    assert logprobs is not None
    columns = (
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
    )
    assert all(column is not None for column in columns)
    assert len({len(column or ()) for column in columns}) == 1
    for token, own, others, offset in zip(*(column or () for column in columns), strict=True):  # type: ignore[misc,call-overload]
        assert others[token] == own  # type: ignore[has-type]
        assert len(others) in (top, top + 1)  # type: ignore[has-type]
        if not token.startswith("bytes:") and "<" not in token:  # type: ignore[has-type]
            assert choice.text[offset:].startswith(token)  # type: ignore[has-type]
    return logprobs


@pytest.mark.parametrize("top", [0, 3])
def test_completion_logprobs_whole_and_streamed(client: openai.OpenAI, top: int) -> None:
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": "SELECT name", "max_tokens": 24, "temperature": 0,
        "logprobs": top, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    answer = strict(client.completions.create(**fields), Completion)
    logprobs = check_logprobs(answer.choices[0], top)
    pieces = [event.choices[0] for event in client.completions.create(**fields, stream=True)]
    streamed = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    assert [t for part in streamed for t in part.tokens or ()] == logprobs.tokens
    assert [t for part in streamed for t in part.text_offset or ()] == logprobs.text_offset


def test_logprobs_do_not_change_with_rules_or_temperature(client: openai.OpenAI) -> None:
    """They are the model's own: at the first position the same for every request."""
    tops = []
    for fields in ({}, {"temperature": 1.5, "seed": 1}, RULES):
        answer = chat(client, logprobs=True, top_logprobs=5, **fields)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
        tops.append({item.token: item.logprob for item in content[0].top_logprobs})
    assert tops[0] == pytest.approx(tops[1], abs=1e-4)
    assert tops[0] == pytest.approx(tops[2], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_tokens_end_the_answer(client: openai.OpenAI, stream: bool) -> None:
    free: Any = chat(client, {"ignore_eos": True}).choices[0]
    stop = free.token_ids[6]
    end = free.token_ids.index(stop)
    own = {"stop_token_ids": [stop], "return_token_ids": True, "ignore_eos": True}
    options: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "max_tokens": 16, "temperature": 0, "extra_body": own,
    }  # fmt: skip
    if stream:
        events: list[Any] = list(client.chat.completions.create(**options, stream=True))
        text = "".join(event.choices[0].delta.content or "" for event in events)
        reason = events[-1].choices[0].finish_reason
    else:
        choice: Any = client.chat.completions.create(**options).choices[0]
        text, reason = choice.message.content, choice.finish_reason
        assert choice.token_ids == free.token_ids[: end + 1]
    assert reason == "stop"
    assert text == tiny_tokenizer().decode(free.token_ids[:end], skip_special_tokens=True)


def test_min_tokens_puts_the_end_off(client: openai.OpenAI) -> None:
    free: Any = chat(client, {"ignore_eos": True}, max_tokens=40).choices[0]
    stop = free.token_ids[2]
    short: Any = chat(client, {"stop_token_ids": [stop]}, max_tokens=40).choices[0]
    long: Any = chat(client, {"stop_token_ids": [stop], "min_tokens": 20}, max_tokens=40)
    assert len(short.token_ids) <= 3
    assert len(long.choices[0].token_ids) > 20 or long.choices[0].finish_reason == "length"
    assert stop not in long.choices[0].token_ids[:20]


def test_usage_counts_what_a_stop_string_cut(client: openai.OpenAI) -> None:
    free = chat(client, {"ignore_eos": True}, max_tokens=24)
    text = text_of(free.choices[0])
    cut = chat(client, {"ignore_eos": True}, max_tokens=24, stop=[text[8:14]])
    assert cut.usage is not None
    shown: Any = cut.choices[0]
    assert cut.usage.completion_tokens > len(shown.token_ids)


def echoed(client: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    options: dict[str, Any] = {"model": MODEL, "prompt": prompt, "echo": True, "temperature": 0}
    return client.completions.create(**(options | fields))


@pytest.mark.parametrize("speculative", [FOUR, {"draft": "off"}], ids=["drafted", "plain"])
def test_the_logprobs_of_an_echo_are_those_that_the_answer_had(
    client: openai.OpenAI, speculative: dict[str, Any]
) -> None:
    """Prefill and verification give the same numbers, to the last bit of what is sent."""
    own = {"speculative": speculative, "return_token_ids": True, "ignore_eos": True}
    own["skip_special_tokens"] = False  # as in echoes of token ids
    prompt = tiny_tokenizer().encode("SELECT name FROM people WHERE age > 30")
    options: dict[str, Any] = {"logprobs": 2, "max_tokens": 24, "extra_body": own}
    answer: Any = echoed(client, prompt, **options).choices[0]
    both = [*prompt, *answer.token_ids]
    again: Any = echoed(client, both, **(options | {"max_tokens": 0})).choices[0]
    assert again.finish_reason == "length"
    assert again.token_ids == []
    assert again.text == answer.text == tiny_tokenizer().decode(both)
    told, found = answer.logprobs, again.logprobs
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == told.token_logprobs[1:]
    assert found.top_logprobs[1:] == told.top_logprobs[1:]
    assert (found.tokens, found.text_offset) == (told.tokens, told.text_offset)


def test_a_streamed_echo_says_what_the_whole_one_says(client: openai.OpenAI) -> None:
    prompts = ["SELECT name", "List all files, newest first"]
    fields: dict[str, Any] = {"n": 2, "seed": 3, "temperature": 1, "logprobs": 1, "max_tokens": 9}
    whole = echoed(client, prompts, **fields).choices
    texts, logprobs = [""] * 4, [list[Any]() for _ in range(4)]
    for event in echoed(client, prompts, stream=True, **fields):
        (choice,) = event.choices
        texts[choice.index] += choice.text
        if choice.logprobs is not None:
            logprobs[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole]
    assert [text.startswith(prompts[i // 2]) for i, text in enumerate(texts)] == [True] * 4
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole]


def test_prompt_logprobs_have_vllm_s_shape_at_both_endpoints(client: openai.OpenAI) -> None:
    own = {"prompt_logprobs": 2}
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 0, "extra_body": own}
    completion: Any = client.completions.create(prompt=[1, 70, 71], **options)
    first, second, third = completion.choices[0].prompt_logprobs
    assert first is None
    for token, entries in (("70", second), ("71", third)):
        assert len(entries) in (2, 3)
        assert entries[token]["rank"] >= 1
        assert min(entry["rank"] for entry in entries.values()) == 1
    several: Any = client.completions.create(prompt=[[1, 70, 71], [1, 72]], n=2, **options)
    found = [choice.prompt_logprobs for choice in several.choices]
    assert found[0] == found[1] == completion.choices[0].prompt_logprobs
    assert [*found[2][1]] == [*found[3][1]]
    assert "72" in found[2][1]
    answer: Any = client.chat.completions.create(messages=ASK, **options)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == ("", 0)
