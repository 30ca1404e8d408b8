"""Ctrl-C and SIGTERM: the first one ends what runs, further ones wait until that is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def on_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Put a handler on both signals."""
    for number in _NUMBERS:
        signal.signal(number, handler)


def interrupt_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """Handler: KeyboardInterrupt, and no second one into the clean-up that follows.

    Raises:
        KeyboardInterrupt: always.
    """
    on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def kept() -> Iterator[None]:
    """What runs inside may put handlers in place, as Ray does: afterwards ours are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """No signal meanwhile: half a clean-up leaves processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
