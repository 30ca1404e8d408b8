"""Which processes a benchmark or a test may stop or kill: its own, by what they are."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import processes
import psutil
import pytest
from held import Held, end_leftovers, note
from waiting import wait_until

from paceline.actors.replay.host import ShardHost
from paceline.actors.weights.registry import WeightRegistry
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.deploy.learning import TrainerActor
from paceline.deploy.monitoring.exporter import metered

SQL = "ray::ServeReplica:paceline:expert-sql"
SQL_TOO = "ray::ServeReplica:paceline:expert-sqlite"


@contextlib.contextmanager
def started(title: str) -> Iterator[int]:
    """A child of this process with that title."""
    child = subprocess.Popen(["bash", "-c", f"exec -a '{title}' sleep 300"])
    try:
        wait_until(lambda: psutil.Process(child.pid).cmdline()[:1] == [title], title)
        yield child.pid
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def strange(title: str) -> Iterator[int]:
    """A process with that title that is below another one."""
    call = f"(exec -a '{title}' sleep 300 >/dev/null 2>&1) & echo $!"
    pid = int(subprocess.run(["bash", "-c", call], capture_output=True, check=True).stdout)
    try:
        wait_until(lambda: psutil.Process(pid).cmdline()[:1] == [title], title)
        yield pid
    finally:
        psutil.Process(pid).kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, "its end")


def test_an_expert_is_found_by_its_whole_name_below_this_process_only() -> None:
    with started(SQL) as sql, started(SQL_TOO) as sqlite, strange(SQL) as other:
        if other in {p.pid for p in psutil.Process().children(recursive=True)}:
            pytest.skip("orphans come to this process here")
        assert [p.pid for p in processes.of_expert("sql")] == [sql]
        assert [p.pid for p in processes.of_expert("sqlite")] == [sqlite]
        assert {p.pid for p in processes.of("expert")} == {sql, sqlite}
    assert processes.of_expert("sql") == []


def test_actors_are_looked_for_by_the_names_of_their_classes() -> None:
    classes = {"registry": WeightRegistry, "shard": ShardHost, "scheduler": TrainerScheduler}
    for role, actor in classes.items():
        assert processes.TITLES[role] == f"ray::{metered(actor, lambda _: ()).__name__}"
    assert processes.TITLES["trainer"] == f"ray::{TrainerActor.__name__}"


@contextlib.contextmanager
def parent() -> Iterator[Held]:
    """A process with one of its own, which it ends before itself."""
    script = "trap 'kill $!; wait; exit' TERM; sleep 300 & wait"
    held = Held(subprocess.Popen(["bash", "-c", script], text=True))
    try:
        wait_until(lambda: len(held.tree()) == 2, "its child")
        yield held
    finally:
        held.end(signal.SIGTERM)


def states(held: Held) -> set[str]:
    return {process.status() for process in held.tree()}


def test_a_held_process_stands_still_with_all_that_it_started_and_goes_on() -> None:
    with parent() as held:
        pids = [process.pid for process in held.tree()]
        held.suspend()
        wait_until(lambda: states(held) == {psutil.STATUS_STOPPED}, "both to stop")
        assert held.alive
        held.resume()
        wait_until(lambda: states(held) == {psutil.STATUS_SLEEPING}, "both to go on")
        held.suspend()  # what stands still can be ended
        held.end(signal.SIGTERM)
        assert not held.alive
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_a_killed_run_has_left_is_ended_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "processes.json"
    end_leftovers(file)  # none
    with parent() as held:
        note(file, [held])
        noted = json.loads(file.read_text(encoding="utf-8"))
        assert len(noted) == 2
        file.write_text(json.dumps([[pid, at - 1.0] for pid, at in noted]), encoding="utf-8")
        end_leftovers(file)  # other processes that have their numbers now
        assert held.alive
        file.write_text(json.dumps(noted[:1]), encoding="utf-8")  # before its child was started
        end_leftovers(file)
        wait_until(lambda: not held.alive, "its end")
        wait_until(lambda: not psutil.pid_exists(noted[1][0]), "its child's end")
