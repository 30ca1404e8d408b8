"""SIGINT and SIGTERM: the first stops the program, others do not disturb the clean-up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def on_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Set the handler of both signals."""
    for number in _NUMBERS:
        signal.signal(number, handler)


def interrupt_once(_number: int, _frame: FrameType | None) -> NoReturn:
    """Signal handler: raise KeyboardInterrupt and ignore further signals.

    Raises:
        KeyboardInterrupt: always.
    """
    on_signals(signal.SIG_IGN)
    raise KeyboardInterrupt


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers after a block that may set others, as Ray does."""
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
def signals_ignored() -> Iterator[None]:
    """Ignore both signals in a block: an interrupted clean-up leaves processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
