"""Requests by outcome, around the real ingress over a real target."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request, Response
from local_ingress import application, wait_until_idle
from starlette.requests import ClientDisconnect
from starlette.types import Message
from unit.deploy.api.test_routing import remote

from paceline.actors.engine.target import TargetReplica
from paceline.deploy.api.ingress import Ingress
from paceline.deploy.api.routing import RouteSelector
from paceline.deploy.monitoring.catalogue import INGRESS, METRICS
from paceline.deploy.monitoring.outcomes import (
    OUTCOMES,
    OutcomeMiddleware,
    Outcomes,
    request_outcome,
)
from paceline.deploy.monitoring.samples import (
    FAILOVERS,
    ROUTER_OUTCOMES,
    IngressStats,
    ingress_samples,
)

SHORT = {"model": "m", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 4000}
PATH = "/v1/completions"
PREFLIGHT = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}


def measured(target: Any, folder: Path, **more: Any) -> tuple[Any, Outcomes]:
    api = application(target, folder, **more)
    outcomes = Outcomes(time.monotonic)
    api.add_middleware(OutcomeMiddleware, outcomes=outcomes)
    return api, outcomes


def asked(
    api: Any, target: TargetReplica, *bodies: dict[str, Any], path: str = PATH
) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(api, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            answers = [await http.post(path, json=body) for body in bodies]
            await wait_until_idle(target)  # the target must not deliver to a closed loop
            return answers

    return asyncio.run(run())


def test_answers_and_refusals_count_and_other_requests_do_not(
    target: TargetReplica, target_folder: Path
) -> None:
    api, outcomes = measured(target, target_folder, cors_origins=("https://a.example",))
    answers = asked(
        api, target, SHORT, SHORT | {"stream": True}, SHORT | {"max_tokens": -1}, SHORT | {"n": 9}
    )
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400]
    assert asked(api, target, {}, path="/v1/models")[0].status_code == 405
    assert asked(api, target, {}, path="/nowhere")[0].status_code == 404

    async def preflight() -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            return await http.options(PATH, headers=PREFLIGHT)

    assert asyncio.run(preflight()).status_code == 200
    assert dict(outcomes.counts) == {"ok": 2, "refused": 2}
    assert len(outcomes.latencies) == 2
    assert all(seconds > 0 for seconds in outcomes.latencies)


@pytest.mark.parametrize("stream", [False, True])
def test_timeouts_before_and_after_the_start_of_an_answer(
    target: TargetReplica, target_folder: Path, stream: bool
) -> None:
    api, outcomes = measured(target, target_folder, request_timeout_s=1.0)
    [answer] = asked(api, target, LONG | {"stream": stream, "n": 4})
    assert answer.status_code == (200 if stream else 504)
    assert dict(outcomes.counts) == {"timed_out": 1}
    assert not outcomes.latencies


class Faulty(Ingress):
    async def completions(self, request: Request) -> Response:
        raise RuntimeError(f"a fault of the ingress at {request.url.path}")


def test_an_internal_error_is_a_failure(target: TargetReplica, target_folder: Path) -> None:
    api, outcomes = measured(target, target_folder, ingress_class=Faulty)
    [answer] = asked(api, target, SHORT)
    assert answer.status_code == 500
    assert dict(outcomes.counts) == {"failed": 1}


def test_a_disconnected_client_is_cancelled_and_no_failure(
    target: TargetReplica, target_folder: Path
) -> None:
    api, outcomes = measured(target, target_folder)

    async def disconnect() -> None:
        sent = asyncio.Event()
        body = json.dumps(LONG | {"stream": True}).encode()
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Any:
            message = next(messages, None)
            if message is None:
                await sent.wait()
                return {"type": "http.disconnect"}
            return message

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                sent.set()

        scope = {"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
        scope |= {"headers": [(b"content-type", b"application/json")], "query_string": b""}
        scope |= {"client": ("127.0.0.1", 1), "server": ("here", 80), "scheme": "http"}
        scope |= {"http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"}}
        await asyncio.wait_for(api(scope, receive, send), 30)
        await wait_until_idle(target)

    asyncio.run(disconnect())
    assert dict(outcomes.counts) == {"cancelled": 1}


@pytest.mark.parametrize(
    ("status", "complete", "outcome"),
    [
        (200, True, "ok"),
        (200, False, "cancelled"),
        (None, False, "cancelled"),
        (401, True, "refused"),
        (429, True, "rate_limited"),
        (503, True, "overloaded"),
        (504, False, "timed_out"),
        (499, True, "cancelled"),
        (500, True, "failed"),
    ],
)
def test_an_outcome_by_status(status: int | None, complete: bool, outcome: str) -> None:
    assert request_outcome(status, complete) == outcome
    assert outcome in OUTCOMES


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ClientDisconnect(), "cancelled"),
        (RuntimeError("a fault"), "failed"),
    ],
)
def test_a_disconnect_is_distinguished_from_an_error(error: Exception, outcome: str) -> None:
    async def raising(*_: object) -> None:
        raise error

    async def nothing() -> Message:
        return {"type": "http.disconnect"}

    async def drop(_: Message) -> None:
        pass

    outcomes = Outcomes(lambda: 0.0)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    with pytest.raises(type(error)):
        asyncio.run(OutcomeMiddleware(raising, outcomes)(scope, nothing, drop))
    assert outcomes.counts == {outcome: 1}


def test_router_requests_are_counted_by_outcome() -> None:
    said: list[Any] = [{"sql": 0.9}, RuntimeError("dead"), {"sql": 0.9}]
    now = [0.0]

    async def classify(_: str) -> dict[str, float]:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        now[0] += 0.25
        return dict(answer)

    async def hang(_: str) -> dict[str, float]:
        await asyncio.sleep(60)
        return {}

    async def run() -> None:
        selector = RouteSelector(remote(classify=classify), ("sql",), 1.0, 0.5, lambda: now[0])
        await selector.select("a")
        await selector.select("b")  # fails, and opens the circuit
        await selector.select("c")
        assert dict(selector.calls) == {"answered": 1, "failed": 1, "skipped": 1}
        assert list(selector.latencies) == [0.25]
        late = RouteSelector(remote(classify=hang), ("sql",), 0.01, 0.5, lambda: now[0])
        await late.select("d")
        assert dict(late.calls) == {"late": 1}
        without = RouteSelector(None, ("sql",), 1.0, 0.5, lambda: now[0])
        await without.select("e")
        assert not without.calls

    asyncio.run(run())


def test_ingress_samples_start_at_zero_and_cover_the_catalogue() -> None:
    nothing = IngressStats({}, (0.5,), 3, {}, (0.01,), {"sql": {"general": 2}}, {})
    samples = list(ingress_samples(nothing))
    assert {s.name for s in samples} == {m.name for m in METRICS if m.part == INGRESS}
    zeros = [sample for sample in samples if sample.value == 0]
    assert len(zeros) == len(OUTCOMES) + len(ROUTER_OUTCOMES) + len(FAILOVERS)
