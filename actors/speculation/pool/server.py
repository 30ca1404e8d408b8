"""A drafter's server: one thread that receives requests, drafts, and responds."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.actors.speculation.pool.connection import (
    MAX_FRAME_BYTES,
    MAX_UNAUTHENTICATED_FRAME_BYTES,
    Connection,
    ConnectionLostError,
    ListeningSockets,
)
from paceline.actors.speculation.pool.drafter import Drafter
from paceline.actors.speculation.pool.messages import (
    Authenticate,
    Challenge,
    DraftRequest,
    Message,
    Ping,
    Pong,
    ProtocolError,
    Release,
    Session,
    Welcome,
    sign,
)

logger = logging.getLogger(__name__)

MAX_UNAUTHENTICATED = 64
_NONCE_BYTES = 16
_KEY_BYTES = 32
_HANDSHAKE_TIMEOUT_S = 5.0


class CommandQueue:
    """Commands for the server's thread; the descriptor is readable while there are any."""

    def __init__(self) -> None:
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a closed descriptor's number may be another's

    def fileno(self) -> int:
        """Return the descriptor, for selectors; -1 once closed."""
        return self._event

    def put(self, command: Callable[[], None]) -> None:
        """Queue a command; after :meth:`close` it never runs. Never blocks."""
        self._commands.put(command)
        with self._lock:
            if self._event >= 0:
                os.eventfd_write(self._event, 1)

    def run(self) -> None:
        """Run all queued commands."""
        os.eventfd_read(self._event)
        while not self._commands.empty():  # nothing else takes from it
            self._commands.get()()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        with self._lock:
            if self._event >= 0:
                os.close(self._event)
                self._event = -1


@dataclass(slots=True)
class ClientConnection:
    """A connection; ``session`` is None until it has authenticated.

    Attributes:
        number: names it to the drafter.
        connection: the socket.
        nonce: of its challenge.
        deadline: of its handshake, monotonic seconds.
        session: name of its session.
        request: the latest, if not yet answered.
    """

    number: int
    connection: Connection
    nonce: bytes
    deadline: float
    session: str | None = None
    request: DraftRequest | None = None


class ClientConnections:
    """All connections of a server; of unauthenticated ones a few, for a short time.

    One more than :data:`MAX_UNAUTHENTICATED` replaces the oldest: a client that has a session
    authenticates within milliseconds.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        handshake_timeout_s: float,
        on_close: Callable[[int], None],
    ) -> None:
        """Start without connections.

        Args:
            selector: connections are registered with their ClientConnection as data.
            handshake_timeout_s: the longest time without authentication.
            on_close: called with the number of each client that is gone.
        """
        self._selector = selector
        self._handshake_timeout_s = handshake_timeout_s
        self._on_close = on_close
        self._connections: dict[int, ClientConnection] = {}  # the oldest first
        self._numbers = itertools.count()

    def __contains__(self, client: ClientConnection) -> bool:
        return client.number in self._connections

    def __iter__(self) -> Iterator[ClientConnection]:
        """Iterate over a snapshot, the oldest first; from any thread."""
        return iter(list(self._connections.values()))

    @property
    def next_deadline(self) -> float | None:
        """The earliest handshake's deadline; None if all have authenticated."""
        return next((client.deadline for client in self if client.session is None), None)

    def add(self, sock: socket.socket, now: float) -> None:
        """Take over a new connection and challenge it; ``now`` in monotonic seconds."""
        unauthenticated = [client for client in self if client.session is None]
        if len(unauthenticated) >= MAX_UNAUTHENTICATED:
            self.drop(unauthenticated[0])
        client = ClientConnection(
            next(self._numbers),
            Connection(sock, MAX_UNAUTHENTICATED_FRAME_BYTES),
            os.urandom(_NONCE_BYTES),
            now + self._handshake_timeout_s,
        )
        self._connections[client.number] = client
        self._selector.register(client.connection, selectors.EVENT_READ, client)
        self.send(client, Challenge(client.nonce))

    def expire(self, now: float) -> None:
        """Drop connections whose handshake has timed out."""
        for client in self:
            if client.session is None and now >= client.deadline:
                self.drop(client)

    def end_session(self, session: str) -> None:
        """Drop the connections of a session."""
        for client in self:
            if client.session == session:
                self.drop(client)

    def send(self, client: ClientConnection, message: Message) -> None:
        """Send to a client; one that is gone, or does not read, is dropped."""
        try:
            client.connection.send(message)
            self.watch(client)
        except ConnectionLostError:
            self.drop(client)

    def watch(self, client: ClientConnection) -> None:
        """Select for writing only while something is left to write."""
        writing = selectors.EVENT_WRITE if client.connection.has_unsent else 0
        self._selector.modify(client.connection, selectors.EVENT_READ | writing, client)

    def drop(self, client: ClientConnection) -> None:
        """Close a connection; a second call does nothing."""
        if self._connections.pop(client.number, None) is None:
            return
        self._selector.unregister(client.connection)
        client.connection.close()
        self._on_close(client.number)


