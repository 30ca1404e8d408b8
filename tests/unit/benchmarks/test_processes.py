"""Which processes a benchmark or a test may kill: its own, by what they are."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import processes
import psutil
import pytest
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
