"""Ending a session must not hang on what is dead; no Ray is started here."""

import threading
import time

import pytest

from paceline.cluster import session


def test_a_call_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    began = time.monotonic()
    assert not session.run_bounded(lambda: release.wait(60) and None, 0.2)
    assert time.monotonic() - began < 10
    release.set()


def test_a_call_that_ends_or_fails_is_waited_for() -> None:
    done = []
    assert session.run_bounded(lambda: done.append(1), 30)
    assert done == [1]

    def fail() -> None:
        raise ConnectionError("gone")

    assert session.run_bounded(fail, 30)


def test_nothing_is_waited_for_once_the_session_s_core_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert session.is_whole()
    monkeypatch.setattr(session, "_core", {2**22 + 1})  # beyond the kernel's pids: never runs
    assert not session.is_whole()
    release = threading.Event()
    began = time.monotonic()
    assert not session.run_bounded(lambda: release.wait(60) and None, 30)
    assert time.monotonic() - began < 10
    release.set()
