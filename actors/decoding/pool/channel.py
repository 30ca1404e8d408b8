"""Frames over a stream socket: four bytes of length, then the payload."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<I")
_READ = 1 << 18
MAX_FRAME = 1 << 26
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
