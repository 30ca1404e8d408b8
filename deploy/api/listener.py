"""The port of the HTTP API: every ingress replica listens on it in its own process.

Serve's HTTP proxy would pass each event of an answer through one more process.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.deploy.errors import StartError

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # of an idle connection
_LAST_REQUESTS_S = 0.3  # that connections without a request have when the listener closes


def reserve(host: str, port: int) -> socket.socket:
    """Keep a port from other programs, for the ingress replicas of this user alone.

    Args:
        host: address of this machine.
        port: to reserve; 0 takes a free one.

    Returns:
        the socket that holds it until it is closed; it gets no connections.

    Raises:
        StartError: the port is taken.
    """
    with _bound(host, port, shared=False) as alone:
        alone.listen()  # fails if another listens, or has reserved it
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held = _bound(host, alone.getsockname()[1], shared=True)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return held


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """A socket bound to an address, which other ``shared`` ones may have too.

    Raises:
        StartError: the address is taken, or none of this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror or error})") from error
    return bound


class Listener:
    """Serves an application on a port that other listeners of this user share.

    The kernel spreads connections over them. Made in a running event loop, which runs the
    application; connections wait until it does.

    Args:
        app: the application.
        host: address to listen on.
        port: to listen on; 0 takes a free one.

    Attributes:
        port: that it listens on.

    Raises:
        StartError: the port is taken by a program that does not share it.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        listening = _bound(host, port, shared=True)
        listening.listen(_BACKLOG)
        self.port: int = listening.getsockname()[1]
        self._app = app
        self._closing = False
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            timeout_keep_alive=_KEEP_ALIVE_S,
            lifespan="off",
            ws="none",
            access_log=False,
            log_config=None,
            log_level="critical",  # the application logs its errors
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]))

    @property
    def alive(self) -> bool:
        """Whether it serves."""
        return not self._serving.done()

    async def close(self) -> None:
        """Accept no more connections, and wait for the requests of those that are open."""
        self._closing = True
        if self._server.started:
            for server in self._server.servers:
                server.close()
            await asyncio.sleep(_LAST_REQUESTS_S)
        self._server.should_exit = True
        await self._serving

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application for one request; cancel it if the client disconnects.

        Uvicorn only tells an application that asks. The application need not watch the connection
        itself: by ASGI 2.4 a stream whose client has gone fails or is cancelled.
        """
        task = asyncio.current_task()
        assert task is not None
        watcher: asyncio.Task[None] | None = None
        complete = gone = False

        async def watch() -> None:
            nonlocal gone
            await receive()  # returns when the client has gone or the response is complete
            if not complete:
                gone = True
                task.cancel()

        async def watched_receive() -> Message:
            nonlocal watcher
            if watcher is not None:  # the body has been read
                await asyncio.wait([watcher])
                return {"type": "http.disconnect"}
            message = await receive()
            if not message.get("more_body", False):
                watcher = asyncio.create_task(watch())
            return message

        async def watched_send(message: Message) -> None:
            nonlocal complete
            if message["type"] == "http.response.start" and self._closing:
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            complete = not message.get("more_body", message["type"] == "http.response.start")
            await send(message)

        scope["asgi"] = {**scope["asgi"], "spec_version": "2.4"}
        try:
            await self._app(scope, watched_receive, watched_send)
        except asyncio.CancelledError:
            if not gone or task.uncancel():
                raise
        finally:
            if watcher is not None:
                watcher.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield
