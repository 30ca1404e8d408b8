"""Ranks as processes of a test's own: rank 0 drives them, the others get its calls over a pipe."""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from paceline.actors.training import worker_group as group
from paceline.actors.training.worker_group import Worker, WorkerGroup

TIMEOUT_S = 120.0
_TESTS = Path(__file__).parent


class ProcessWorker:
    """A further rank in a process that ends with this one's."""

    def __init__(self, spec: group.WorkerSpec) -> None:
        self.process, self._calls = _start()
        _send(self._calls, (__name__, "serve_calls", (spec,)))

    def call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            _send(self._calls, (method, arguments))
        except OSError:  # it is dead, which the group finds out
            return

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def worker_group_of(ranks: int) -> tuple[WorkerGroup, list[ProcessWorker]]:
    """A worker group, and the list of its workers as they are started."""
    started: list[ProcessWorker] = []

    def start_worker(spec: group.WorkerSpec) -> ProcessWorker:
        started.append(ProcessWorker(spec))
        return started[-1]

    return WorkerGroup(ranks, start_worker, "127.0.0.1", TIMEOUT_S, "cpu"), started


def as_rank_0(work: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function of a test module in a process of its own; what it returns.

    The process of the tests has a group already, which other tests stand on.
    """
    process, channel = _start()
    try:
        _send(channel, (work.__module__, work.__name__, arguments))
        return _receive(channel)
    except EOFError:
        raise AssertionError(f"rank 0 ended with {process.wait()}, see its output") from None
    finally:
        channel.close()
        process.wait(TIMEOUT_S)


def serve_calls(calls: Connection, spec: group.WorkerSpec) -> None:
    """Be a further rank until the pipe ends, or until something raises."""
    worker = Worker(spec, TIMEOUT_S)
    while True:
        method, arguments = _receive(calls)
        method(worker, *arguments)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    mine, theirs = Pipe()
    # A test module is named from the repository or from tests/, by how pytest was started.
    paths = [str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, str(_TESTS / "rank_processes.py"), str(theirs.fileno())],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        pass_fds=[theirs.fileno()],
    )
    theirs.close()
    return process, mine


def _send(channel: Connection, message: Any) -> None:
    # not Connection.send: torch would then share memory by descriptors that die with the sender
    buffer = io.BytesIO()
    torch.save(message, buffer)
    channel.send_bytes(buffer.getvalue())


def _receive(channel: Connection) -> Any:
    return torch.load(io.BytesIO(channel.recv_bytes()), weights_only=False)


def main() -> None:
    """Do the one thing that is asked for."""
    torch.set_num_threads(1)
    channel = Connection(int(sys.argv[1]))
    module, name, arguments = _receive(channel)
    work = getattr(importlib.import_module(module), name)
    if name == "serve_calls":
        work(channel, *arguments)
    else:
        _send(channel, work(*arguments))


if __name__ == "__main__":
    main()
