"""Ending a session must not hang on what is dead; no Ray is started here."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from paceline.cluster import session
from paceline.cluster.session import MARK, orphans


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


@pytest.mark.parametrize("call_s", [0.0, 0.2, 60.0])
def test_ray_is_not_shut_down_beneath_a_call_into_it(
    monkeypatch: pytest.MonkeyPatch, call_s: float
) -> None:
    """It would end the process with an exit code of its own."""
    done, release, killed = list[str](), threading.Event(), list[bool]()
    monkeypatch.setattr(session, "GRACE_S", 2.0)
    monkeypatch.setattr(session, "_started", {2**22 + 1: 0.0})  # never runs
    monkeypatch.setattr(session, "_kill_all", lambda *, beyond_ray: killed.append(beyond_ray))
    monkeypatch.setattr(ray, "is_initialized", lambda: "shut down" not in done)
    monkeypatch.setattr(ray, "shutdown", lambda: done.append("shut down"))

    def call() -> None:
        release.wait(call_s)
        done.append("called")

    try:
        if call_s == 0.2:
            session.in_background(call)
        else:
            session.run_bounded(call, 0.1)
        began = time.monotonic()
        session.stop_ray()
        assert time.monotonic() - began < 10
        assert done == ([] if call_s == 60.0 else ["called", "shut down"])
        assert killed == [call_s == 60.0]  # beyond Ray, or only what outlived it
    finally:
        release.set()


def test_only_orphaned_processes_are_found_and_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(MARK, raising=False)
    assert orphans() == {}
    forks = "import subprocess, sys; print(subprocess.Popen(['sleep', '60'], stdout=-3).pid)"
    foreign = int(subprocess.check_output([sys.executable, "-c", forks]))
    monkeypatch.setenv(MARK, "mark")
    child = subprocess.Popen(["sleep", "60"])  # the user's own: not of the session
    lost = int(subprocess.check_output([sys.executable, "-c", forks]))
    try:
        assert set(orphans()) == {lost}
        monkeypatch.setattr(session, "_started", {})
        monkeypatch.setattr(session, "_core", set())
        session._kill_all(beyond_ray=False)
        assert not psutil.pid_exists(lost) or psutil.Process(lost).status() == "zombie"
        assert MARK not in os.environ
        assert child.poll() is None
        assert psutil.pid_exists(foreign)
    finally:
        child.kill()
        child.wait()
        os.kill(foreign, signal.SIGKILL)


def test_a_session_has_a_token_of_its_own_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    session._own_token()
    own = os.environ["RAY_AUTH_TOKEN"]
    assert len(own) == 64
    monkeypatch.setenv("RAY_AUTH_TOKEN", "chosen")
    session._own_token()
    assert os.environ["RAY_AUTH_TOKEN"] == "chosen"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    session._own_token()
    assert "RAY_AUTH_TOKEN" not in os.environ
