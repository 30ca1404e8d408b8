"""Answers that a grammar constrains, over HTTP."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

pytestmark = pytest.mark.cluster

MODEL = "paceline"
ASK: list[ChatCompletionMessageParam] = [{"role": "user", "content": "List all files"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "files", "schema": SCHEMA}}


def chat(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=ASK, **{"max_tokens": 60, "temperature": 0} | fields
    )
    assert answer.choices[0].finish_reason == "stop"
    return str(answer.choices[0].message.content)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_an_answer_follows_a_schema_and_is_the_same_with_drafts_and_without(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    answers = {
        chat(client, response_format=FORMAT, extra_body={"speculative": speculative}, **fields)
        for speculative in ({"num_speculative_tokens": 4}, {"draft": "off"})
    }
    (answer,) = answers
    jsonschema.validate(json.loads(answer), SCHEMA)


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        max_tokens=60,
        temperature=0,
        response_format=FORMAT,
        stream=True,
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(client, response_format=FORMAT)


def test_the_responses_api_answers_as_chat_does(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str:
        return client.responses.create(
            model=MODEL, input="List all files", max_output_tokens=60, temperature=0, **fields
        ).output_text

    flat: Any = {"format": {"type": "json_schema", "name": "files", "schema": SCHEMA}}
    assert ask(text=flat) == chat(client, response_format=FORMAT)
    choice = {"structured_outputs": {"choice": ["east", "west"]}}
    assert ask(extra_body=choice) == chat(client, extra_body=choice)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(text={"format": flat["format"] | {"schema": {"type": "nothing"}}})
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["param"] == "text.format.schema"


def test_vllms_constraints_at_both_endpoints(client: openai.OpenAI) -> None:
    choice: dict[str, Any] = {"structured_outputs": {"choice": ["north", "south"]}}
    assert chat(client, extra_body=choice) in {"north", "south"}
    regex = {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}
    completion = client.completions.create(
        model=MODEL, prompt="A number: ", max_tokens=30, temperature=0, extra_body=regex
    )
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", completion.choices[0].text)
    several = client.completions.create(
        model=MODEL,
        prompt="A number: ",
        max_tokens=30,
        n=3,
        temperature=1.5,
        seed=1,
        echo=True,
        logprobs=1,
        extra_body=regex,
    )
    texts = [choice.text for choice in several.choices]
    assert len(set(texts)) > 1
    assert all(re.fullmatch("A number: [a-c]{3}-[0-9]{2}", text) for text in texts)
    grammar = {"structured_outputs": {"grammar": 'start: "yes" | "no"'}}
    assert chat(client, extra_body=grammar) in {"yes", "no"}


@pytest.mark.parametrize(
    ("constraint", "param"),
    [
        ({"json": {"type": "nothing"}}, "structured_outputs.json"),
        ({"regex": "(a"}, "structured_outputs.regex"),
        ({"regex": "((((a{0,99}){0,99}){0,99}){0,99}){0,99}b"}, "structured_outputs.regex"),
        ({"grammar": "start: other"}, "structured_outputs.grammar"),
        ({"regex": "a" * 200_000}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(
    client: openai.OpenAI, constraint: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        chat(client, extra_body={"structured_outputs": constraint})
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["param"] == param
    assert raised.value.body["message"]
    assert chat(client, extra_body={"structured_outputs": {"choice": ["x"]}}) == "x"


def test_others_are_answered_while_grammars_explode(client: openai.OpenAI) -> None:
    """Three that take all of their two seconds, one after the other."""

    def explode(count: int) -> int:
        parts = [f"/(.*[a-z]){{{i}}}[0-9]*{i}.*/" for i in range(count)]
        lark = "start: A\nA: " + " & ".join(parts)
        with pytest.raises(openai.BadRequestError, match="too much time or memory") as raised:
            chat(client, extra_body={"structured_outputs": {"grammar": lark}})
        return raised.value.status_code

    chat(client, response_format=FORMAT)  # known from here on
    with ThreadPoolExecutor(3) as threads:
        exploding = [threads.submit(explode, count) for count in (60, 61, 62)]
        for _ in range(3):
            chat(client, response_format=FORMAT)
            client.completions.create(model=MODEL, prompt="a", max_tokens=8)
        assert not all(each.done() for each in exploding)
        assert [each.result() for each in exploding] == [400, 400, 400]


def test_a_schema_of_ten_megabytes_is_not_read(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as raised:
        chat(client, extra_body={"structured_outputs": {"json": {"description": "x" * 10**7}}})
    assert raised.value.status_code == 413


def test_two_constraints_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format constrains the answer"):
        chat(client, response_format=FORMAT, extra_body={"structured_outputs": {"regex": "a"}})
