"""Where an expert listens: a unix socket for its own node, tcp for others."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket

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
