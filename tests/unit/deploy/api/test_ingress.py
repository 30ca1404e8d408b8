"""The ingress over a real target in this process: deadlines, limits, what is freed."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from local_ingress import (
    CONTEXT_LENGTH,
    Broadcast,
    SchedulerHandle,
    application,
    ingress_client,
    wait_until_idle,
)
from ray import serve
from starlette.types import Message
from tiny_models import save_tiny, tiny_tokenizer

from paceline.actors.engine.target import TargetReplica
from paceline.deploy.api import ingress, operations, request_parser, response_builder
from paceline.deploy.api.actor_calls import BackgroundPoller, Call
from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.streaming import deadline_scope, with_deadline
from paceline.deploy.cli.operations import call

LONG = {"model": "m", "prompt": "a", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_that_takes_too_long_is_a_504_and_frees_what_it_held(
    target: TargetReplica, target_folder: Path, n: int
) -> None:
    async def ask() -> httpx.Response:
        async with ingress_client(target, target_folder, request_timeout_s=0.2) as http:
            answer = await http.post("/v1/completions", json=LONG | {"n": n})
            await wait_until_idle(target)
            return answer

    answer = asyncio.run(ask())
    assert answer.status_code == 504
    assert answer.headers["Retry-After"] == "1"
    assert answer.json()["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_takes_too_long_ends_with_an_error_event(
    target: TargetReplica, target_folder: Path, n: int
) -> None:
    async def ask() -> httpx.Response:
        async with ingress_client(target, target_folder, request_timeout_s=1.0) as http:
            answer = await http.post("/v1/completions", json=LONG | {"n": n, "stream": True})
            await wait_until_idle(target)
            return answer

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    *pieces, failure, done = [line[6:] for line in answer.text.splitlines() if line]
    assert pieces
    assert json.loads(failure)["error"]["code"] == "request_timeout"
    assert done == "[DONE]"


def test_a_client_has_its_share_and_comes_back_later(
    target: TargetReplica, target_folder: Path
) -> None:
    async def ask() -> tuple[httpx.Response, httpx.Response, httpx.Response]:
        door = ingress_client(target, target_folder, request_timeout_s=0.5, max_seqs_per_client=2)
        async with door as http:
            long = asyncio.create_task(http.post("/v1/completions", json=LONG | {"n": 2}))
            while not (await target.status()).running:
                await asyncio.sleep(0.005)
            short = LONG | {"max_tokens": 1}
            refused = await http.post("/v1/completions", json=short)
            other = await http.post(
                "/v1/completions", json=short, headers={"Authorization": "Bearer other"}
            )
            await long
            later = await http.post("/v1/completions", json=short)
            await wait_until_idle(target)
            return refused, other, later

    refused, other, later = asyncio.run(ask())
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert (other.status_code, later.status_code) == (200, 200)


def test_a_text_with_a_token_that_the_model_lacks_is_refused(
    target: TargetReplica, tmp_path: Path
) -> None:
    """A tokenizer that got a token, and embeddings that hung resized."""
    tokenizer = tiny_tokenizer()
    save_tiny(tmp_path, 1, vocab=len(tokenizer), max_position_embeddings=CONTEXT_LENGTH)
    tokenizer.add_tokens(["<new>"])
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)

    async def ask() -> list[httpx.Response]:
        async with ingress_client(target, tmp_path) as http:
            chat = {"model": "m", "messages": [{"role": "user", "content": "a <new>"}]}
            return [
                await http.post("/v1/completions", json=LONG | {"prompt": "a <new>"}),
                await http.post("/v1/chat/completions", json=chat),
                await http.post("/v1/completions", json=LONG | {"max_tokens": 1}),
            ]

    *refused, served = asyncio.run(ask())
    assert [r.status_code for r in refused] == [400, 400]
    assert [r.json()["error"]["param"] for r in refused] == ["prompt", "messages"]
    assert served.status_code == 200


def test_a_long_body_is_read_on_another_thread(
    target: TargetReplica, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    parse = request_parser.parse_options

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*arguments)

    monkeypatch.setattr(request_parser, "parse_options", watched)

    async def ask() -> list[int]:
        async with ingress_client(target, target_folder) as http:
            bodies = (LONG | {"max_tokens": 1}, LONG | {"prompt": [1] * 50_000})
            return [(await http.post("/v1/completions", json=b)).status_code for b in bodies]

    assert asyncio.run(ask()) == [200, 400]
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("paceline-bodies")


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    target: TargetReplica, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptEncoder, "encode_text", lambda *_: pytest.fail("it was tokenized"))
    text = "a" * 20 * CONTEXT_LENGTH
    asked = {
        "/v1/completions": ("prompt", [text, "a"]),
        "/v1/chat/completions": ("messages", [{"role": "user", "content": text}]),
        "/v1/responses": ("input", text),
    }

    async def ask() -> list[httpx.Response]:
        async with ingress_client(target, target_folder) as http:
            return [await http.post(p, json={"model": "m", f: v}) for p, (f, v) in asked.items()]

    for answer, (field, _) in zip(asyncio.run(ask()), asked.values(), strict=True):
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)


@pytest.mark.parametrize(
    ("fields", "stays"),
    [
        ({}, True),
        ({"logprobs": 1}, False),
        ({"prompt_logprobs": 0}, False),
        ({"return_token_sources": True}, False),
        ({"logprobs": 0, "echo": True, "stream": True}, False),
        ({"stream": True}, True),
    ],
)
def test_what_there_is_per_token_is_written_on_another_thread(
    target: TargetReplica,
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    stays: bool,
) -> None:
    threads: list[bool] = []
    part = response_builder._prompt_part

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return part(*arguments)

    monkeypatch.setattr(response_builder, "_prompt_part", watched)

    async def ask() -> httpx.Response:
        async with ingress_client(target, target_folder) as http:
            body = {"model": "m", "prompt": "a b c", "max_tokens": 1} | fields
            return await http.post("/v1/completions", json=body)

    assert asyncio.run(ask()).status_code == 200
    assert threads == [stays]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/paceline/drain", 403),
        ("GET", "/health/", 307),
    ],
)
def test_a_query_of_any_bytes_is_no_fault_of_the_server(
    target: TargetReplica, target_folder: Path, method: str, path: str, status: int
) -> None:
    """Clients of httpx escape them."""
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"a=\xff\xfe",
        "headers": [(b"host", b"x.example")], "server": ("127.0.0.1", 8000), "scheme": "http",
        "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(application(target, target_folder)(scope, receive, send))
    assert sent[0]["status"] == status
    allowed = dict(sent[0]["headers"]).get(b"allow")
    assert allowed == (b"POST" if status == 405 else None)
    if status == 307:
        where = dict(sent[0]["headers"])[b"location"]
        assert where == b"http://x.example/health?a=%FF%FE"
        return
    message = json.loads(sent[1]["body"])["error"]["message"]
    assert status == 403 or message.endswith(f": {method} {path}")


@pytest.mark.parametrize("field", ["prompt_logprobs", "logprobs"])
def test_more_log_probabilities_of_prompts_than_a_response_may_have_are_refused(
    target: TargetReplica, target_folder: Path, field: str
) -> None:
    async def ask() -> httpx.Response:
        async with ingress_client(target, target_folder) as http:
            body = {"model": "m", "prompt": [5] * 4000, "n": 4, "max_tokens": 1}
            more = {field: 20, "echo": True}
            return await http.post("/v1/completions", json=body | more)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def hang() -> None:
    await asyncio.sleep(3600)


async def cancel() -> None:
    raise asyncio.CancelledError  # what Serve makes of a call that the replica has cancelled


@pytest.mark.parametrize("fail", [hang, cancel])
def test_health_is_that_of_any_replica(
    fail: Callable[[], Awaitable[None]],
    target: TargetReplica,
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingress, "_HEALTH_TIMEOUT_S", 0.05)

    class Failing:
        """Fails as often as it is configured to, and then another replica answers."""

        def __init__(self, times: int) -> None:
            self.times, self.attempts = times, list[int]()
            self.generate = target.generate

        async def status(self, attempt: int = 0) -> dict[str, Any]:
            self.attempts.append(attempt)
            if attempt < self.times:
                await fail()
            return {}

    async def ask(replicas: Failing) -> int:
        async with ingress_client(replicas, target_folder) as http:
            return (await http.get("/health")).status_code

    assert asyncio.run(ask(Failing(0))) == 200
    assert asyncio.run(ask(Failing(1))) == 200
    failing = Failing(99)
    assert asyncio.run(ask(failing)) == 503
    assert failing.attempts == [0, 1, 2]


def test_a_cancelled_poll_is_a_failed_one() -> None:
    polls = list[int]()

    async def poll() -> None:
        polls.append(len(polls))
        if len(polls) == 1:
            raise asyncio.CancelledError

    async def run() -> None:
        poller = BackgroundPoller(poll, timeout_s=1.0, interval_s=0.0, name="actors")
        poller.ensure_started()
        while len(polls) < 3:
            await asyncio.sleep(0.0)

    asyncio.run(asyncio.wait_for(run(), 5.0))


def test_a_request_is_announced_to_the_scheduler_before_the_target_has_it(
    target: TargetReplica, target_folder: Path
) -> None:
    scheduler, permitted = SchedulerHandle(), list[bool]()

    class Watched:
        status = target.status

        def generate(self, *arguments: Any) -> Any:
            permitted.append(scheduler.scheduler.may_train())
            return target.generate(*arguments)

    async def ask() -> list[int]:
        async with ingress_client(Watched(), target_folder, scheduler=scheduler) as http:
            bodies = (LONG | {"n": "many"}, LONG | {"max_tokens": 2})
            return [(await http.post("/v1/completions", json=b)).status_code for b in bodies]

    assert scheduler.scheduler.may_train()
    assert asyncio.run(ask()) == [400, 200]
    assert permitted == [False]
    assert scheduler.announced == 1  # nothing of the one that was refused


def test_while_draining_nothing_new_is_let_in_and_what_runs_ends(
    target: TargetReplica, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SchedulerHandle()
    short = LONG | {"max_tokens": 60, "stream": True}

    async def ask() -> None:
        async with ingress_client(target, target_folder, scheduler=scheduler) as http:
            running = asyncio.create_task(http.post("/v1/completions", json=short))
            while not (await target.status()).running:
                await asyncio.sleep(0.001)
            scheduler.scheduler.drain(True)
            deadline = time.monotonic() + 10
            while (await http.get("/health")).status_code == 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            with monkeypatch.context() as patched:
                patched.setattr(request_parser, "read_body", lambda *_: pytest.fail("it was read"))
                refused = await http.post("/v1/completions", json=LONG | {"max_tokens": 1})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["Retry-After"]) > 0
            answer = await running
            assert answer.status_code == 200
            assert answer.text.rstrip().endswith("data: [DONE]")
            scheduler.scheduler.drain(False)
            while (await http.get("/health")).status_code == 503:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            again = await http.post("/v1/completions", json=LONG | {"max_tokens": 1})
            assert again.status_code == 200

    asyncio.run(ask())


def test_a_drain_waits_for_what_any_ingress_replica_has_admitted(
    target: TargetReplica, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = SchedulerHandle()
    replies: list[Call[int]] = [partial(asyncio.sleep, 0, count) for count in (3, 2)]

    class Replicas(Broadcast):
        def broadcast(self, method: str) -> Replicas:
            assert method == "admitted"
            return self

        async def _fetch_replica_results_async(self) -> list[Any]:
            return [SimpleNamespace(get_async=reply) for reply in replies]

    def handle(*_: str, _check_exists: bool = True, _record_telemetry: bool = True) -> Replicas:
        # Each asks another process, and blocks the event loop.
        assert not _check_exists
        assert not _record_telemetry
        return Replicas()

    here = SimpleNamespace(deployment="ingress", app_name="paceline")
    monkeypatch.setattr(serve, "get_replica_context", lambda: here)
    monkeypatch.setattr(serve, "get_deployment_handle", handle)
    command_waits_s = signature(call).parameters["timeout_s"].default
    assert command_waits_s > operations._ADMITTED_TIMEOUT_S
    monkeypatch.setattr(operations, "_ADMITTED_TIMEOUT_S", 0.05)

    async def ask(*, on: bool) -> httpx.Response:
        async with ingress_client(target, target_folder, scheduler=scheduler) as http:
            asked = http.post("/v1/paceline/drain", json={"on": on})
            return await asyncio.wait_for(asked, 5)

    assert asyncio.run(ask(on=True)).json() == {"draining": True, "running": 0, "waiting": 5}
    replies.append(partial(asyncio.sleep, 60, 0))  # a replica that hangs
    silent = asyncio.run(ask(on=True))
    assert silent.status_code == 503
    assert silent.json()["error"]["code"] == "unknown_outcome"
    assert "ingress" in silent.json()["error"]["message"]
    assert scheduler.scheduler.status().draining
    assert asyncio.run(ask(on=False)).json() == {"draining": False, "running": 0, "waiting": 0}


def test_a_time_out_of_another_s_is_not_its_own_cause() -> None:
    async def pieces() -> AsyncGenerator[Any, None]:
        raise TimeoutError("not the deadline's")
        yield

    async def read() -> list[TimeoutError]:
        later, caught = asyncio.get_running_loop().time() + 60, []
        try:
            await anext(with_deadline(pieces(), later))
        except TimeoutError as error:
            caught.append(error)
        try:
            async with deadline_scope(later):
                raise TimeoutError("not the deadline's")
        except TimeoutError as error:
            caught.append(error)
        return caught

    assert [error.__cause__ for error in asyncio.run(read())] == [None, None]
