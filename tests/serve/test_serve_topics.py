"""A topic is added to the running server of these tests, by the command, over real Ray and HTTP.

The last of its folder by name: the others see the topics that the server began with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from topic_examples import trips
from waiting import wait_until

from paceline.deploy.cli.main import main

pytestmark = pytest.mark.cluster


def answer(http: httpx.Client, prompt: str, draft: str) -> dict[str, Any]:
    body = {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "speculative": {"draft": draft, "num_speculative_tokens": 2}
        | ({"num_speculative_tokens": 0} if draft == "off" else {}),
    }
    found = http.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    content: dict[str, Any] = found.json()
    return content


def test_the_command_adds_a_topic_and_the_next_requests_are_of_it(
    http: httpx.Client, base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = tmp_path / "trips.txt"
    examples.write_text("\n".join(trips(40)))
    add = ["topics", "add", "travel", "--examples", str(examples), "--url", base_url]
    assert main(add) == 0
    said = capsys.readouterr().out
    assert "copy of general's, version 1" in said
    assert said.splitlines()[-1] == "it is served"
    prompts = trips(30, seed=7)[20:]

    def routed() -> bool:  # where there are several replicas, the one that was asked came first
        found = [answer(http, prompt, "auto") for prompt in prompts]
        figures = [f["metrics"]["speculative_decoding"] for f in found]
        own = [f for f in figures if f["topic"] == f["draft"] == "travel"]
        return len(own) >= 7 and all(f["num_draft_tokens"] > 0 for f in own)

    wait_until(routed, "requests of the topic", 30)
    ids = [
        [answer(http, prompt, draft)["choices"][0]["token_ids"] for prompt in prompts]
        for draft in ("travel", "off")
    ]
    assert ids[0] == ids[1]
    status = http.get("/v1/paceline/status").json()
    assert status["target"]["draft_failures"] == 0
    assert status["weight_versions"]["travel"] == 1
    wait_until(
        lambda: http.get("/v1/paceline/status").json()["shards"]["travel"]["inserted_total"] >= 7,
        "records of the topic",
        30,
    )
    assert main(["topics", "--url", base_url]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:5] == ["travel", "added", "1", "yes", "yes"]
    assert main(add) == 1
    assert "already" in capsys.readouterr().err
    assert main(["topics", "list", "--url", "http://127.0.0.1:9"]) == 1
