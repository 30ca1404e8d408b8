"""The one place where tests choose a port."""

from __future__ import annotations

import socket


def find_port() -> int:
    """A free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
