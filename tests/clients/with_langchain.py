"""LangChain's chat model for OpenAI: prints what it reports, as one JSON object.

Runs in the clients' environment: ``python with_langchain.py BASE_URL``.
"""

from __future__ import annotations

import json
import sys
from functools import reduce
from operator import add
from typing import Any, Literal

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field

DESCRIBE = "Describe the city of Paris as JSON: its name and its continent."
QUESTION = "What is the capital of France? Answer in one sentence."


class City(BaseModel):
    """A city."""

    name: str = Field(description="its name")
    continent: Literal["Africa", "America", "Asia", "Europe"]


def report(base_url: str) -> dict[str, Any]:
    """Use the chat model in its usual ways."""
    options: dict[str, Any] = {
        "base_url": base_url, "api_key": "none", "model": "paceline", "temperature": 0,
        "max_retries": 0, "timeout": 120,
    }  # fmt: skip
    model = ChatOpenAI(**options, max_tokens=24, stream_usage=True)
    chunks = list(model.stream(QUESTION))
    history: list[BaseMessage] = [
        HumanMessage("How warm is it in Paris?"),
        AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Paris"}, "id": "call_1"}]),
        ToolMessage("21 degrees Celsius", tool_call_id="call_1"),
    ]
    through_responses = ChatOpenAI(**options, max_tokens=60, use_responses_api=True)
    completion = OpenAI(**options, max_tokens=6)
    return {
        "invoke": model.invoke(QUESTION).model_dump(),
        "stream": reduce(add, chunks).model_dump() | {"chunks": len(chunks)},
        "batch": [message.content for message in model.batch([QUESTION, QUESTION])],
        "structured": _city(ChatOpenAI(**options, max_tokens=60)),
        "structured_responses": _city(through_responses),
        "tool_history": model.invoke(history).model_dump(),
        "logprobs": model.bind(logprobs=True).invoke(QUESTION).response_metadata["logprobs"],
        "responses": through_responses.invoke(QUESTION).text,
        "completion": completion.invoke("The capital of France is"),
    }


def _city(model: ChatOpenAI) -> dict[str, Any]:
    """Of the model's structured output."""
    city = model.with_structured_output(City).invoke(DESCRIBE)
    assert isinstance(city, City)
    return city.model_dump()


if __name__ == "__main__":
    json.dump(report(sys.argv[1]), sys.stdout)
