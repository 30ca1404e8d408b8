"""The port of the HTTP API: who may share it, how it closes, and clients that leave."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.deploy.api.listener import Listener, Port, listening_socket
from paceline.deploy.errors import StartError

HOST = "127.0.0.1"


def answering(text: bytes) -> ASGIApp:
    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})

    return app


class Listening:
    """A listener on a port that another may share."""

    def __init__(self, app: ASGIApp, source: str | tuple[str, int] = (HOST, 0)) -> None:
        accepting = listening_socket(source)
        self.port: int = accepting.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/"
        self.listener = Listener(app, accepting)

    async def __aenter__(self) -> Listening:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()


async def ask(url: str) -> bytes:
    async with httpx.AsyncClient() as http:
        return (await http.get(url)).content


def kept(port: int) -> Port:
    return Port(HOST, port)


def shared(port: int) -> socket.socket:
    return listening_socket((HOST, port))


@pytest.mark.parametrize("take", [kept, shared])
def test_a_port_of_another_program_is_refused_in_one_line(take: Callable[[int], Any]) -> None:
    with (
        socket.create_server((HOST, 0)) as other,
        pytest.raises(StartError, match=f"^cannot listen on {HOST}:[0-9]+ .*in use"),
    ):
        take(other.getsockname()[1])


def test_a_port_is_given_once_there_is_a_descriptor_again(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, iter([OSError(errno.EMFILE, "Too many open files")])

    def scarce(own: socket.socket) -> Any:
        for error in failures:
            raise error
        return accept(own)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    monkeypatch.setattr("paceline.deploy.api.listener._RETRY_S", 0.01)
    port = kept(0)
    with listening_socket(port.name) as given:
        assert given.getsockname()[1] == port.number
    assert next(failures, None) is None
    port.close()


def test_connections_to_a_kept_port_wait_for_the_next_listener() -> None:
    async def run(port: Port) -> list[bytes]:
        url, found = f"http://{HOST}:{port.number}/", []
        for text in (b"first", b"its successor"):
            waiting = asyncio.create_task(ask(url))
            await asyncio.sleep(0.1)
            async with Listening(answering(text), port.name):
                found.append(await waiting)
        return found

    port = kept(0)
    for take in (kept, shared):
        with pytest.raises(StartError):
            take(port.number)
    assert asyncio.run(run(port)) == [b"first", b"its successor"]
    port.close()
    with pytest.raises(StartError, match="does not answer"):
        listening_socket(port.name)
    kept(port.number).close()  # right after connections to it


def test_two_listeners_share_a_port_and_one_that_closes_loses_no_request() -> None:
    async def run() -> set[bytes]:
        found = set()
        async with (
            Listening(answering(b"a")) as first,
            Listening(answering(b"b"), (HOST, first.port)),
        ):
            for _ in range(60):
                found.add(await ask(first.url))
                if len(found) == 2:
                    break
            async with httpx.AsyncClient() as http:
                closing = asyncio.create_task(first.listener.close())
                for _ in range(60):
                    await http.get(first.url)
                await closing
                assert not first.listener.alive
                assert (await http.get(first.url)).content == b"b"
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
        served = Listening(app)
        listener = served.listener
        async with httpx.AsyncClient() as http, http.stream("GET", served.url) as answer:
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

        async with Listening(app) as served:
            _, writer = await asyncio.open_connection(HOST, served.port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi")
            await began.wait()
            writer.close()
            async with asyncio.timeout(5):
                await cancelled.wait()
            async with httpx.AsyncClient() as http:  # it still listens
                asking = asyncio.create_task(http.get(served.url))
                began.clear()
                await began.wait()
                asking.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("answered", [False, True])
def test_only_a_failure_that_cuts_an_answer_off_is_logged(
    answered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The application logs the others, and answers them."""

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"begun", "more_body": not answered})
        raise RuntimeError("a fault")

    async def run() -> None:
        async with Listening(app) as served:
            if answered:
                await ask(served.url)
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    await ask(served.url)

    asyncio.run(run())
    assert ("a fault" in caplog.text) is not answered
