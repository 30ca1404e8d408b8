"""Libraries that programs call a server with: what each reports of its answers."""

from __future__ import annotations

from typing import Any

import pytest
from real_clients import Clients, Server

pytestmark = [pytest.mark.cluster, pytest.mark.full]

PARIS = "The capital of France is Paris."


def test_openai(clients: Clients, server: Server) -> None:
    before = server.counters()
    found = clients.report("with_openai.py", server)
    counted = server.counted_since(before)
    assert found["models"] == ["paceline"]
    chat, streamed = found["chat"], found["chat_stream"]
    assert chat["choices"][0]["message"]["content"] == PARIS
    assert chat["choices"][0]["finish_reason"] == "stop"
    assert chat["usage"]["completion_tokens"] == 8
    assert chat["metrics"]["speculative_decoding"]["topic"]
    assert streamed["choices"][0]["message"]["content"] == PARIS
    assert streamed["choices"][0]["finish_reason"] == "stop"
    assert streamed["usage"]["completion_tokens"] == 8
    assert streamed["events"].count("content.delta") >= 2
    assert "content.done" in streamed["events"]
    completion = found["completion"]["choices"][0]
    assert completion["text"].startswith(" Paris")
    assert completion["finish_reason"] == "length"
    assert "".join(completion["logprobs"]["tokens"]) == completion["text"]
    assert {len(top) for top in completion["logprobs"]["top_logprobs"]} <= {2, 3}
    assert found["completion_stream"] == completion["text"]
    assert found["parsed"]["continent"] == "Europe"
    assert found["response_parsed"]["continent"] == "Europe"
    assert found["response"]["status"] == "completed"
    assert found["response"]["output_text"] == PARIS
    assert found["response"]["usage"]["output_tokens"] == 8
    assert found["response_stream"]["output_text"] == PARIS
    assert found["response_stream"]["events"][0] == "response.created"
    assert found["response_stream"]["events"][-1] == "response.completed"
    assert found["concurrent"] == [PARIS] * 4
    assert found["missing"] == {"status": 404, "code": "model_not_found", "param": "model"}
    assert (counted["finished_stop"], counted["finished_length"]) == (10, 2)
    assert counted["finished_abort"] == counted["finished_error"] == 0


def test_langchain_openai(clients: Clients, server: Server) -> None:
    found = clients.report("with_langchain.py", server)
    invoked, streamed = found["invoke"], found["stream"]
    assert invoked["content"] == streamed["content"] == PARIS
    assert invoked["response_metadata"]["finish_reason"] == "stop"
    assert streamed["response_metadata"]["finish_reason"] == "stop"
    for usage in (invoked["usage_metadata"], streamed["usage_metadata"]):
        assert usage["output_tokens"] == 8
        assert usage["total_tokens"] == usage["input_tokens"] + 8
    assert streamed["chunks"] >= 3
    assert found["batch"] == [PARIS, PARIS]
    assert found["structured"]["name"] == "Paris"
    assert found["structured"]["continent"] == "Europe"
    assert found["structured_responses"]["continent"] == "Europe"
    answer = found["tool_history"]
    assert answer["content"]
    assert answer["usage_metadata"]["input_tokens"] > invoked["usage_metadata"]["input_tokens"]
    tokens = found["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens[:-1]) == PARIS
    assert all(each["logprob"] <= 0 for each in tokens)
    assert found["responses"] == PARIS
    assert found["completion"].startswith(" Paris")


def test_litellm(clients: Clients, server: Server) -> None:
    found = clients.report("with_litellm.py", server)
    for provider in ("openai", "hosted_vllm"):
        whole, streamed = found[provider], found[f"{provider}_stream"]
        assert _answer(whole) == _answer(streamed) == (PARIS, "stop")
        usage = whole["usage"]
        assert usage["completion_tokens"] == streamed["usage"]["completion_tokens"] == 8
        assert streamed["usage"]["prompt_tokens"] == usage["prompt_tokens"]
        assert streamed["chunks"] >= 3
        # The prices that the script registers, per token.
        assert whole["cost"] == pytest.approx(0.001 * usage["prompt_tokens"] + 0.01 * 8)
        assert whole["metrics"]["speculative_decoding"]["draft"]
    assert found["text"]["choices"][0]["text"].startswith(" Paris")
    assert found["responses"]["status"] == "completed"
    assert found["responses"]["output"][0]["content"][0]["text"] == PARIS


def _answer(completion: dict[str, Any]) -> tuple[str, str]:
    choice = completion["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]
