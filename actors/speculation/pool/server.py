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
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.actors.speculation.pool.connection import (
    MAX_GREETING,
    Channel,
    ChannelError,
    Listeners,
)
from paceline.actors.speculation.pool.drafter import SharedDrafter
from paceline.actors.speculation.pool.messages import (
    MAX_FRAME,
    Ask,
    Challenge,
    Hello,
    Lease,
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


class Commands:
    """Commands in the order in which they came; the descriptor is readable while there are any."""

    def __init__(self) -> None:
        """Open a pair of sockets, until :meth:`close`."""
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # a descriptor must not be closed while it is written to

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._woken.fileno()

    def put(self, command: Callable[[], None]) -> None:
        """Have a command run; after :meth:`close` nobody runs it. Never blocks."""
        self._commands.put(command)
        with self._lock:
            if self._waker.fileno() < 0:
                return
            try:
                self._waker.send(b"x")
            except BlockingIOError:
                return  # so many are waiting that the thread will wake up anyway

    def run(self) -> None:
        """Run all commands that wait."""
        self._woken.recv(4096)
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def close(self) -> None:
        """Close both sockets; a second call does nothing."""
        with self._lock:
            self._woken.close()
            self._waker.close()


MOST_STRANGERS = 64
_NONCE_BYTES = 16


@dataclass(slots=True)
class Client:
    """One connection; a stranger until it has shown a ``lease``, by ``until`` at the latest."""

    number: int
    channel: Channel
    nonce: bytes
    until: float
    lease: str | None = None
    asks: list[Ask] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)


class Clients:
    """All connections, by number; strangers are few, and do not stay.

    One more than :data:`MOST_STRANGERS` takes the place of the one that has waited longest: who
    holds a lease shows it within milliseconds.
    """

    def __init__(
        self, selector: selectors.BaseSelector, greeting_s: float, gone: Callable[[int], None]
    ) -> None:
        """Begin without any.

        Args:
            selector: gets the connections, with their Client as data.
            greeting_s: how long one may stay without a lease.
            gone: told the number of each that ends.
        """
        self._selector = selector
        self._greeting_s = greeting_s
        self._gone = gone
        self._clients: dict[int, Client] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, client: Client) -> bool:
        return client.number in self._clients

    def __iter__(self) -> Iterator[Client]:
        """Those of now, the oldest first; may be dropped meanwhile, and asked by any thread."""
        return iter(list(self._clients.values()))

    @property
    def next_deadline(self) -> float | None:
        """When the next stranger's time is over; None without strangers."""
        return next((client.until for client in self if client.lease is None), None)

    def add(self, connection: socket.socket, now: float) -> None:
        """Challenge a new connection.

        Args:
            connection: taken over.
            now: monotonic seconds.
        """
        strangers = [client for client in self if client.lease is None]
        if len(strangers) >= MOST_STRANGERS:
            self.drop(strangers[0])
        client = Client(
            next(self._numbers),
            Channel(connection, MAX_GREETING),
            os.urandom(_NONCE_BYTES),
            now + self._greeting_s,
        )
        self._clients[client.number] = client
        self._selector.register(client.channel, selectors.EVENT_READ, client)
        self.send(client, Challenge(client.nonce))

    def expire(self, now: float) -> None:
        """Drop the strangers whose time is over."""
        for client in self:
            if client.lease is None and now >= client.until:
                self.drop(client)

    def end(self, lease: str) -> None:
        """Drop those of a lease."""
        for client in self:
            if client.lease == lease:
                self.drop(client)

    def send(self, client: Client, message: Message) -> None:
        """Send to a client; one that is gone, or does not read, is dropped."""
        try:
            client.channel.put(encode(message))
            self.watch(client)
        except ChannelError:
            self.drop(client)

    def watch(self, client: Client) -> None:
        """Wake up for writing only while something is left to write."""
        writing = selectors.EVENT_WRITE if client.channel.sending else 0
        self._selector.modify(client.channel, selectors.EVENT_READ | writing, client)

    def drop(self, client: Client) -> None:
        """Close a connection; a second call does nothing."""
        if self._clients.pop(client.number, None) is None:
            return
        self._selector.unregister(client.channel)
        client.channel.close()
        self._gone(client.number)


logger = logging.getLogger(__name__)

_KEY_BYTES = 32
_GREETING_S = 5.0


