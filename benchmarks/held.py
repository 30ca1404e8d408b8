"""Servers in processes of their own, which stand still while others have their turn."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

_STOP_S = 60.0
SETTLE_S = 0.5  # of what Ray's processes have missed
# The last line of `paceline serve`'s start. Health comes sooner, and a start that stands still ends
# with a timeout.
STARTED = "Ctrl-C ends it."
_MIB = 2.0**20


class Held:
    """A process with all that it starts.

    Args:
        first: the process, in a session of its own.
    """

    def __init__(self, first: subprocess.Popen[str]) -> None:
        self.first = first

    @property
    def alive(self) -> bool:
        """Whether its first process runs, or is suspended."""
        return self.first.poll() is None

    def tree(self) -> list[psutil.Process]:
        """Its processes, the first one first."""
        try:
            first = psutil.Process(self.first.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def suspend(self) -> None:
        """Stop all its processes where they are."""
        _signal(self.tree(), signal.SIGSTOP)

    def resume(self) -> None:
        """Let them go on."""
        _signal(self.tree(), signal.SIGCONT)

    def end(self, number: signal.Signals) -> None:
        """End it: with this signal, then by force."""
        tree = self.tree()
        _signal(tree, signal.SIGCONT)
        _signal(tree[:1], number)
        _, left = psutil.wait_procs(tree, timeout=_STOP_S)
        _signal(left, signal.SIGKILL)
        self.first.wait()

    def memory_mib(self) -> float:
        """Of all its processes, shared pages in proportion."""
        total = 0.0
        for process in self.tree():
            try:
                total += process.memory_full_info().pss / _MIB
            except psutil.Error:
                continue
        return total

    def seconds(self) -> float:
        """Processor seconds of all its processes."""
        total = 0.0
        for process in self.tree():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


def environment() -> dict[str, str]:
    """Of a server: it sets its own numbers of threads, and asks no hub."""
    own = {n: v for n, v in os.environ.items() if not n.startswith(("OMP_", "MKL_"))}
    return own | {"HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def note(file: Path, held: Iterable[Held]) -> None:
    """Write down all processes: a run that is killed leaves them suspended."""
    processes = [p for each in held for p in each.tree()]
    noted = [[p.pid, p.create_time()] for p in processes if p.is_running()]
    file.write_text(json.dumps(noted), encoding="utf-8")


def end_leftovers(file: Path) -> None:
    """End what a killed run has left: the same processes, and what they have started since."""
    try:
        noted = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for pid, created in noted:
        try:
            process = psutil.Process(pid)
            if process.create_time() == created:
                _signal([process, *process.children(recursive=True)], signal.SIGKILL)
        except psutil.Error:
            continue


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
