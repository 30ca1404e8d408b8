"""OpenAI's own client: prints what it reports, as one JSON object.

Runs in the clients' environment: ``python with_openai.py BASE_URL``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
DESCRIBE = "Describe the city of Paris as JSON: its name and its continent."
GREEDY: dict[str, Any] = {"model": "paceline", "temperature": 0}


class City(BaseModel):
    """What a structured answer is parsed into."""

    name: str
    continent: Literal["Africa", "America", "Asia", "Europe"]


def report(base_url: str) -> dict[str, Any]:
    """Call each endpoint, whole and streamed."""
    client: Any = openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120)
    chat = GREEDY | {"messages": ASK, "max_tokens": 24}
    found: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
    found["chat"] = client.chat.completions.create(**chat).model_dump()
    with client.chat.completions.stream(**chat, stream_options={"include_usage": True}) as stream:
        kinds = [event.type for event in stream]
        found["chat_stream"] = stream.get_final_completion().model_dump() | {"events": kinds}
    completion = GREEDY | {"prompt": "The capital of France is", "max_tokens": 6, "logprobs": 2}
    found["completion"] = client.completions.create(**completion).model_dump()
    chunks = list(client.completions.create(**completion, stream=True))
    found["completion_stream"] = "".join(chunk.choices[0].text for chunk in chunks)
    parsed = client.chat.completions.parse(
        **GREEDY,
        messages=[{"role": "user", "content": DESCRIBE}],
        response_format=City,
        max_tokens=60,
    )
    found["parsed"] = parsed.choices[0].message.parsed.model_dump()
    parsed = client.responses.parse(
        **GREEDY, input=DESCRIBE, text_format=City, max_output_tokens=60
    )
    found["response_parsed"] = parsed.output_parsed.model_dump()
    response = GREEDY | {"input": ASK[0]["content"], "max_output_tokens": 24}
    whole = client.responses.create(**response)
    found["response"] = whole.model_dump() | {"output_text": whole.output_text}
    with client.responses.stream(**response) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    found["response_stream"] = {"events": kinds, "output_text": final.output_text}
    found["concurrent"] = asyncio.run(_concurrent(base_url, chat))
    try:
        client.chat.completions.create(**chat | {"model": "another"})
    except openai.APIStatusError as error:
        body: Any = error.body
        found["missing"] = {
            "status": error.status_code, "code": body["code"], "param": body["param"],
        }  # fmt: skip
    return found


async def _concurrent(base_url: str, chat: dict[str, Any]) -> list[str]:
    """Texts of the same request, sent four times at once by the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        calls = [client.chat.completions.create(**chat) for _ in range(4)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]


if __name__ == "__main__":
    json.dump(report(sys.argv[1]), sys.stdout)
