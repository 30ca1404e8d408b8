"""Sockets of the pool: unix within a node, tcp between nodes."""

from __future__ import annotations

import logging
import secrets
import select
import selectors
import socket
import struct
import time

from paceline.actors.speculation.pool.messages import (
    Authenticate,
    Challenge,
    Message,
    ProtocolError,
    Session,
    Welcome,
    decode,
    encode,
    sign,
)

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 26
MAX_UNAUTHENTICATED_FRAME_BYTES = 1 << 10
_MAX_UNSENT_BYTES = 1 << 27
_READ_BYTES = 1 << 18
_LENGTH = struct.Struct("<I")
_PAUSE_S = 0.2
# A peer whose machine is gone closes nothing: probe it, and give up within seconds.
_TCP_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),  # seconds
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds
)


class ConnectionLostError(ConnectionError):
    """The peer is gone, does not read, or sends more than is allowed."""


class Connection:
    """Length-prefixed frames over a socket; neither reading nor writing ever blocks.

    Bytes that the kernel does not take at once are kept, up to a limit, so a stalled peer costs
    its sender nothing but this memory.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        """Take over a connected socket.

        Args:
            sock: unix or tcp; closed by :meth:`close`. A tcp peer whose machine is gone is
                noticed after about 20 seconds.
            max_frame_bytes: limit for received frames; may be changed later.
        """
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            for option in _TCP_OPTIONS:
                sock.setsockopt(*option)
        self._socket = sock
        self.max_frame_bytes = max_frame_bytes
        self._unread = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait for :meth:`flush`."""
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            ConnectionLostError: the peer is gone, or has read nothing for too long.
        """
        self.send_frame(encode(message))

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            ConnectionLostError: see :meth:`receive_frames`.
            ProtocolError: a frame cannot be decoded.
        """
        return [decode(payload) for payload in self.receive_frames()]

    def send_frame(self, payload: bytes) -> None:
        """Send a frame; see :meth:`send`."""
        self._unsent += _LENGTH.pack(len(payload)) + payload
        self.flush()
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ConnectionLostError("the peer does not read")

    def flush(self) -> None:
        """Send what is kept, as far as the kernel takes it.

        Raises:
            ConnectionLostError: the peer is gone.
        """
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLostError(str(error)) from error

    def receive_frames(self) -> list[bytes]:
        """Return the whole frames that have arrived.

        Raises:
            ConnectionLostError: the peer is gone and no whole frame is left, or a frame exceeds
                the limit.
        """
        ended = self._fill()
        frames, start = [], 0
        while len(self._unread) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, start)
            if length > self.max_frame_bytes:
                raise ConnectionLostError(f"a frame of {length} bytes")
            end = start + _LENGTH.size + length
            if end > len(self._unread):
                break
            frames.append(bytes(self._unread[start + _LENGTH.size : end]))
            start = end
        del self._unread[:start]
        if ended and not frames:
            raise ConnectionLostError("the peer closed the connection")
        return frames

    def _fill(self) -> bool:
        """Read what has arrived; True at the end of the stream."""
        while len(self._unread) < _LENGTH.size + self.max_frame_bytes:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not data:
                return True
            self._unread += data
            if len(data) < _READ_BYTES:
                return False
        return False

    def close(self) -> None:
        """Close the socket; a second call does nothing."""
        self._socket.close()


def connect(session: Session, timeout_s: float) -> tuple[Connection, Welcome]:
    """Connect and authenticate: by the unix socket if it is on this node, else by tcp. Blocks.

    Raises:
        OSError: no server listens, or none answers within ``timeout_s``.
        ProtocolError: the server does not speak the protocol.
    """
    deadline = time.monotonic() + timeout_s
    connection = Connection(_open(session, timeout_s))
    try:
        challenge = _next_message(connection, deadline)
        if not isinstance(challenge, Challenge):
            raise ProtocolError("the server's first message is not a Challenge")
        connection.send(Authenticate(session.name, sign(session.key, challenge.nonce)))
        welcome = _next_message(connection, deadline)
        if not isinstance(welcome, Welcome):
            raise ProtocolError("the server's second message is not a Welcome")
    except BaseException:
        connection.close()
        raise
    return connection, welcome


def _open(session: Session, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout_s)
        sock.connect(session.unix)
        return sock
    except OSError:
        sock.close()
        if session.host is None or session.port is None:
            raise
    return socket.create_connection((session.host, session.port), timeout_s)


def _next_message(connection: Connection, deadline: float) -> Message:
    """Wait for the next message; the handshake has one at a time."""
    while True:
        messages = connection.receive()
        if messages:
            return messages[0]
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([connection], [], [], left)[0]:
            raise ConnectionLostError("no answer in time")


class ListeningSockets:
    """A drafter's listening sockets, in its selector.

    When the process runs out of descriptors they are unregistered for a moment: a connection that
    cannot be accepted stays readable, and would keep the selector from ever waiting.

    Attributes:
        unix_address: in Linux's abstract namespace, so a killed process leaves no file.
        tcp_address: host and port; None if it does not listen on tcp.
        paused_until: monotonic seconds; None while listening.
    """

    def __init__(self, selector: selectors.BaseSelector, host: str | None) -> None:
        """Listen.

        Args:
            selector: the sockets are registered without data.
            host: interface for tcp; None listens for clients on this node only.
        """
        self._selector = selector
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(b"\0paceline-" + secrets.token_hex(16).encode())
        unix.listen()
        self.unix_address: bytes = unix.getsockname()
        self._sockets = [unix]
        self.tcp_address: tuple[str | None, int | None] = None, None
        if host is not None:
            tcp = socket.create_server((host, 0))
            self.tcp_address = tcp.getsockname()[:2]
            self._sockets.append(tcp)
        self.paused_until: float | None = None
        for listener in self._sockets:
            listener.setblocking(False)
        self._register()

    def accept(self, listener: socket.socket, now: float) -> socket.socket | None:
        """Accept a connection; None if there is none, or no descriptor for it.

        Args:
            listener: one of these sockets.
            now: monotonic seconds.
        """
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        except OSError as error:
            logger.warning("cannot accept connections for a moment: %s", error)
            self._pause(now)
            return None

    def resume(self, now: float) -> None:
        """Listen again if a pause is over."""
        if self.paused_until is not None and now >= self.paused_until:
            self.paused_until = None
            self._register()

    def close(self) -> None:
        """Close the sockets; a second call does nothing."""
        for listener in self._sockets:
            listener.close()

    def _register(self) -> None:
        for listener in self._sockets:
            self._selector.register(listener, selectors.EVENT_READ)

    def _pause(self, now: float) -> None:
        if self.paused_until is None:
            for listener in self._sockets:
                self._selector.unregister(listener)
            self.paused_until = now + _PAUSE_S
