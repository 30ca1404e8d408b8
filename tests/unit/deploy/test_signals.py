"""The first signal ends what runs, the next ones wait."""

import os
import signal
from collections.abc import Iterator

import pytest

from paceline.deploy.signals import interrupt_once, on_signals, signals_ignored


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_interrupt_the_clean_up(first: signal.Signals) -> None:
    on_signals(interrupt_once)
    cleaned = []

    def work() -> None:
        try:
            os.kill(os.getpid(), first)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]


def test_undisturbed_gives_the_handlers_back() -> None:
    on_signals(interrupt_once)
    with signals_ignored():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is interrupt_once
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
