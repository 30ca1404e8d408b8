"""The port of the HTTP API: every ingress replica listens on it in its own process.

Serve's HTTP proxy would pass each event of an answer through one more process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.deploy.errors import StartError

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_UCRED = struct.Struct("3i")  # of a unix socket's peer: pid, user, group
_RETRY_S = 1.0  # without a descriptor to be had
_KEEP_ALIVE_S = 75  # of an idle connection
_LAST_REQUESTS_S = 0.3  # that connections without a request have when the listener closes


class Port:
    """A port that this process keeps open for ingress replicas on this machine.

    All get the same listening socket. While none is there, as after a crash, connections wait.

    Args:
        host: address of this machine.
        port: to listen on; 0 takes a free one.

    Attributes:
        number: of the port.
        name: by which :func:`listening_socket` finds it.

    Raises:
        StartError: the port is taken.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = _bound(host, port, shared=False)
        self.number: int = self._socket.getsockname()[1]
        self.name = f"paceline-{secrets.token_hex(8)}"
        self._takers = socket.socket(socket.AF_UNIX)
        self._takers.bind(f"\0{self.name}")
        self._takers.listen()
        self._closed = threading.Event()
        threading.Thread(target=self._give, name="paceline-port", daemon=True).start()

    def close(self) -> None:
        """Close the port for all."""
        self._closed.set()
        self._takers.shutdown(socket.SHUT_RDWR)  # ends the thread's accept
        self._takers.close()
        self._socket.close()

    def _give(self) -> None:
        """Give the socket to processes of this user."""
        while True:
            try:
                taker, _ = self._takers.accept()
            except OSError as error:
                if self._closed.wait(_RETRY_S):
                    return
                logger.warning("a process that asks for the port must wait (%s)", error)
                continue
            with taker, suppress(OSError):
                peer = taker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
                if _UCRED.unpack(peer)[1] == os.getuid():
                    socket.send_fds(taker, [b"."], [self._socket.fileno()])


def listening_socket(source: str | tuple[str, int]) -> socket.socket:
    """The socket that an ingress replica accepts connections from.

    Args:
        source: name of a :class:`Port` on this machine, or host and port, which other replicas
            that were told the same may share: the kernel spreads connections over them.

    Raises:
        StartError: the port is taken by a program that does not share it, or there is no such Port.
    """
    if not isinstance(source, str):
        return _bound(*source, shared=True)
    with socket.socket(socket.AF_UNIX) as giver:
        try:
            giver.connect(f"\0{source}")
            _, (descriptor,), _, _ = socket.recv_fds(giver, 1, 1)
        except (OSError, ValueError) as error:
            raise StartError("the process that keeps the port open does not answer") from error
    return socket.socket(fileno=descriptor)


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """A listening socket.

    Raises:
        StartError: the address is taken, or none of this machine.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
    try:
        found.bind((host, port))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        raise StartError(f"cannot listen on {host}:{port} ({error.strerror or error})") from error
    return found


class Listener:
    """Serves an application, in the event loop that runs when it is made.

    Args:
        app: the application.
        listening: the socket to accept connections from, see :func:`listening_socket`; it is
            closed in the end.
    """

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
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
            log_level="critical",  # the application logs what it answers; see _answer
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
        except Exception as error:
            if not (complete or isinstance(error, ClientDisconnect)):
                logger.exception("a response broke off")
            raise
        finally:
            if watcher is not None:
                watcher.cancel()


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield
