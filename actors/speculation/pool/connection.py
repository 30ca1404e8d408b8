"""Where an expert listens: a unix socket for its own node, tcp for others."""

from __future__ import annotations

import logging
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Mapping

from paceline.actors.speculation.pool.messages import (
    MAX_FRAME,
    Challenge,
    Hello,
    Lease,
    Message,
    Welcome,
    WireError,
    decode,
    encode,
    sign,
)

_LENGTH = struct.Struct("<I")
_READ = 1 << 18
MAX_GREETING = 1 << 10
_MAX_UNSENT = 1 << 27
# A peer whose machine is gone says nothing more: probe it, and do not wait for it for minutes.
_TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds
)


class ChannelError(ConnectionError):
    """The other side is gone, or says what no frame can be."""


class Channel:
    """A socket that neither reading nor writing ever blocks.

    What the kernel does not take at once waits here, so that a peer that stands still costs its
    sender nothing but this memory, and only up to a limit.
    """

    def __init__(self, sock: socket.socket, max_frame: int = MAX_FRAME) -> None:
        """Take over a connected socket.

        Args:
            sock: unix or tcp; closed by :meth:`close`. A tcp peer whose machine is gone is
                noticed after about 20 seconds.
            max_frame: bytes that a received frame may have; the limit may be changed later.
        """
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            for option in _TCP_OPTIONS:
                sock.setsockopt(*option)
        self._socket = sock
        self.max_frame = max_frame
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    @property
    def sending(self) -> bool:
        """True where bytes wait for the kernel to take them."""
        return bool(self._unsent)

    def put(self, payload: bytes) -> None:
        """Send a frame.

        Raises:
            ChannelError: the connection is gone, or the peer has read nothing for too long.
        """
        self._unsent += _LENGTH.pack(len(payload)) + payload
        self.flush()
        if len(self._unsent) > _MAX_UNSENT:
            raise ChannelError("the peer does not read")

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it.

        Raises:
            ChannelError: the connection is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ChannelError(str(error)) from error

    def take(self) -> list[bytes]:
        """The whole frames that have arrived.

        Raises:
            ChannelError: the connection is gone and no whole frame is left, or a frame is
                larger than allowed.
        """
        ended = self._fill()
        frames, start = [], 0
        while len(self._unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            if length > self.max_frame:
                raise ChannelError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(self._unread):
                break
            frames.append(bytes(self._unread[start + _LENGTH.size : end]))
            start = end
        del self._unread[:start]
        if ended and not frames:
            raise ChannelError("the peer closed the connection")
        return frames

    def _fill(self) -> bool:
        """Read what is there; True where nothing more will come."""
        while len(self._unread) < _LENGTH.size + self.max_frame:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._unread += data
            if len(data) < _READ:
                return False
        return False

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()


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


logger = logging.getLogger(__name__)

_PAUSE_S = 0.2


class Listeners:
    """Listening sockets in a selector.

    Where the process has no descriptor left they are taken out of it for a moment: a connection
    that cannot be accepted stays readable, and would keep the selector from ever waiting.
    """

    def __init__(self, selector: selectors.BaseSelector, host: str | None) -> None:
        """Listen.

        Args:
            selector: gets the sockets, without data.
            host: interface on which to listen on tcp too; None: the node's clients only.
        """
        self._selector = selector
        unix = _unix_listener()
        self.name: bytes = unix.getsockname()
        self._sockets = [unix]
        self.address: tuple[str | None, int | None] = None, None
        if host is not None:
            tcp = socket.create_server((host, 0))
            self.address = tcp.getsockname()[:2]
            self._sockets.append(tcp)
        self.paused_until: float | None = None
        for listener in self._sockets:
            listener.setblocking(False)
        self._watch()

    def accept(self, listener: socket.socket, now: float) -> socket.socket | None:
        """The next connection; None where there is none, or no descriptor for it.

        Args:
            listener: one of these.
            now: monotonic seconds.
        """
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        except OSError as error:
            logger.warning("no connection can be accepted for a moment: %s", error)
            self._pause(now)
            return None

    def resume(self, now: float) -> None:
        """Listen again where the pause is over."""
        if self.paused_until is not None and now >= self.paused_until:
            self.paused_until = None
            self._watch()

    def close(self) -> None:
        """Close the sockets; a second call does nothing."""
        for listener in self._sockets:
            listener.close()

    def _watch(self) -> None:
        for listener in self._sockets:
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause(self, now: float) -> None:
        if self.paused_until is None:
            for listener in self._sockets:
                self._selector.unregister(listener)
            self.paused_until = now + _PAUSE_S


def _unix_listener() -> socket.socket:
    """In Linux's abstract namespace: no file that a killed process would leave behind."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0paceline-" + secrets.token_hex(16).encode())
    listener.listen()
    return listener
