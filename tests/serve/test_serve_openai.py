"""OpenAI's own client against the running application."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.cluster

MODEL = "paceline"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "List all files"}]


# A number of one's own: left to the server, drafts that do not pay rest.
FOUR = {"num_speculative_tokens": 4}


def greedy_chat(client: openai.OpenAI, **extra: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=24,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True} | extra,
    )


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "paceline"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def test_a_conversation_is_not_computed_again(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "Name every tool in this shed, one after the other."}
    first = client.chat.completions.create(
        model="paceline", messages=[question], max_tokens=24, temperature=0
    )
    history = [question, first.choices[0].message.model_dump(), question]
    second = client.chat.completions.create(
        model="paceline", messages=history, max_tokens=8, temperature=0
    )
    assert first.usage.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens
    whole_blocks = first.usage.prompt_tokens // 16 * 16
    assert second.usage.prompt_tokens_details.cached_tokens >= whole_blocks > 0


def test_a_chat_answer_has_text_usage_and_figures(client: openai.OpenAI) -> None:
    answer = greedy_chat(client, speculative={"draft": "sql"} | FOUR)
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert len(choice.token_ids) == answer.usage.completion_tokens == 24
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 24
    figures = answer.metrics["speculative_decoding"]
    assert (figures["draft"], figures["weight_version"]) == ("sql", 0)
    assert figures["topic"] in {"general", "math", "code", "sql", "shell"}
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"] > 0
    assert 0 <= figures["draft_acceptance_rate"] <= 1
    assert figures["num_accepted_draft_tokens"] <= figures["num_draft_tokens"]
    assert figures["mean_acceptance_length"] >= 1


@pytest.mark.parametrize(
    "speculative",
    [
        {"draft": "off"},
        {"draft": "general"},
        {"draft": "math@0"},
        {"draft": "auto", "num_speculative_tokens": 0},
        {"draft": "auto", "num_speculative_tokens": 7},
    ],
)
def test_greedy_text_does_not_depend_on_the_draft(
    client: openai.OpenAI, speculative: dict[str, Any]
) -> None:
    expected = greedy_chat(client).choices[0]
    got = greedy_chat(client, speculative=speculative).choices[0]
    assert (got.token_ids, got.message.content) == (expected.token_ids, expected.message.content)


def test_plain_decoding_reports_no_drafted_tokens(client: openai.OpenAI) -> None:
    figures = greedy_chat(client, speculative={"draft": "off"}).metrics["speculative_decoding"]
    assert (figures["num_draft_tokens"], figures["draft_acceptance_rate"]) == (0, 0.0)


def test_a_text_that_repeats_itself_is_drafted_by_suffixes(client: openai.OpenAI) -> None:
    """They count in their own figures, whatever drafts there are beside them."""
    answer = client.completions.create(
        model="paceline",
        prompt="one two three " * 40,
        max_tokens=400,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    figures = answer.metrics["speculative_decoding"]
    assert 0 < figures["num_accepted_suffix_tokens"] <= figures["num_suffix_tokens"]
    assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]


def test_a_chat_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = greedy_chat(client)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, "ignore_eos": True, "speculative": FOUR},
    )
    events: list[Any] = list(stream)
    *pieces, last, usage = events
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(piece.choices[0].delta.content or "" for piece in [*pieces, last])
    token_ids = [i for p in [*pieces, last] for i in getattr(p.choices[0], "token_ids", None) or []]
    assert text == whole.choices[0].message.content
    assert token_ids == whole.choices[0].token_ids
    assert last.choices[0].finish_reason == "length"
    assert last.metrics["speculative_decoding"]["num_draft_tokens"] > 0
    assert usage.choices == []
    assert usage.usage.completion_tokens == 24
    assert len({event.id for event in events}) == 1


def test_a_completion_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "prompt": "SELECT name", "max_tokens": 12, "temperature": 0,
    }  # fmt: skip
    whole: Any = client.completions.create(**options)
    pieces: list[Any] = list(client.completions.create(**options, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.object == "text_completion"


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_several_choices(client: openai.OpenAI, stream: bool) -> None:
    prompts = ["SELECT name", "List all", "Ann has 12"]
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    alone = [
        client.completions.create(prompt=prompt, **options).choices[0].text for prompt in prompts
    ]
    texts = ["", "", ""]
    if stream:
        events: Any = client.completions.create(prompt=prompts, stream=True, **options)
        for event in events:
            texts[event.choices[0].index] += event.choices[0].text
    else:
        whole: Any = client.completions.create(prompt=prompts, **options)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        texts = [choice.text for choice in whole.choices]
    assert texts == alone


def test_token_ids_are_a_prompt(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    one: Any = client.completions.create(prompt=[1, 3, 70, 71, 4], **options)
    two: Any = client.completions.create(prompt=[[1, 3, 70, 71, 4], [1, 3, 72, 4]], **options)
    assert one.usage.prompt_tokens == 5
    assert two.usage.prompt_tokens == 9
    assert two.choices[0].text == one.choices[0].text


def test_a_seed_fixes_the_text_whatever_drafts(client: openai.OpenAI) -> None:
    def sampled(**extra: Any) -> str:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASK, max_tokens=16, temperature=1.0, seed=7, extra_body=extra
        )
        return str(answer.choices[0].message.content)

    assert (
        sampled()
        == sampled(speculative={"draft": "off"})
        == sampled(speculative={"draft": "sql@0"})
    )


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = str(greedy_chat(client).choices[0].message.content)
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=24, temperature=0, stop=[stop],
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.content == text[: text.index(stop)]


def test_bad_requests_raise_the_client_s_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as negative:
        client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="apples " * 3000)
    assert (long.value.param, long.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.BadRequestError) as many:
        client.chat.completions.create(model=MODEL, messages=ASK, n=17)
    assert many.value.param == "n"
    with pytest.raises(openai.BadRequestError) as bias:
        client.chat.completions.create(model=MODEL, messages=ASK, logit_bias={"99999": 1})
    assert bias.value.param == "logit_bias"


def test_a_response_says_what_chat_says_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "input": "List all files", "max_output_tokens": 24,
                              "temperature": 0, "extra_body": {"ignore_eos": True}}  # fmt: skip
    expected = greedy_chat(client).choices[0].message.content
    whole = client.responses.create(**fields)
    assert (whole.output_text, whole.status) == (expected, "incomplete")
    assert whole.usage is not None
    assert whole.usage.output_tokens == 24
    with client.responses.stream(**fields) as stream:
        events: list[Any] = list(stream)
    first, last = events[0], events[-1]
    assert (first.type, last.type) == ("response.created", "response.incomplete")
    assert last.response.output_text == expected
    history: list[Any] = [
        {"role": "user", "content": "List all files"},
        *(item.model_dump() for item in whole.output),
        {"role": "user", "content": "And now the newest"},
    ]
    chat: Any = [*ASK, {"role": "assistant", "content": expected},
                 {"role": "user", "content": "And now the newest"}]  # fmt: skip
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    further = client.responses.create(**(options | {"input": history, "max_output_tokens": 8}))
    same = client.chat.completions.create(messages=chat, max_tokens=8, **options)
    assert further.output_text == same.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as kept:
        client.responses.create(**(fields | {"previous_response_id": whole.id}))
    assert kept.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(whole.id)


def test_a_model_whose_template_knows_no_tools_says_so(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": "get_time", "parameters": {}}}]
    question: Any = [{"role": "user", "content": "What time is it?"}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="chat template knows no tools") as raised:
            client.chat.completions.create(
                model=MODEL, messages=question, tools=tools, stream=stream, max_tokens=4
            )
        assert raised.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="chat template knows no tools"):
        client.responses.create(
            model=MODEL,
            input="What time is it?",
            tools=[{"type": "function", **tools[0]["function"]}],
        )
    answer = client.chat.completions.create(
        model=MODEL, messages=question, tools=tools, tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls is None
