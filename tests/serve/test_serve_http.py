"""Plain HTTP: bad input, status, replay, clients that go away, too many at once."""

import asyncio
import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.cluster

MESSAGES = [{"role": "user", "content": "List all files"}]
CHAT = {"model": "paceline", "messages": MESSAGES, "ignore_eos": True}
# Slow as well: fast machines write 2000 plain tokens within a second.
LONG = CHAT | {
    "max_tokens": 2000,
    "speculative": {"draft": "off"},
    "logprobs": True,
    "top_logprobs": 20,
    "frequency_penalty": 0.1,
}


def status(http: httpx.Client) -> Any:
    return http.get("/v1/paceline/status").json()


def wait_until_free(http: httpx.Client, seconds: float = 20.0) -> None:
    """Return once the target has nothing to do; fail where it does not come to rest."""
    deadline = time.monotonic() + seconds
    while (target := status(http)["target"])["running"] or target["waiting"]:
        assert time.monotonic() < deadline, target
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, "missing_required_parameter", "model"),
        ("/v1/chat/completions", CHAT | {"max_tokens": -1}, "invalid_value", "max_tokens"),
        ("/v1/chat/completions", CHAT | {"temperature": "hot"}, "invalid_type", "temperature"),
        ("/v1/chat/completions", CHAT | {"mood": 1}, "unknown_parameter", "mood"),
        (
            "/v1/chat/completions",
            CHAT | {"speculative": {"draft": "poetry"}},
            "invalid_value",
            "speculative.draft",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": "x " * 3000}]},
            "context_length_exceeded",
            "messages",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_completion_tokens": 2048},
            "context_length_exceeded",
            "max_completion_tokens",
        ),
        ("/v1/completions", {"model": "paceline", "prompt": ""}, "invalid_value", "prompt"),
        ("/v1/completions", {"model": "paceline", "prompt": [99999]}, "invalid_value", "prompt"),
        ("/v1/completions", {"model": "paceline", "prompt": ["a"] * 17}, None, "prompt"),
        ("/v1/completions", {"model": "paceline", "prompt": "a", "echo": "x"}, None, "echo"),
    ],
)
def test_a_bad_request_names_its_field(
    http: httpx.Client, path: str, body: dict[str, Any], code: str | None, param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert code is None or error["code"] == code


@pytest.mark.parametrize("body", [b"", b"{", b'{"model":', b"\xff\xfe\x00", b"[]", b"null"])
def test_malformed_json_is_a_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] in ("invalid_json", "invalid_type")


def test_what_is_not_there_is_refused_in_the_same_shape(http: httpx.Client) -> None:
    for answer, code in [
        (http.get("/v1/nothing"), 404),
        (http.post("/v1/models"), 405),
        (http.get("/v1/chat/completions"), 405),
        (http.post("/v1/completions", content=b" " * (8 * 2**20 + 1)), 413),
    ]:
        assert answer.status_code == code
        assert answer.json()["error"]["message"]


def test_health_and_status_tell_what_runs(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    seen = status(http)
    assert seen["target"]["dtype"] == "float32"
    assert set(seen["target"]["drafts"]) >= {"general", "sql", "sql@0"}
    assert seen["weight_versions"]["sql"] == 0
    assert set(seen["shards"]) == {"general", "math", "code", "sql", "shell"}
    assert seen["scheduler"]["paused"] is False


def records(http: httpx.Client) -> int:
    return sum(shard["inserted_total"] for shard in status(http)["shards"].values())


def test_a_request_is_kept_for_learning_unless_it_says_no(http: httpx.Client) -> None:
    wait_until_free(http)
    time.sleep(0.3)  # records are sent without waiting for them
    before = records(http)
    http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4, "store": False})
    http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 4})
    deadline = time.monotonic() + 10
    while records(http) == before and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    assert records(http) == before + 1


def running(http: httpx.Client) -> int:
    return int(status(http)["target"]["running"])


def seconds_until_free(http: httpx.Client) -> float:
    began = time.monotonic()
    wait_until_free(http)
    return time.monotonic() - began


