"""Token sources and the page's figures over real HTTP."""

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.cluster

MESSAGES = [{"role": "user", "content": "List all files"}]
ASKED = {
    "model": "paceline",
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_sources": True,
    "return_token_ids": True,
    "speculative": {"draft": "sql", "num_speculative_tokens": 3},
}
FIELDS = {
    "token",
    "text_offset",
    "source",
    "draft",
    "weight_version",
    "target_probability",
    "acceptance_probability",
    "rejected_token",
}


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Per choice what all of its events said, put together."""
    answer = http.post(path, json=body | {"stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line[:7] == "data: {"]
    found: dict[int, dict[str, Any]] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        own = found.setdefault(choice["index"], {"text": "", "ids": [], "sources": []})
        own["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        own["ids"] += choice.get("token_ids", [])
        own["sources"] += choice.get("token_sources", [])
    return [found[index] for index in sorted(found)]


def whole(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "ids": choice["token_ids"],
            "sources": choice["token_sources"],
        }
        for choice in http.post(path, json=body).json()["choices"]
    ]


@pytest.mark.parametrize("stop", [None, "e"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_streamed_and_whole_answers_say_the_same_of_every_token(
    http: httpx.Client, path: str, stop: str | None
) -> None:
    chat = path.endswith("chat/completions")
    asked = {"messages": MESSAGES} if chat else {"prompt": "List all files"}
    body = ASKED | asked | {"n": 2, "stop": stop}
    parts = streamed(http, path, body)
    assert len(parts) == 2
    for part, other in zip(parts, whole(http, path, body), strict=True):
        assert (part["text"], part["ids"]) == (other["text"], other["ids"])
        # k depends on what is left of a round's budget alone, so the rounds are the same
        assert [o["text_offset"] for o in part["sources"]] == [
            o["text_offset"] for o in other["sources"]
        ]
        assert len(part["sources"]) == len(part["ids"]) > 0
        for entry in part["sources"]:
            assert set(entry) == FIELDS
            drafted = entry["source"] != "plain"
            assert entry["draft"] == ("sql" if drafted else None)
            assert 0 < entry["target_probability"] <= 1
            assert (entry["rejected_token"] is not None) == (entry["source"] == "recovered")


def test_without_speculation_all_is_plain_and_unasked_nothing_is_said(http: httpx.Client) -> None:
    body = ASKED | {"messages": MESSAGES, "speculative": {"draft": "off"}}
    (choice,) = whole(http, "/v1/chat/completions", body)
    assert {entry["source"] for entry in choice["sources"]} == {"plain"}
    quiet = http.post("/v1/chat/completions", json=body | {"return_token_sources": False}).json()
    assert "token_sources" not in quiet["choices"][0]
    assert quiet["choices"][0]["token_ids"] == choice["ids"]


def rows(http: httpx.Client) -> dict[str, list[int]]:
    view = http.get("/v1/paceline/live").json()
    assert view["columns"][:3] == ["at", "topic", "draft"]
    sums: dict[str, list[int]] = {}
    for row in view["rows"]:
        before = sums.get(row[2], [0] * 5)
        sums[row[2]] = [a + b for a, b in zip(before, row[3:], strict=True)]
    return sums


@pytest.mark.parametrize("stream", [False, True])
def test_recent_traffic_is_reported_by_topic_and_draft(http: httpx.Client, stream: bool) -> None:
    before = rows(http).get("shell@0", [0] * 5)
    drafted = {"draft": "shell@0", "num_speculative_tokens": 2}
    body = ASKED | {"messages": MESSAGES, "stream": stream, "speculative": drafted, "store": False}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    after = rows(http)["shell@0"]
    requests, tokens, rounds, tried, accepted = (b - a for a, b in zip(before, after, strict=True))
    assert (requests, tokens) == (1, 24)
    assert 0 < rounds <= tried <= 2 * rounds
    assert 0 <= accepted <= tried
    assert http.get("/v1/paceline/live?since=9e9").json()["rows"] == []
    refused = http.get("/v1/paceline/live?since=yesterday")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "since")


def test_the_page_is_there(http: httpx.Client) -> None:
    answer = http.get("/ui", follow_redirects=True)
    assert answer.url.path == "/ui/"
    assert "<title>Paceline</title>" in answer.text
    assert http.get("/ui/main.js").headers["Content-Type"].startswith("text/javascript")
    assert http.get("/ui/nothing.js").json()["error"]["message"]
