"""Connections of an expert's server: authentication, limits, what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
from pools import make_drafter
from waiting import wait_until

from paceline.actors.speculation.pool.connection import (
    Connection,
    ConnectionLostError,
    ListeningSockets,
    connect,
)
from paceline.actors.speculation.pool.messages import VERSION, Authenticate, Ping, Pong, encode
from paceline.actors.speculation.pool.server import MAX_UNAUTHENTICATED, ExpertServer


@contextlib.contextmanager
def serving(handshake_timeout_s: float) -> Iterator[ExpertServer]:
    server = ExpertServer(make_drafter(), num_threads=1, handshake_timeout_s=handshake_timeout_s)
    try:
        yield server
    finally:
        server.close()


def unauthenticated(server: ExpertServer) -> Connection:
    """A connection that sends nothing by itself."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(server.open_session("unused").unix)
    return Connection(sock)


def ended(connection: Connection) -> bool:
    try:
        connection.receive()
    except ConnectionLostError:
        return True
    return False


def lives(connection: Connection) -> bool:
    connection.send(Ping(1))
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.select(10.0)
    return any(isinstance(message, Pong) for message in connection.receive())


def test_a_connection_without_a_session_ends_in_time_and_one_with_a_session_does_not() -> None:
    with serving(0.2) as server:
        connection, _ = connect(server.open_session("mine"), 10.0)
        silent = [unauthenticated(server) for _ in range(3)]
        wait_until(lambda: all(map(ended, silent)), "the end of handshakes")
        wait_until(lambda: len([*server._clients]) == 1, "the end of handshakes")
        assert server.is_connected("mine")
        assert lives(connection)
        connection.close()


@pytest.mark.parametrize(
    "frame",
    [
        encode(Ping(1)),
        encode(Authenticate("mine", bytes(32))),
        encode(Authenticate("another", b"")),
        msgpack.packb([VERSION, 1, "mine", "no bytes"]),
        msgpack.packb([VERSION, 1, {}, b""]),
        b"",
    ],
)
def test_a_connection_with_other_credentials_ends_and_the_server_lives(frame: bytes) -> None:
    with serving(600.0) as server:
        valid, _ = connect(server.open_session("mine"), 10.0)
        connection = unauthenticated(server)
        connection.send_frame(frame)
        wait_until(lambda: ended(connection), "the end of the connection")
        assert lives(valid)
        valid.close()


def test_unauthenticated_connections_are_few_and_keep_no_client_out() -> None:
    with serving(600.0) as server:
        first, _ = connect(server.open_session("first"), 10.0)
        silent = [unauthenticated(server) for _ in range(MAX_UNAUTHENTICATED + 3)]
        wait_until(lambda: all(map(ended, silent[:3])), "the oldest ones' end")
        assert server.ping(10.0)
        assert len([*server._clients]) == MAX_UNAUTHENTICATED + 1
        second, _ = connect(server.open_session("second"), 10.0)
        assert lives(first)
        assert lives(second)
        assert not ended(silent[-1])


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """No descriptor can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_listening_pauses() -> None:
    with selectors.DefaultSelector() as selector:
        listeners = ListeningSockets(selector, None)
        client = socket.socket(socket.AF_UNIX)
        client.connect(listeners.unix_address)
        ((key, _),) = selector.select(10.0)
        listener = key.fileobj
        assert isinstance(listener, socket.socket)
        with no_descriptors():
            assert listeners.accept(listener, now=100.0) is None
        assert selector.select(0) == []  # although a connection waits
        assert listeners.paused_until is not None
        listeners.resume(100.0)
        assert selector.select(0) == []
        listeners.resume(listeners.paused_until)
        assert listeners.paused_until is None
        assert len(selector.select(10.0)) == 1
        accepted = listeners.accept(listener, now=101.0)
        assert accepted is not None
        assert listeners.accept(listener, now=101.0) is None  # no other; no pause
        assert listeners.paused_until is None
        accepted.close()
        client.close()
        listeners.close()


def test_a_server_without_descriptors_neither_spins_nor_ends() -> None:
    with serving(600.0) as server:
        connection, _ = connect(server.open_session("mine"), 10.0)
        waiting = socket.socket(socket.AF_UNIX)
        session = server.open_session("other")
        with no_descriptors():
            waiting.connect(session.unix)
            wait_until(lambda: server._listeners.paused_until is not None, "the pause")
            server.ping(10.0)
            connection.send(Ping(1))
        assert lives(connection)
        accepted = Connection(waiting)
        wait_until(lambda: bool(accepted.receive()), "the challenge")
        assert len([*server._clients]) == 2
        accepted.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_close_leaves_no_descriptor() -> None:
    before = descriptors()
    server = ExpertServer(make_drafter(), num_threads=1, host="127.0.0.1")
    connection, _ = connect(server.open_session("mine"), 10.0)
    server.close()
    connection.close()
    assert descriptors() == before
    server.close()
    server.close_session("mine")  # a session may end later
    assert not server.ping(0.01)
    with pytest.raises(ConnectionRefusedError):
        connect(server.open_session("late"), 1.0)