def asking(base_url: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked and reads no answer; closing it disconnects."""
    host, port = base_url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_within_a_second_of_a_client_s_leaving_its_keys_and_values_are_free(
    http: httpx.Client, base_url: str, stream: bool, n: int
) -> None:
    """Long enough an answer that only the cancellation can end it in time."""
    wait_until_free(http)
    with asking(base_url, LONG | {"stream": stream, "n": n}):
        deadline = time.monotonic() + 20
        while running(http) < n:
            assert time.monotonic() < deadline
    assert seconds_until_free(http) < 1.0


def test_a_stream_frees_its_slot_on_disconnect(http: httpx.Client, base_url: str) -> None:
    wait_until_free(http)
    with (
        httpx.Client(base_url=base_url, timeout=60) as leaver,
        leaver.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True}) as stream,
    ):
        lines = stream.iter_lines()  # kept: dropping it would close the stream
        assert next(lines).startswith("data: ")
        assert status(http)["target"]["running"] >= 1
    wait_until_free(http)
    assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200


def test_an_answer_frees_its_slots_on_disconnect(http: httpx.Client, base_url: str) -> None:
    wait_until_free(http)
    prompts = {"model": "paceline", "prompt": ["a", "b"], "max_tokens": 2000, "ignore_eos": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{base_url}/v1/completions", json=prompts, timeout=0.2)
    wait_until_free(http)
    assert http.post("/v1/chat/completions", json=CHAT | {"max_tokens": 2}).status_code == 200


def test_requests_over_the_limit_get_retry_after_and_the_others_are_answered(
    http: httpx.Client,
) -> None:
    wait_until_free(http)
    full = {"model": "paceline", "prompt": ["a"] * 16, "max_tokens": 60, "ignore_eos": True}

    def post(_: int) -> httpx.Response:
        return http.post("/v1/completions", json=full)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, range(4)))
    codes = [answer.status_code for answer in answers]
    assert codes.count(200) >= 1
    assert codes.count(503) >= 1
    refused = next(answer for answer in answers if answer.status_code == 503)
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["code"] == "server_overloaded"
    wait_until_free(http)
    assert http.post("/v1/completions", json=full).status_code == 200


def test_many_at_once_are_all_answered_alike(http: httpx.Client) -> None:
    """More requests than rows, streams among them: every one gets the greedy text."""

    def text(index: int) -> str:
        body = CHAT | {"max_tokens": 12, "temperature": 0, "stream": index % 2 == 0}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        if not body["stream"]:
            return str(answer.json()["choices"][0]["message"]["content"])
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        deltas = [httpx.Response(200, text=event).json()["choices"][0]["delta"] for event in events]
        return "".join(delta.get("content", "") for delta in deltas)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(text, range(12)))) == 1


FILL = LONG | {"n": 4}  # as many as are decoded at once
FILLS = 3


@contextmanager
def occupied(base_url: str, http: httpx.Client) -> Iterator[None]:
    """All sequences are taken meanwhile, and more wait to take them."""
    wait_until_free(http)
    with ExitStack() as stack:
        for _ in range(FILLS):
            stack.enter_context(asking(base_url, FILL))
        deadline = time.monotonic() + 20
        # All of them, or what comes next may overtake those that are still on their way.
        while (target := status(http)["target"])["running"] + target["waiting"] < FILLS * 4:
            assert time.monotonic() < deadline
        yield
    wait_until_free(http)


def test_a_stream_that_waits_has_headers_and_comments_and_then_its_answer(
    http: httpx.Client, client: openai.OpenAI, base_url: str
) -> None:
    ask = CHAT | {"max_tokens": 8, "temperature": 0}
    expected = http.post("/v1/chat/completions", json=ask).json()["choices"][0]["message"]
    parsed: list[Any] = []

    def read() -> None:
        chunks = client.chat.completions.create(
            **{key: value for key, value in ask.items() if key != "ignore_eos"},
            stream=True,
            extra_body={"ignore_eos": True},
        )
        parsed.extend(chunks)

    reader = threading.Thread(target=read)
    lines: list[tuple[float, str]] = []
    with ExitStack() as full:
        full.enter_context(occupied(base_url, http))
        began = time.monotonic()
        reader.start()
        with http.stream("POST", "/v1/chat/completions", json=ask | {"stream": True}) as stream:
            assert stream.status_code == 200
            assert time.monotonic() - began < 2.0
            assert running(http) == 4
            for line in stream.iter_lines():
                lines.append((time.monotonic(), line))
                if [said for _, said in lines].count(": waiting") == 2:
                    full.close()  # room at last
        reader.join()
    comments = [at for at, line in lines if line == ": waiting"]
    assert len(comments) >= 2
    assert max(after - at for at, after in pairwise([began, *comments])) < 4.0
    events = [json.loads(line[6:]) for _, line in lines if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected["content"]
    assert lines[-2][1] == "data: [DONE]"
    contents = [choice.delta.content or "" for chunk in parsed for choice in chunk.choices]
    assert "".join(contents) == expected["content"]


def test_what_is_wrong_with_a_stream_at_once_is_still_a_status_while_all_is_taken(
    http: httpx.Client, base_url: str
) -> None:
    with occupied(base_url, http):
        for change, code in [
            ({"max_tokens": -1}, 400),
            ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400),
            ({"model": "gpt-9"}, 404),
        ]:
            body = CHAT | {"stream": True} | change
            answer = http.post("/v1/chat/completions", json=body)
            assert (answer.status_code, "error" in answer.json()) == (code, True)
        many = {"model": "paceline", "prompt": ["a"] * 16, "stream": True}
        assert http.post("/v1/completions", json=many).status_code == 503


async def disconnect(base_url: str, bodies: list[dict[str, Any]], after_s: float) -> None:
    """Send them all at once, and hang up on all of them."""

    async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_raw():
                pass

    async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
        tasks = [asyncio.create_task(ask(http, body)) for body in bodies]
        await asyncio.sleep(after_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_disconnected_clients_do_not_count_as_failures_of_a_replica(
    http: httpx.Client, base_url: str, stream: bool, n: int
) -> None:
    """Some are being answered, some wait for room, with their headers or without."""
    wait_until_free(http)
    before = status(http)["failover"]
    for after_s in (0.05, 0.8, 1.6):
        asyncio.run(disconnect(base_url, [LONG | {"stream": stream, "n": n}] * 6, after_s))
        wait_until_free(http, 3.0)
    time.sleep(1.5)  # longer than a replica's own cancellation is waited out
    assert status(http)["failover"] == before
    assert running(http) == 0


def test_a_request_timeout_does_not_count_as_a_failure_of_a_replica(
    http: httpx.Client, base_url: str
) -> None:
    wait_until_free(http)
    before = status(http)["failover"]
    for stream in (False, True):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{base_url}/v1/chat/completions", json=LONG | {"stream": stream}, timeout=0.01
            )
    wait_until_free(http, 3.0)
    time.sleep(1.5)
    assert status(http)["failover"] == before
