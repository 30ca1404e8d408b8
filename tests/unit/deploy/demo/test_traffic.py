"""The demo's clients against a small HTTP application in this process."""

import asyncio
import random
from collections import Counter
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from paceline.deploy.demo.prompts import split
from paceline.deploy.demo.report import LiveState
from paceline.deploy.demo.stats import ARMS, RequestLog
from paceline.deploy.demo.traffic import (
    Client,
    DemoSettings,
    PoissonArrivals,
    PromptRequest,
    closed_loop,
    run_schedule,
)


class Server:
    """Answers like Paceline: fixed acceptance per arm; the prompt ``fail`` fails."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.running = 0
        self.most_running = 0
        self.app = FastAPI()
        self.app.add_api_route("/v1/chat/completions", self.chat, methods=["POST"])

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        text = body["messages"][0]["content"]
        if text == "fail":
            return JSONResponse({"error": {"message": "no"}}, 503)
        draft = body["speculative"]["draft"]
        accepted = {"auto": 20, "general@0": 2, "off": 0}[draft]
        stats = {
            "topic": "sql",
            "num_draft_tokens": 0 if draft == "off" else 40,
            "num_accepted_draft_tokens": accepted,
            "num_spec_steps": 0 if draft == "off" else 10,
            "weight_version": 1,
        }
        answer = {
            "choices": [
                {
                    "finish_reason": "abort" if text == "abort" else "length",
                    "message": {"role": "assistant", "content": f"answer to {text}"},
                }
            ],
            "usage": {"completion_tokens": 30},
            "metrics": {"speculative_decoding": stats},
        }
        return JSONResponse(answer)


def _clock() -> float:
    return asyncio.get_running_loop().time()


def _client(server: Server, log: RequestLog) -> tuple[httpx.AsyncClient, Client]:
    transport = httpx.ASGITransport(app=server.app)
    http = httpx.AsyncClient(transport=transport, base_url="http://paceline")
    return http, Client(http, log, _clock, "paceline")


def _request(text: str, arm: Any = "online") -> PromptRequest:
    return PromptRequest(text, "sql", arm, "stream", 0, store=False)


def test_arms_differ_in_the_draft_only() -> None:
    async def main() -> tuple[Server, RequestLog]:
        server, log = Server(), RequestLog()
        http, client = _client(server, log)
        async with http:
            for arm in ("online", "frozen", "plain"):
                await client.send(_request("q", arm))
        return server, log

    server, log = asyncio.run(main())
    drafts = [body.pop("speculative")["draft"] for body in server.bodies]
    assert drafts == ["auto", "general@0", "off"]
    assert server.bodies[0] == server.bodies[1] == server.bodies[2]
    assert server.bodies[0]["temperature"] == 0
    assert [s.accepted for s in log.results] == [20, 2, 0]
    assert {(s.prompt, s.answer) for s in log.results} == {("q", "answer to q")}
    assert log.failures == []


def test_every_kind_of_failure_is_logged_and_none_raised() -> None:
    async def main() -> RequestLog:
        server, log = Server(), RequestLog()
        http, client = _client(server, log)
        async with http:
            assert await client.send(_request("fail")) is None
            assert await client.send(_request("abort")) is None
        async with httpx.AsyncClient(base_url="http://127.0.0.1:9", trust_env=False) as http:
            deaf = Client(http, log, _clock, "paceline")
            assert await deaf.send(_request("q")) is None
        return log

    log = asyncio.run(main())
    reasons = [failure.reason for failure in log.failures]
    assert log.results == []
    assert "HTTP 503" in reasons[0]
    assert "'abort'" in reasons[1]
    assert reasons[2].startswith("ConnectError")


def test_closed_loop_sends_all_with_its_concurrency() -> None:
    async def main() -> tuple[Server, RequestLog, int]:
        server, log = Server(), RequestLog()
        http, client = _client(server, log)
        async with http:
            tokens, seconds = await closed_loop(client, [_request("q")] * 25, 3, _clock)
        assert seconds > 0
        return server, log, tokens

    server, log, tokens = asyncio.run(main())
    assert len(server.bodies) == len(log.results) == 25
    assert server.most_running == 3
    assert tokens == 25 * 30


def test_stream_is_a_poisson_process_that_does_not_wait() -> None:
    now = 0.0
    asked: list[tuple[float, PromptRequest]] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)

    async def send(request: PromptRequest) -> None:
        asked.append((now, request))

    texts = {topic: iter([f"{topic} {i}" for i in range(5_000)]) for topic in ("math", "sql")}
    stream = PoissonArrivals(send, texts, random.Random(0), lambda: now, 3, sleep)
    asyncio.run(stream.run(("math", "sql"), rate=4.0, until=500.0))
    originals = [q for _, q in asked if q.arm == "online"]
    twins = [q for _, q in asked if q.arm == "frozen"]
    assert len(asked) == pytest.approx(2_000, rel=0.1)
    assert len(twins) == pytest.approx(len(originals) / 3, rel=0.02)
    assert stream.order == len(originals) == len({q.text for q in originals})
    assert {q.text for q in twins} <= {q.text for q in originals}
    assert all(q.store for q in originals)
    assert not any(q.store for q in twins)
    assert Counter(q.topic for q in originals)["sql"] == pytest.approx(len(originals) / 2, rel=0.1)


def test_the_whole_schedule() -> None:
    switches: list[str] = []
    topics = ("math", "code", "sql", "shell")

    async def main() -> tuple[RequestLog, Any]:
        server, log = Server(), RequestLog()
        http, client = _client(server, log)
        began = _clock()

        async def pause() -> None:
            switches.append("pause")

        async def resume() -> None:
            switches.append("resume")

        # On a slow machine too, all are timed and every topic comes twice.
        settings = DemoSettings(
            seconds=1.0,
            timed=4,
            timed_share=100.0,
            reserve_s=0.0,
            shortest_stream_s=2.0,
            max_rate=60.0,
        )
        prompts = {topic: split(topic, 0, measured=6) for topic in topics}
        async with http:
            result = await run_schedule(
                settings, client, prompts, lambda: _clock() - began, LiveState(), pause, resume
            )
        return log, result

    log, result = asyncio.run(main())
    assert switches == ["pause", "resume", "pause"]
    assert [name for name, _ in result.phases] == ["math + code", "shift: sql + shell", "mix"]
    assert log.failures == []
    assert log.answer_changes() == (4 * 4, 0)
    for topic in topics:
        assert len(log.first(topic, 2)) == 2
        for part, counts in (("timed", [4, 4, 4]), ("last", [6, 6, 0])):
            assert [sum(1 for _ in log.select(topic, arm, part)) for arm in ARMS] == counts
    assert result.speed.tokens == dict.fromkeys(ARMS, 4 * 4 * 30)
    assert result.end == sum(1 for _ in log.select(arm="online", part="stream")) > 0
