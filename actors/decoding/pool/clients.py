"""The connections of an expert's server, those of strangers among them."""

from __future__ import annotations

import itertools
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.actors.decoding.pool.channel import MAX_GREETING, Channel, ChannelError
from paceline.actors.decoding.pool.wire import Ask, Challenge, Message, Ping, encode

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