class ExpertServer:
    """Serves a drafter to all clients with a session; its thread alone uses the drafter.

    Requests that arrive at the same time are drafted in one batch. Between requests the thread
    drafts ahead and prefills.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        num_threads: int,
        host: str | None = None,
        handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S,
    ):
        """Listen and start the thread.

        Args:
            drafter: used by the thread alone from now on.
            num_threads: torch threads of the forwards.
            host: interface for tcp; None listens for clients on this node only.
            handshake_timeout_s: the longest time of a connection without authentication.
        """
        self._drafter = drafter
        self._num_threads = num_threads
        self._selector = selectors.DefaultSelector()
        self._listeners = ListeningSockets(self._selector, host)
        self._clients = ClientConnections(
            self._selector, handshake_timeout_s, drafter.release_client
        )
        self._commands = CommandQueue()
        self._selector.register(self._commands, selectors.EVENT_READ)
        self._session_keys: dict[str, bytes] = {}
        self._closed = False
        self.busy_s = 0.0  # spent on requests; also read by other threads
        self._thread = threading.Thread(target=self._run, name="paceline-expert", daemon=True)
        self._thread.start()

    def open_session(self, name: str) -> Session:
        """Admit connections that sign with the session's key, until :meth:`close_session`."""
        key = self._session_keys[name] = secrets.token_bytes(_KEY_BYTES)
        return Session(name, key, self._listeners.unix_address, *self._listeners.tcp_address)

    def close_session(self, name: str) -> None:
        """Close a session's connections and release its sequences."""
        self._session_keys.pop(name, None)
        self._commands.put(lambda: self._clients.end_session(name))

    def is_connected(self, session: str) -> bool:
        """Return whether a session has a connection now."""
        return any(client.session == session for client in self._clients)

    def load_weights(
        self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None
    ) -> None:
        """Queue weights for a slot; None empties a candidate's. A failure to load is logged.

        A candidate has failed then, see :meth:`failed_candidate`. Stable weights that were loaded
        in part are loaded again later, and draft nothing until then.
        """
        self._commands.put(lambda: self._load(slot, weight_version, state))

    def failed_candidate(self) -> int | None:
        """Return the weight_version of the latest failed candidate, if any."""
        return self._drafter.slots.failed_candidate

    def ping(self, timeout_s: float) -> bool:
        """Return whether the thread runs a command within so many seconds."""
        done = threading.Event()
        self._commands.put(done.set)
        return self._thread.is_alive() and done.wait(timeout_s)

    def close(self) -> None:
        """End the thread and all connections; a second call does nothing."""
        self._closed = True
        self._commands.put(lambda: None)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self._commands.close()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        try:
            while not self._closed:
                ready = self._selector.select(
                    0 if self._drafter.has_idle_work else self._select_timeout_s()
                )
                if ready:
                    self._serve(ready)
                else:
                    self._drafter.run_idle_work()
                self._clients.expire(time.monotonic())
                self._listeners.resume(time.monotonic())
                self._retry_load()
        finally:
            for client in self._clients:
                self._clients.drop(client)
            self._listeners.close()
            self._selector.close()

    def _select_timeout_s(self) -> float | None:
        """Seconds until the next deadline that no descriptor signals; None if there is none."""
        retry_s = self._drafter.slots.partial_loads.next_retry_s
        deadlines = (self._clients.next_deadline, self._listeners.paused_until, retry_s)
        next_deadline = min((at for at in deadlines if at is not None), default=None)
        return None if next_deadline is None else max(0.0, next_deadline - time.monotonic())

    def _load(self, slot: str, weight_version: int, state: Mapping[str, Tensor] | None) -> None:
        """Load new weights; a failure does not end the thread.

        Otherwise the replica would restart, load the same weights, and end again.
        """
        try:
            self._drafter.load_weights(slot, weight_version, state)
        except Exception:
            logger.exception("%s: version %d was not loaded", slot, weight_version)

    def _retry_load(self) -> None:
        """Load weights again that were loaded in part, once it is time."""
        retry = self._drafter.slots.partial_loads.next_retry(time.monotonic())
        if retry is not None:
            self._load(retry.slot, retry.weight_version, retry.state)

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read everything that has arrived, then respond in one batch."""
        for key, events in ready:
            if isinstance(key.data, ClientConnection):
                self._read(key.data, events)
            elif key.fileobj is self._commands:
                self._commands.run()
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        self._respond()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        sock = self._listeners.accept(listener, now)
        if sock is not None:
            self._clients.add(sock, now)

    def _read(self, client: ClientConnection, events: int) -> None:
        if client not in self._clients:  # dropped since the selector returned
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.connection.flush()
                self._clients.watch(client)
            for message in client.connection.receive():
                if client in self._clients:  # not dropped by a failed send
                    self._handle(client, message)
        except (ConnectionLostError, ProtocolError) as error:
            logger.info("dropped a client: %s", error)
            self._clients.drop(client)

    def _handle(self, client: ClientConnection, message: Message) -> None:
        """Handle a message; it supersedes the client's earlier request.

        Raises:
            ProtocolError: a client does not send this, or not now.
        """
        if client.session is None:
            self._authenticate(client, message)
            return
        if client.request is not None:
            self._drafter.skip(client.number, client.request)
            client.request = None
        if isinstance(message, DraftRequest):
            client.request = message
        elif isinstance(message, Ping):
            slots = self._drafter.slots
            pong = Pong(message.number, self._drafter.epoch, slots.versions)
            self._clients.send(client, pong)
        elif isinstance(message, Release):
            self._drafter.release(client.number, message.request_ids)
        else:
            raise ProtocolError(f"a client does not send {type(message).__name__}")

    def _authenticate(self, client: ClientConnection, message: Message) -> None:
        """Admit a client of a session.

        Raises:
            ProtocolError: the credentials are missing or wrong.
        """
        if not isinstance(message, Authenticate):
            raise ProtocolError("a connection starts with Authenticate")
        key = self._session_keys.get(message.session)
        if key is None or not secrets.compare_digest(sign(key, client.nonce), message.signature):
            raise ProtocolError("no such session")
        client.session = message.session
        client.connection.max_frame_bytes = MAX_FRAME_BYTES
        drafter = self._drafter
        welcome = Welcome(drafter.epoch, drafter.slots.versions, drafter.hidden_size)
        self._clients.send(client, welcome)

    def _respond(self) -> None:
        """Draft for all pending requests in one batch."""
        clients, requests = [], []
        for client in self._clients:
            if client.request is not None:
                clients.append(client)
                requests.append((client.number, client.request))
                client.request = None
        if not clients:
            return
        started = time.monotonic()
        for client, response in zip(clients, self._drafter.propose(requests), strict=True):
            self._clients.send(client, response)
        self.busy_s += time.monotonic() - started