class ExpertServer:
    """Serves a drafter to all clients that hold a lease; its thread alone touches the drafter.

    What several targets ask at the same time is drafted in one batch. Between questions the
    thread drafts ahead where that pays.
    """

    def __init__(
        self,
        drafter: SharedDrafter,
        *,
        num_threads: int,
        host: str | None = None,
        greeting_s: float = _GREETING_S,
    ):
        """Listen and start the thread.

        Args:
            drafter: used by the thread alone from now on.
            num_threads: torch threads of the forwards.
            host: interface on which to listen on tcp too; None: the node's clients only.
            greeting_s: how long a connection may stay without showing a lease.
        """
        self._drafter = drafter
        self._num_threads = num_threads
        self._selector = selectors.DefaultSelector()
        self._listeners = Listeners(self._selector, host)
        self._clients = Clients(self._selector, greeting_s, drafter.forget)
        self._commands = Commands()
        self._selector.register(self._commands, selectors.EVENT_READ)
        self._leases: dict[str, bytes] = {}
        self._lock = threading.Lock()  # guards the leases
        self._closed = False
        self.busy_s = 0.0  # spent on questions; also read by other threads
        self._thread = threading.Thread(target=self._run, name="paceline-expert", daemon=True)
        self._thread.start()

    def lease(self, name: str) -> Lease:
        """Admit connections that sign with the returned key, until :meth:`dismiss`."""
        key = secrets.token_bytes(_KEY_BYTES)
        with self._lock:
            self._leases[name] = key
        return Lease(name, key, self._listeners.name, *self._listeners.address)

    def dismiss(self, name: str) -> None:
        """End a lease: its connections are closed and what they held is freed."""
        with self._lock:
            self._leases.pop(name, None)
        self._commands.put(lambda: self._clients.end(name))

    def connected(self, name: str) -> bool:
        """Whether a lease has a connection now."""
        return any(client.lease == name for client in self._clients)

    def swap(
        self, weight_version: int, state: Mapping[str, Tensor] | None, slot: str | None = None
    ) -> None:
        """Queue new weights; those that cannot be loaded are logged and left.

        A candidate has failed then, see :meth:`failed_candidate`. Stable weights of which a part
        was loaded are loaded again later, and nobody drafts with them until then.

        Args:
            weight_version: theirs.
            state: None empties a candidate's slot.
            slot: of the expert; None is the stable one.
        """
        self._commands.put(lambda: self._take(weight_version, state, slot))

    def failed_candidate(self) -> int | None:
        """The weight_version of the last candidate that was given up, if any."""
        return self._drafter.slots.failed_candidate

    def ping(self, timeout_s: float) -> bool:
        """Whether the thread gets round to a command within so many seconds."""
        done = threading.Event()
        self._commands.put(done.set)
        return self._thread.is_alive() and done.wait(timeout_s)

    def stats(self) -> dict[str, int | dict[str, int]]:
        """Clients, sequences, versions and how drafting ahead went; exact between two rounds."""
        return {
            "clients": len(self._clients),
            "sequences": self._drafter.num_sequences,
            "failures": self._drafter.failures,
            "ahead_hits": self._drafter.ahead.hits,
            "ahead_misses": self._drafter.ahead.misses,
            "drafts": self._drafter.slots.versions,
        }

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
                ready = self._selector.select(0 if self._drafter.has_work else self._patience())
                if ready:
                    self._serve(ready)
                else:
                    self._drafter.work()
                self._clients.expire(time.monotonic())
                self._listeners.resume(time.monotonic())
                self._mend()
        finally:
            for client in self._clients:
                self._clients.drop(client)
            self._listeners.close()
            self._selector.close()

    def _take(
        self, weight_version: int, state: Mapping[str, Tensor] | None, slot: str | None
    ) -> None:
        """Take new weights; nothing that comes of it ends the thread.

        Else the replica would come back, load the same ones, and end again.
        """
        try:
            self._drafter.swap(weight_version, state, slot)
        except Exception:
            logger.exception("version %d was not taken", weight_version)

    def _mend(self) -> None:
        """Load weights again that were loaded in part, where it is time."""
        retry = self._drafter.slots.partial_loads.next_retry(time.monotonic())
        if retry is not None:
            self._take(retry.weight_version, retry.state, retry.slot)

    def _patience(self) -> float | None:
        """Seconds until something is due that no socket tells of; None where nothing is."""
        retry_s = self._drafter.slots.partial_loads.next_retry_s
        due = [self._clients.next_deadline, self._listeners.paused_until, retry_s]
        known = [at for at in due if at is not None]
        return max(0.0, min(known) - time.monotonic()) if known else None

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        """Read all that has come, then answer it in one batch."""
        for key, events in ready:
            if isinstance(key.data, Client):
                self._handle(key.data, events)
            elif key.fileobj is self._commands:
                self._commands.run()
            else:
                self._accept(key.fileobj)  # type: ignore[arg-type]
        self._answer()

    def _accept(self, listener: socket.socket) -> None:
        now = time.monotonic()
        connection = self._listeners.accept(listener, now)
        if connection is not None:
            self._clients.add(connection, now)

    def _handle(self, client: Client, events: int) -> None:
        if client not in self._clients:  # dropped since the selector looked
            return
        try:
            if events & selectors.EVENT_WRITE:
                client.channel.flush()
                self._clients.watch(client)
            for payload in client.channel.take():
                self._receive(client, decode(payload))
        except (ChannelError, WireError) as error:
            logger.info("a client of the expert is gone: %s", error)
            self._clients.drop(client)

    def _receive(self, client: Client, message: Message) -> None:
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

    def _greet(self, client: Client, message: Message) -> None:
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
        self._clients.send(client, Welcome(self._drafter.epoch, self._drafter.slots.versions))

    def _answer(self) -> None:
        """Draft for the latest question of every client; the older ones came too late."""
        asking = []
        for client in self._clients:
            for ping in client.pings:
                self._clients.send(
                    client, Pong(ping.number, self._drafter.epoch, self._drafter.slots.versions)
                )
            client.pings.clear()
            if client.asks and client in self._clients:
                latest = client.asks.pop()
                self._give_up(client)
                asking.append((client, latest))
        if asking:
            began = time.monotonic()
            answers = self._drafter.answer([(client.number, ask) for client, ask in asking])
            for (client, _), answer in zip(asking, answers, strict=True):
                self._clients.send(client, answer)
            self.busy_s += time.monotonic() - began

    def _give_up(self, client: Client) -> None:
        """Whoever says something further no longer waits for what was asked before."""
        for ask in client.asks:
            self._drafter.absorb(client.number, ask)
        client.asks.clear()
