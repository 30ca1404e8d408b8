"""The port of the HTTP API: who may share it, how it closes, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.deploy.api.listener import Listener, reserve
from paceline.deploy.errors import StartError

HOST = "127.0.0.1"


def answering(text: bytes) -> ASGIApp:
    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})

    return app


@asynccontextmanager
async def listening(app: ASGIApp, port: int = 0) -> AsyncIterator[Listener]:
    listener = Listener(app, HOST, port)
    try:
        yield listener
    finally:
        await listener.close()


def url(listener: Listener) -> str:
    return f"http://{HOST}:{listener.port}/"


def test_a_port_of_another_program_is_refused_in_one_line() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        for take in (lambda: reserve(HOST, port), lambda: Listener(answering(b""), HOST, port)):
            with pytest.raises(StartError, match=f"^cannot listen on {HOST}:{port} .*in use"):
                take()


def test_a_reserved_port_is_for_listeners_alone() -> None:
    async def answers(port: int) -> list[bytes]:
        found = []
        for text in (b"first", b"its successor"):
            async with listening(answering(text), port) as listener, httpx.AsyncClient() as http:
                found.append((await http.get(url(listener))).content)
        return found

    with reserve(HOST, 0) as held:
        port = held.getsockname()[1]
        for _ in range(2):  # also right after connections to it
            with pytest.raises(StartError):
                reserve(HOST, port)
            with pytest.raises(OSError, match="in use"), socket.create_server((HOST, port)):
                pass
            assert asyncio.run(answers(port)) == [b"first", b"its successor"]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port))
    reserve(HOST, port).close()


def test_two_listeners_share_a_port_and_one_that_closes_loses_no_request() -> None:
    async def run() -> set[bytes]:
        found = set()
        async with listening(answering(b"a")) as first, listening(answering(b"b"), first.port):
            for _ in range(60):
                async with httpx.AsyncClient() as http:
                    found.add((await http.get(url(first))).content)
            async with httpx.AsyncClient() as http:
                closing = asyncio.create_task(first.close())
                for _ in range(60):
                    await http.get(url(first))
                await closing
                assert not first.alive
                assert (await http.get(url(first))).content == b"b"
        return found

    assert asyncio.run(run()) == {b"a", b"b"}


def test_an_open_stream_is_finished_when_the_listener_closes() -> None:
    go_on = asyncio.Event()

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"begun, ", "more_body": True})
        await go_on.wait()
        await send({"type": "http.response.body", "body": b"ended"})

    async def run() -> bytes:
        listener = Listener(app, HOST, 0)
        async with httpx.AsyncClient() as http, http.stream("GET", url(listener)) as answer:
            parts = answer.aiter_bytes()
            begun = await anext(parts)
            closing = asyncio.create_task(listener.close())
            await asyncio.sleep(0.5)
            assert listener.alive
            go_on.set()
            whole = b"".join([begun, *[part async for part in parts]])
            await closing
        assert not listener.alive
        return whole

    assert asyncio.run(run()) == b"begun, ended"


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_whose_client_leaves_is_cancelled(streams: bool) -> None:
    async def run() -> None:
        began, cancelled = asyncio.Event(), asyncio.Event()

        async def app(_: Scope, receive: Receive, send: Send) -> None:
            while (await receive()).get("more_body"):
                pass
            if streams:
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            began.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise

        async with listening(app) as listener:
            _, writer = await asyncio.open_connection(HOST, listener.port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
            await began.wait()
            writer.close()
            async with asyncio.timeout(5):
                await cancelled.wait()
            async with httpx.AsyncClient() as http:  # it still listens
                asking = asyncio.create_task(http.get(url(listener)))
                began.clear()
                await began.wait()
                asking.cancel()

    asyncio.run(run())
