"""Who an expert's server lets in, for how long, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pools import make_drafter
from waiting import wait_until

from paceline.actors.speculation.pool.connection import (
    Channel,
    ChannelError,
    ExpertLink,
    Listeners,
    connect,
)
from paceline.actors.speculation.pool.messages import Ping, Pong
from paceline.actors.speculation.pool.server import MOST_STRANGERS, ExpertServer


@contextlib.contextmanager
def server_of(greeting_s: float) -> Iterator[ExpertServer]:
    server = ExpertServer(make_drafter(), num_threads=1, greeting_s=greeting_s)
    try:
        yield server
    finally:
        server.close()


def stranger(server: ExpertServer) -> Channel:
    """A connection that says nothing."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(server.lease("unused").unix)
    return Channel(sock)


def ended(channel: Channel) -> bool:
    try:
        channel.take()
    except ChannelError:
        return True
    return False


def lives(link: ExpertLink) -> bool:
    link.send(Ping(1))
    with selectors.DefaultSelector() as selector:
        selector.register(link, selectors.EVENT_READ)
        selector.select(10.0)
    return any(isinstance(message, Pong) for message in link.receive())


def test_a_connection_without_a_lease_ends_in_time_and_one_with_a_lease_does_not() -> None:
    with server_of(0.2) as server:
        link = connect(server.lease("mine"), 10.0)
        silent = [stranger(server) for _ in range(3)]
        wait_until(lambda: all(ended(channel) for channel in silent), "the strangers' end")
        wait_until(lambda: server.stats()["clients"] == 1, "the strangers' end")
        assert server.connected("mine")
        assert lives(link)
        link.close()


def test_strangers_are_few_and_keep_nobody_out() -> None:
    with server_of(600.0) as server:
        first = connect(server.lease("first"), 10.0)
        silent = [stranger(server) for _ in range(MOST_STRANGERS + 3)]
        wait_until(lambda: all(ended(channel) for channel in silent[:3]), "the oldest ones' end")
        assert server.ping(10.0)
        assert server.stats()["clients"] == MOST_STRANGERS + 1
        second = connect(server.lease("second"), 10.0)
        assert lives(first)
        assert lives(second)
        assert not ended(silent[-1])


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened or accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_descriptors_the_selector_rests_and_listens_again_later() -> None:
    with selectors.DefaultSelector() as selector:
        listeners = Listeners(selector, None)
        client = socket.socket(socket.AF_UNIX)
        client.connect(listeners.name)
        ((key, _),) = selector.select(10.0)
        listener = key.fileobj
        assert isinstance(listener, socket.socket)
        with no_descriptors():
            assert listeners.accept(listener, now=100.0) is None
        assert selector.select(0) == []  # although somebody waits
        assert listeners.paused_until is not None
        listeners.resume(100.0)
        assert selector.select(0) == []
        listeners.resume(listeners.paused_until)
        assert listeners.paused_until is None
        assert len(selector.select(10.0)) == 1
        accepted = listeners.accept(listener, now=101.0)
        assert accepted is not None
        assert listeners.accept(listener, now=101.0) is None  # nobody else; no pause
        assert listeners.paused_until is None
        accepted.close()
        client.close()
        listeners.close()


def test_a_server_without_descriptors_neither_spins_nor_ends() -> None:
    with server_of(600.0) as server:
        link = connect(server.lease("mine"), 10.0)
        waiting = socket.socket(socket.AF_UNIX)
        lease = server.lease("other")
        with no_descriptors():
            waiting.connect(lease.unix)
            wait_until(lambda: server._listeners.paused_until is not None, "the pause")
            server.ping(10.0)
            link.send(Ping(1))
        assert lives(link)
        channel = Channel(waiting)
        wait_until(lambda: bool(channel.take()), "the challenge of who waited")
        assert server.stats()["clients"] == 2
        channel.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_stays_open_after_the_end() -> None:
    before = descriptors()
    server = ExpertServer(make_drafter(), num_threads=1, host="127.0.0.1")
    link = connect(server.lease("mine"), 10.0)
    server.close()
    link.close()
    assert descriptors() == before
    server.close()
    server.dismiss("mine")  # a lease may end later
    assert not server.ping(0.01)
    with pytest.raises(ConnectionRefusedError):
        connect(server.lease("late"), 1.0)
