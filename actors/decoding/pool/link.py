"""The target side of one connection to an expert."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping

from paceline.actors.decoding.pool.channel import Channel, ChannelError
from paceline.actors.decoding.pool.server import Lease
from paceline.actors.decoding.pool.wire import (
    Challenge,
    Hello,
    Message,
    Welcome,
    WireError,
    decode,
    encode,
    sign,
)


class ExpertLink:
    """A connection that has been let in. Nothing here blocks, except :func:`connect`."""

    def __init__(self, channel: Channel, epoch: int, weight_versions: Mapping[str, int]) -> None:
        """Take over the channel; see Welcome for the rest."""
        self._channel = channel
        self.epoch = epoch
        self.weight_versions = dict(weight_versions)

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._channel.fileno()

    @property
    def sending(self) -> bool:
        """True where :meth:`flush` has something to do."""
        return self._channel.sending

    def send(self, message: Message) -> None:
        """Send, or keep what the kernel does not take yet.

        Raises:
            ChannelError: the connection is gone.
        """
        self._channel.put(encode(message))

    def flush(self) -> None:
        """Send what was kept.

        Raises:
            ChannelError: the connection is gone.
        """
        self._channel.flush()

    def receive(self) -> list[Message]:
        """What has come.

        Raises:
            ChannelError: the connection is gone.
            WireError: for a frame that cannot be read.
        """
        return [decode(payload) for payload in self._channel.take()]

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self._channel.close()


def connect(lease: Lease, timeout_s: float) -> ExpertLink:
    """Connect by a lease: by the unix socket where it is on this node, else by tcp. Blocks.

    Raises:
        OSError: nobody listens, or does not answer within ``timeout_s``.
        WireError: the server speaks otherwise, or does not know the lease.
    """
    deadline = time.monotonic() + timeout_s
    channel = Channel(_open(lease, timeout_s))
    try:
        challenge = _next(channel, deadline)
        if not isinstance(challenge, Challenge):
            raise WireError("a server begins with Challenge")
        channel.put(encode(Hello(lease.name, sign(lease.key, challenge.nonce))))
        welcome = _next(channel, deadline)
        if not isinstance(welcome, Welcome):
            raise WireError("a server answers Hello with Welcome")
    except BaseException:
        channel.close()
        raise
    return ExpertLink(channel, welcome.epoch, welcome.weight_versions)


def _open(lease: Lease, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        connection.connect(lease.unix)
        return connection
    except OSError:
        connection.close()
        if lease.host is None or lease.port is None:
            raise
    return socket.create_connection((lease.host, lease.port), timeout_s)


def _next(channel: Channel, deadline: float) -> Message:
    """The next message, of which there is only one at a time in a greeting."""
    while True:
        frames = channel.take()
        if frames:
            return decode(frames[0])
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([channel], [], [], left)[0]:
            raise ChannelError("no answer in time")
