"""Rules for all tiers: what a test may start, and that nothing which it started outlives it."""

from __future__ import annotations

import gc
import os
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

# Ray reads these when it is imported: before any test module is.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# No cached model, and none can be fetched: tests name the models that they serve.
os.environ.setdefault("PACELINE_CACHE_DIR", os.devnull)
# Threads that wait for a core which another process holds are many times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

_MARK = "PACELINE_TEST_RUN"
# A worker of a run that is shared out is a process of that run, not one of its own.
_WORKER = "PYTEST_XDIST_WORKER" in os.environ
_RUN = os.environ[_MARK] if _WORKER else uuid.uuid4().hex
_TESTS = Path(__file__).parent
_WITHOUT_RAY = (_TESTS / "unit", _TESTS / "property")
_GRACE_S = 20.0
# An example's time says how busy the machine is; pytest-timeout ends what hangs.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")
# Its scripts import each other as siblings, and so do tests of them.
sys.path.append(str(_TESTS.parent / "benchmarks"))


@pytest.fixture(autouse=True)
def _no_ray_in_pure_tiers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tests/unit and tests/property ``ray.init`` raises, called or implied."""
    if any(tier in request.path.parents for tier in _WITHOUT_RAY):
        import ray

        def refuse(*_args: object, **_options: object) -> None:
            raise RuntimeError("unit and property tests must not start Ray")

        monkeypatch.setattr(ray, "init", refuse)


def pytest_sessionstart() -> None:
    """Mark every process that this run starts, however far down: the environment is inherited."""
    os.environ[_MARK] = _RUN


def pytest_collection_finish() -> None:
    """Collections of garbage skip what is loaded: a whole one would take half a second."""
    gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a process that it started is still there."""
    if _WORKER:  # whoever shares the work out looks after it, when the workers have ended
        return
    deadline = time.monotonic() + _GRACE_S
    while left := _left_behind():
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        for process in left:
            if reporter is not None:
                reporter.write_line(f"left behind: {process}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _left_behind() -> list[str]:
    """Processes of this run, without the run itself, as ``pid command line``."""
    found = []
    for process in psutil.process_iter(["pid", "status"]):
        if process.pid == os.getpid() or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        try:
            if process.environ().get(_MARK) == _RUN:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        except (psutil.Error, OSError):
            continue
    return found
