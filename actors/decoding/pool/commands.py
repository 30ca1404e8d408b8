"""What other threads ask of a thread that waits in a selector."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable


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
