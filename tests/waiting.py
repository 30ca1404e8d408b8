"""The one way in which tests wait for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(check: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Return once ``check`` is true; fail, naming ``what``, where it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)
