"""How tests wait for what comes by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ray


def wait_until(check: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Return once ``check`` is true; fail, naming ``what``, where it is not in time."""
    deadline = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def eventually(check: Callable[[], Any], seconds: float = 180.0) -> Any:
    """The first true answer; an actor that is down for the moment is asked again."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if answer := check():
                return answer
        except (ray.exceptions.RayError, TimeoutError):
            pass
        assert time.monotonic() < deadline, "it did not come in time"
        time.sleep(0.1)
