"""The thread of a trainer, a scorer or a generator: it outlives what it calls."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from paceline.actors.training import background
from paceline.actors.training.background import BackgroundLoop


def test_a_preparation_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_RETRY_S", 0.01)
    tries: list[int] = []
    called = threading.Event()

    def prepare() -> Callable[[], bool]:
        tries.append(len(tries))
        if len(tries) < 3:
            raise MemoryError("no room for the models")
        return call

    def call() -> bool:
        called.set()
        return False

    loop = BackgroundLoop("test", prepare, 0.01, low_priority=False)
    loop.start()
    assert called.wait(10)
    loop.stop(10)
    assert not loop.alive
    assert (len(tries), loop.failures) == (3, 2)
    assert loop.last_error == "MemoryError: no room for the models"
