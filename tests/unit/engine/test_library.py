"""Building the C++ kernels once per machine; a stand-in for the compiler copies the library."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from waiting import wait_until

from paceline.actors.engine.native import library


class Compiler:
    """A ``c++`` on PATH that appends a line to ``calls`` and then runs a script."""

    def __init__(self, folder: Path, built: str) -> None:
        self.calls, self.script = folder / "calls", folder / "c++"
        self.works = f'cp {built} "$output"'

    def does(self, script: str) -> None:
        head = f"#!/bin/sh\nfor output; do :; done\necho $$ >> {self.calls}\n"
        self.script.write_text(head + script)
        self.script.chmod(0o755)

    @property
    def count(self) -> int:
        return len(self.calls.read_text().splitlines())


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    built = library.load_library()
    if built is None:
        pytest.skip("no compiler made the kernels")
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PACELINE_OPS_DIR", str(tmp_path / "ops"))
    return Compiler(tmp_path / "bin", built._name)


def load() -> ctypes.CDLL | None:
    """As in a process that has not loaded the kernels."""
    return library.load_library.__wrapped__()


def has_ended(pid: str) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_of_processes_that_start_together_one_compiles(compiler: Compiler) -> None:
    compiler.does(f"sleep 0.5; {compiler.works}")
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(lambda _: load(), range(3)))
    assert compiler.count == 1


def test_a_compiler_that_takes_too_long_ends_with_its_children(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_TIMEOUT_S", 2.0)
    compiler.does(f"sleep 100 & echo $! >> {compiler.calls}; wait")
    assert load() is None
    pids = compiler.calls.read_text().split()
    wait_until(lambda: all(map(has_ended, pids)), "the compiler's end", 10.0)


def test_starts_that_wait_for_a_compiler_that_hangs_end_with_it(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_TIMEOUT_S", 2.0)
    compiler.does("exec sleep 100")
    began = time.monotonic()
    with ThreadPoolExecutor(4) as threads:
        assert not any(threads.map(lambda _: load(), range(4)))
    assert time.monotonic() - began < 6.0  # one after the other takes eight


def test_a_broken_library_is_built_again(compiler: Compiler) -> None:
    compiler.does(': > "$output"')
    assert load() is None
    compiler.does(compiler.works)
    assert load() is not None
    assert load() is not None
    assert compiler.count == 2


def test_a_folder_that_cannot_be_written_is_passed_over(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PACELINE_OPS_DIR")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "var").write_text("no folder")
    compiler.does(compiler.works)
    found = load()
    assert found is not None
    assert Path(found._name).parent == tmp_path / "cache" / "paceline"
