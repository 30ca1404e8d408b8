"""Requests of the operator's commands, and their exit codes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline.actors.weights.registry import _SUBSCRIBER_TTL_S
from paceline.actors.weights.subscriber import _POLL_S
from paceline.deploy.cli import operations as operations_command
from paceline.deploy.cli.main import main
from paceline.deploy.errors import CallError, NoAnswerError

URL = "http://127.0.0.1:9"
LIVE = {"live_drafts": {"sql": {"stable": 3, "candidate": 4}}}


class Server:
    """Answers like an ingress; keeps the requests."""

    def __init__(self, **answers: Any) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self._answers = {"status": LIVE} | answers

    def __call__(self, url: str, method: str, path: str, body: Any = None, *_: Any) -> Any:
        assert url == URL
        self.requests.append((method, path, body))
        answer = self._answers[path.rsplit("/", 1)[-1]]
        if isinstance(answer, Exception):
            raise answer
        return answer


def live(*lagging: str, subscribers: int = 1) -> dict[str, Any]:
    """A status in which so many processes draft, and these have not loaded the present versions."""
    loaded = {"subscribers": subscribers, "lagging": list(lagging)}
    return {"live_drafts": {"sql": {"stable": 3, "candidate": 4} | loaded}}


def run(server: Server, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(operations_command, "call", server)
    monkeypatch.setattr(operations_command, "_POLL_S", 0.0)
    return main([*words, "--url", URL])


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    """URL of a server that gives every request this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815 (the name is its parent's)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b'{"error": "text"}', b'{"error": null}', b"[1]", b"{}"])
def test_an_error_of_another_shape_is_a_line(body: bytes) -> None:
    with answering(500, body) as url, pytest.raises(CallError, match="answers 500"):
        operations_command.call(url, "GET", "/v1/paceline/status")


@pytest.mark.parametrize("body", [b"[1]", b"null", b'"text"', b"{}", b'{"status": "ok"}'])
@pytest.mark.parametrize(
    "words",
    [["status"], ["topics"], ["rollback", "sql"], ["rollback", "sql", "--expect", "3"],
     ["replay", "purge", "--all"], ["drain"], ["drain", "--off"]],
)  # fmt: skip
def test_another_service_is_named_in_one_line(
    words: list[str], body: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(200, body) as url:
        assert main([*words, "--url", url]) == 1
    assert "".join(capsys.readouterr()) == f"paceline: {url} is no Paceline server\n"


def test_a_topic_is_not_added_to_another_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "law").write_text("a prompt")
    with answering(200, b"{}") as url:
        words = ["topics", "add", "law", "--examples", str(tmp_path / "law")]
        assert main([*words, "--url", url]) == 1
    assert capsys.readouterr().err == f"paceline: {url} is no Paceline server\n"


def test_where_a_key_is_missing_its_variable_is_named() -> None:
    refused = b'{"error": {"message": "No API key was sent.", "code": "invalid_api_key"}}'
    with answering(401, refused) as url, pytest.raises(CallError) as caught:
        operations_command.call(url, "GET", "/v1/paceline/status")
    said = "No API key was sent. This command takes the key from PACELINE_API_KEY."
    assert (str(caught.value), caught.value.code) == (said, "invalid_api_key")


@pytest.mark.parametrize("key", ["sec\nret", os.fsdecode(b"sec\xffret")])
def test_a_key_that_is_none_is_not_printed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", key)
    with answering(200, b"{}") as url, pytest.raises(CallError) as caught:
        operations_command.call(url, "GET", "/v1/paceline/status")
    assert str(caught.value) == "PACELINE_API_KEY: no valid key"


def test_a_server_on_this_machine_is_called_without_the_environment_s_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering(200, b"{}") as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        for name in ("ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for host in ("127.0.0.1", "localhost", "[::1]"):
            with pytest.raises(NoAnswerError, match="does not answer"):
                operations_command.call(f"http://{host}:9", "GET", "/v1/paceline/status")
        with pytest.raises(CallError, match="no Paceline server"):  # the proxy's answer
            operations_command.call("http://x.example", "GET", "/v1/paceline/status")


@pytest.mark.parametrize(
    ("name", "value"),
    [("ALL_PROXY", "socks5://127.0.0.1:9"), ("ALL_PROXY", "x://y"), ("SSL_CERT_FILE", "/nope")],
)
def test_an_environment_that_cannot_be_used_is_a_line(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setenv(name, value)
    assert main(["status", "--url", "http://x.invalid"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("paceline: http://x.invalid is not called: the environment's proxy or")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["sql"], {"topic": "sql", "version": None, "expected": 4}),
        (["sql", "2"], {"topic": "sql", "version": 2, "expected": 4}),
        (["sql", "0", "--expect", "7"], {"topic": "sql", "version": 0, "expected": 7}),
    ],
)
def test_rollback(words: list[str], body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(rollback={"topic": "sql", "weight_version": 5}, status=live())
    assert run(server, monkeypatch, "rollback", *words) == 0
    posted = [asked for asked in server.requests if asked[0] == "POST"]
    assert posted == [("POST", "/v1/paceline/rollback", body)]


def test_a_rollback_that_a_replica_does_not_take_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operations_command, "_ROLLOUT_S", 0.05)
    server = Server(rollback={"topic": "sql", "weight_version": 5}, status=live("one"))
    assert run(server, monkeypatch, "rollback", "sql") == 1
    assert "within 0 s: one; its log says why" in "".join(capsys.readouterr())


def test_a_replica_that_stopped_polling_lags_for_as_long_as_a_rollback_waits() -> None:
    assert operations_command._ROLLOUT_S + _POLL_S < _SUBSCRIBER_TTL_S


@pytest.mark.parametrize(("subscribers", "code"), [(0, 1), (1, 1), (2, 0)])
def test_a_rollback_waits_for_replicas_that_a_restarted_registry_does_not_know(
    subscribers: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_command, "_ROLLOUT_S", 0.05)
    status = live(subscribers=subscribers) | {"scheduler": {"replicas": 2}}
    server = Server(rollback={"topic": "sql", "weight_version": 5}, status=status)
    assert run(server, monkeypatch, "rollback", "sql") == code


@pytest.mark.parametrize(("subscribers", "code"), [(0, 1), (1, 0)])
def test_in_a_pool_a_rollback_waits_for_the_topics_expert_and_not_for_the_targets(
    subscribers: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_command, "_ROLLOUT_S", 0.05)
    pool = {"target": {"experts": {"sql": {}, "general": {}}}, "scheduler": {"replicas": 2}}
    status = live(subscribers=subscribers) | pool
    server = Server(rollback={"topic": "sql", "weight_version": 5}, status=status)
    assert run(server, monkeypatch, "rollback", "sql") == code


@pytest.mark.parametrize(
    ("words", "body"),
    [
        (["--topic", "sql"], {"topic": "sql", "request_id": None, "all": False}),
        (["--request", "cmpl-1"], {"topic": None, "request_id": "cmpl-1", "all": False}),
        (["--all"], {"topic": None, "request_id": None, "all": True}),
    ],
)
def test_purge(words: list[str], body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(purge={"removed": {"sql": 2}})
    assert run(server, monkeypatch, "replay", "purge", *words) == 0
    assert server.requests == [("POST", "/v1/paceline/replay/purge", body)]


def test_a_purge_that_misses_a_part_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(purge={"removed": {"sql": 2, "code": None}})
    assert run(server, monkeypatch, "replay", "purge", "--all") == 1
    assert "code: does not answer, try again" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["--all", "--topic", "sql"]])
def test_a_purge_needs_exactly_one_selection(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(Server(), monkeypatch, "replay", "purge", *words) == 2


def test_drain_and_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(drain={"running": 0, "waiting": 0})
    assert run(server, monkeypatch, "drain") == 0
    assert {body["on"] for _, _, body in server.requests} == {True}
    assert run(server, monkeypatch, "drain", "--off") == 0
    assert server.requests[-1] == ("POST", "/v1/paceline/drain", {"on": False})
    busy = Server(drain={"running": 1, "waiting": 0})
    capsys.readouterr()
    assert run(busy, monkeypatch, "drain", "--wait", "0") == 1
    assert capsys.readouterr().out.splitlines() == [
        "draining: 1 running, 0 waiting",
        "not done within 0 s: the server goes on draining, and `paceline drain --off` ends that",
    ]


@pytest.mark.parametrize("words", [["status"], ["rollback", "sql"], ["replay", "purge", "--all"]])
def test_a_refusal_is_printed_and_exits_with_1(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = CallError("Not from there.")
    server = Server(status=refused, rollback=refused, purge=refused)
    assert run(server, monkeypatch, *words) == 1
    assert "Not from there." in "".join(capsys.readouterr())
