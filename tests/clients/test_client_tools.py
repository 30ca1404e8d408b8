"""Tools as three client libraries call them, with a chat template that knows tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clients import Clients, Serve, Server
from tool_templates import HERMES

from paceline.deploy.config.config import MODELS_DIR

pytestmark = [pytest.mark.cluster, pytest.mark.full]

CALL = {"city": "Paris", "unit": "Celsius"}


@pytest.fixture(scope="module")
def tools_server(
    server: Server, serve: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The default target and its draft under a template of Hermes' form: its own knows no tools."""
    folder = tmp_path_factory.mktemp("tools") / "target"
    folder.mkdir()
    for file in server.model.iterdir():
        (folder / file.name).symlink_to(file)
    template = folder / "chat_template.jinja"
    template.unlink()
    template.write_text(HERMES, encoding="utf-8")
    draft: Path = MODELS_DIR / "draft-smollm2"
    with serve(target={"path": str(folder)}, drafts={"general": str(draft)}) as running:
        yield running


def test_tools_of_three_libraries(clients: Clients, tools_server: Server) -> None:
    found = clients.report("with_tools.py", tools_server)
    openai, langchain, litellm = found["openai"], found["langchain"], found["litellm"]
    for completion in (openai["whole"], openai["streamed"], litellm["whole"], litellm["streamed"]):
        (choice,) = completion["choices"]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == CALL
        assert call["id"]
    assert openai["streamed"]["events"].count("tool_calls.function.arguments.delta") >= 2
    assert openai["parsed"] == CALL
    assert openai["answer"]["choices"][0]["finish_reason"] in ("stop", "length")
    assert "21 degrees Celsius" in openai["answer"]["choices"][0]["message"]["content"]
    assert openai["response"]["type"] == "function_call"
    assert json.loads(openai["response"]["arguments"]) == CALL
    assert openai["response_answer"] == openai["answer"]["choices"][0]["message"]["content"]
    for (call,) in (langchain["called"], langchain["streamed"]):
        assert (call["name"], call["args"]) == ("weather", CALL)
    assert langchain["finish_reason"] == "tool_calls"
    assert langchain["result"] == "21 degrees Celsius in Paris (Celsius)"
    assert "21 degrees Celsius" in langchain["answer"]
    assert langchain["structured"] == CALL
