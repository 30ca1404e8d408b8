"""Tools through OpenAI's client, LangChain and LiteLLM: prints what they report, one JSON object.

Runs in the clients' environment: ``python with_tools.py BASE_URL``.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

import litellm
import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

ASK: list[Any] = [{"role": "user", "content": "How warm is it in Paris, in degrees Celsius?"}]
RESULT = "21 degrees Celsius"
GREEDY: dict[str, Any] = {"model": "paceline", "temperature": 0}


class Weather(BaseModel):
    """Return the temperature of a city."""

    city: Literal["Berlin", "Paris", "Rome"]
    unit: Literal["Celsius", "Fahrenheit"]


def with_openai(base_url: str) -> dict[str, Any]:
    """A call whole, streamed and parsed, its result, and the same through responses."""
    client: Any = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    named = {"type": "function", "function": {"name": "weather"}}
    asked = GREEDY | {"messages": ASK, "tools": tools, "tool_choice": named, "max_tokens": 60}
    found: dict[str, Any] = {"whole": client.chat.completions.create(**asked).model_dump()}
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        found["streamed"] = stream.get_final_completion().model_dump() | {"events": kinds}
    message = client.chat.completions.parse(**asked).choices[0].message
    found["parsed"] = message.tool_calls[0].function.parsed_arguments.model_dump()
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    answer = client.chat.completions.create(
        **asked | {"messages": [*ASK, message, result], "tool_choice": "none", "max_tokens": 24}
    )
    found["answer"] = answer.model_dump()
    flat = {"type": "function", "strict": True, **tools[0]["function"]}
    responses = GREEDY | {"tools": [flat], "max_output_tokens": 60}
    responses["tool_choice"] = {"type": "function", "name": "weather"}
    call = client.responses.create(**responses, input=ASK).output[0]
    found["response"] = call.model_dump()
    output = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    follows = responses | {"tool_choice": "none", "max_output_tokens": 24}
    text = client.responses.create(**follows, input=[*ASK, call, output])
    found["response_answer"] = text.output_text
    return found


def with_langchain(base_url: str) -> dict[str, Any]:
    """A bound tool, whole and streamed, its result, and a structured output by a call."""
    weather = StructuredTool.from_function(
        lambda city, unit: f"{RESULT} in {city} ({unit})",
        name="weather",
        description="Return the temperature of a city.",
        args_schema=Weather,
    )
    model = ChatOpenAI(
        base_url=base_url, api_key=lambda: "none", max_retries=0, timeout=120, max_tokens=60,
        **GREEDY,
    )  # fmt: skip
    bound = model.bind_tools([weather], tool_choice="weather", strict=True)
    called = bound.invoke(ASK)
    streamed = reduce(add, bound.stream(ASK))
    (call,) = called.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    question = HumanMessage(ASK[0]["content"])
    answer = model.bind_tools([weather], tool_choice="none").invoke([question, called, result])
    by_call = model.with_structured_output(Weather, method="function_calling", strict=True)
    structured = by_call.invoke(ASK)
    assert isinstance(structured, Weather)
    return {
        "called": called.tool_calls,
        "finish_reason": called.response_metadata["finish_reason"],
        "streamed": streamed.tool_calls,
        "result": result.content,
        "answer": answer.content,
        "structured": structured.model_dump(),
    }


def with_litellm(base_url: str) -> dict[str, Any]:
    """A call whole and streamed."""
    litellm.suppress_debug_info = True
    options: dict[str, Any] = {
        "model": "openai/paceline", "api_base": base_url, "api_key": "none", "messages": ASK,
        "tools": [openai.pydantic_function_tool(Weather, name="weather")],
        "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0,
        "max_tokens": 60, "num_retries": 0,
    }  # fmt: skip
    chunks = list(litellm.completion(**options, stream=True))
    return {
        "whole": litellm.completion(**options).model_dump(),
        "streamed": litellm.stream_chunk_builder(chunks, messages=ASK).model_dump(),
    }


if __name__ == "__main__":
    url = sys.argv[1]
    report = {
        "openai": with_openai(url), "langchain": with_langchain(url), "litellm": with_litellm(url),
    }  # fmt: skip
    json.dump(report, sys.stdout)
