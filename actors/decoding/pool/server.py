"""The socket side of an expert: one thread that reads questions, drafts, and answers."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.actors.decoding.pool.channel import (
    MAX_FRAME,
    MAX_GREETING,
    Channel,
    ChannelError,
)
from paceline.actors.decoding.pool.drafter import SharedDrafter
from paceline.actors.decoding.pool.wire import (
    Ask,
    Challenge,
    Hello,
    Message,
    Ping,
    Pong,
    Release,
    Welcome,
    WireError,
    decode,
    encode,
    sign,
)

logger = logging.getLogger(__name__)

_NONCE_BYTES = 16
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Lease:
    """What a client needs to connect; travels through Serve, never over the socket.

    ``unix`` is the name of a socket on the expert's node; ``host`` and ``port`` are None where
    the expert does not listen on tcp. ``key`` signs the server's challenge.
    """

    name: str
    key: bytes = field(repr=False)
    unix: bytes
    host: str | None
    port: int | None


@dataclass(slots=True)
class _Client:
    number: int
    channel: Channel
    nonce: bytes
    lease: str | None = None
    asks: list[Ask] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)


class ExpertServer:
    """Serves a drafter to all clients that hold a lease; its thread alone touches the drafter.

    What several targets ask at the same time is drafted in one batch. Between questions the
    thread drafts ahead where that pays.
    """

    def __init__(self, drafter: SharedDrafter, *, num_threads: int, host: str | None = None):
        """Listen and start the thread.

        Args:
            drafter: used by the thread alone from now on.
            num_threads: torch threads of the forwards.
            host: interface on which to listen on tcp too; None: the node's clients only.
        """
        self._drafter = drafter
        self._num_threads = num_threads
        self._selector = selectors.DefaultSelector()
        unix = _unix_listener()
        self._name: bytes = unix.getsockname()
        self._listeners = [unix]
        self._tcp = None if host is None else socket.create_server((host, 0))
        if self._tcp is not None:
            self._listeners.append(self._tcp)
        for listener in self._listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)
        self._woken, self._waker = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: dict[int, _Client] = {}
        self._numbers = itertools.count()
        self._leases: dict[str, bytes] = {}
        self._lock = threading.Lock()  # guards the leases
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="paceline-expert", daemon=True)
        self._thread.start()

    def lease(self, name: str) -> Lease:
        """Admit connections that sign with the returned key, until :meth:`dismiss`."""
        key = secrets.token_bytes(_KEY_BYTES)
        with self._lock:
            self._leases[name] = key
        host, port = (None, None) if self._tcp is None else self._tcp.getsockname()[:2]
        return Lease(name, key, self._name, host, port)

    def dismiss(self, name: str) -> None:
        """End a lease: its connections are closed and what they held is freed."""
        with self._lock:
            self._leases.pop(name, None)
        self._command(lambda: self._close_where(name))

    def connected(self, name: str) -> bool:
        """Whether a lease has a connection now."""
        return any(client.lease == name for client in list(self._clients.values()))

    def swap(self, weight_version: int, state: Mapping[str, Tensor]) -> None:
        """Queue new weights of the expert; those that do not fit are logged and left."""

        def take() -> None:
            try:
                self._drafter.swap(weight_version, state)
            except ValueError:
                logger.exception("version %d was not taken", weight_version)

        self._command(take)

    def ping(self, timeout_s: float) -> bool:
        """Whether the thread gets round to a command within so many seconds."""
        done = threading.Event()
        self._command(done.set)
        return self._thread.is_alive() and done.wait(timeout_s)

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Clients, sequences, versions and how drafting ahead went; exact between two rounds."""
        return {
            "clients": len(self._clients),
            "sequences": self._drafter.num_sequences,
            "failures": self._drafter.failures,
            "ahead_hits": self._drafter.ahead.hits,
            "ahead_misses": self._drafter.ahead.misses,
            "drafts": self._drafter.weight_versions,
        }

    def close(self) -> None:
        """End the thread and all connections; a second call does nothing."""
        self._closed = True
        self._command(lambda: None)
        self._thread.join(timeout=10)

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        self._waker.send(b"x")

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._closed:
                ready = self._selector.select(0 if self._drafter.may_draft_ahead else None)
                if ready:
                    self._serve(ready)
                else:
                    self._drafter.draft_ahead()
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            for listener in self._listeners:
                listener.close()
            self._selector.close()

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read all that has come, then answer it in one batch."""
        for key, events in ready:
            if isinstance(key.data, _Client):
                self._handle(key.data, events)
            elif key.fileobj is self._woken:
                self._run_commands()
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        self._answer()

    def _run_commands(self) -> None:
        self._woken.recv(4096)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        client = _Client(
            next(self._numbers), Channel(connection, MAX_GREETING), os.urandom(_NONCE_BYTES)
        )
        self._clients[client.number] = client
        self._selector.register(client.channel, selectors.EVENT_READ, client)
        self._send(client, Challenge(client.nonce))

    def _handle(self, client: _Client, events: int) -> None:
        if client.number not in self._clients:  # dropped since the selector looked
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.channel.flush()
                self._watch(client)
            for payload in client.channel.take():
                self._receive(client, decode(payload))
        except (ChannelError, WireError) as error:
            logger.info("a client of the expert is gone: %s", error)
            self._drop(client)

    def _receive(self, client: _Client, message: Message) -> None:
        if client.lease is None:
            self._greet(client, message)
        elif isinstance(message, Ask):
            client.asks.append(message)
        elif isinstance(message, Ping):
            self._give_up(client)
            client.pings.append(message)
        elif isinstance(message, Release):
            self._give_up(client)
            self._drafter.release(client.number, message.request_ids)
        else:
            raise WireError(f"a client does not send {type(message).__name__}")

    def _greet(self, client: _Client, message: Message) -> None:
        """Let in who holds a lease.

        Raises:
            WireError: for anybody else.
        """
        if not isinstance(message, Hello):
            raise WireError("a connection begins with Hello")
        with self._lock:
            key = self._leases.get(message.lease)
        if key is None or not secrets.compare_digest(sign(key, client.nonce), message.signature):
            raise WireError("no such lease")
        client.lease = message.lease
        client.channel.max_frame = MAX_FRAME
        self._send(client, Welcome(self._drafter.epoch, self._drafter.weight_versions))

    def _answer(self) -> None:
        """Draft for the latest question of every client; the older ones came too late."""
        asking = []
        for client in list(self._clients.values()):
            for ping in client.pings:
                self._send(
                    client, Pong(ping.number, self._drafter.epoch, self._drafter.weight_versions)
                )
            client.pings.clear()
            if client.asks and client.number in self._clients:
                latest = client.asks.pop()
                self._give_up(client)
                asking.append((client, latest))
        if asking:
            answers = self._drafter.answer([(client.number, ask) for client, ask in asking])
            for (client, _), answer in zip(asking, answers, strict=True):
                self._send(client, answer)

    def _give_up(self, client: _Client) -> None:
        """Whoever says something further no longer waits for what was asked before."""
        for ask in client.asks:
            self._drafter.absorb(client.number, ask)
        client.asks.clear()

    def _send(self, client: _Client, message: Message) -> None:
        try:
            client.channel.put(encode(message))
            self._watch(client)
        except ChannelError:
            self._drop(client)

    def _watch(self, client: _Client) -> None:
        """Wake up for writing only while something is left to write."""
        writing = selectors.EVENT_WRITE if client.channel.sending else 0
        self._selector.modify(client.channel, selectors.EVENT_READ | writing, client)

    def _close_where(self, lease: str) -> None:
        for client in [c for c in self._clients.values() if c.lease == lease]:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.channel)
        client.channel.close()
        self._drafter.forget(client.number)


def _unix_listener() -> socket.socket:
    """In Linux's abstract namespace: no file that a killed process would leave behind."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0paceline-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener
