"""Two ranks as Ray actors: they publish, and the death of either is survived."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record
from waiting import eventually

from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.trainer import Trainer
from paceline.actors.weights.registry import WeightRegistry
from paceline.cluster.placement import actor_options
from paceline.cluster.rank_actors import worker_starter
from paceline.cluster.session import ray_session, thread_environment

pytestmark = [pytest.mark.cluster, pytest.mark.full]

TOPICS = ("sql", "general")


@pytest.fixture(scope="module")
def _session() -> Iterator[None]:
    with ray_session(num_cpus=2, environment=thread_environment(1)):
        yield


def actor(cls: type, *args: Any) -> Any:
    return ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0)(cls).remote(*args)


def ranks() -> set[int]:
    """Pids of the further ranks that have joined; Ray names a process by its actor."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        if any("RankActor" in part for part in process.info["cmdline"] or ()):
            found.add(process.pid)
    return found


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_session")
def test_learning_survives_the_death_of_either_rank(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(draft)
    shard = actor(ReplayShard, "sql", ReplaySettings(held_out_fraction=0.3), None)
    registry = actor(WeightRegistry, str(tmp_path / "weights"), TOPICS, "mark")
    settings = TrainerSettings(
        draft_paths=dict.fromkeys(TOPICS, str(draft)),
        distiller=DistillerSettings(learning_rate=1e-3, dtype="float32"),
        schedule=ScheduleSettings(min_train=4, min_held_out=3, min_new=1),
        round_seconds=0.3,
        refresh_s=0.1,
        low_priority=False,
        optimizer_dir=str(tmp_path / "optimizer"),
        ranks=2,
    )
    start_worker = worker_starter(1, settings.group_timeout_s, actor_options({}))
    trainer = actor(Trainer, settings, {"sql": shard}, registry, None, start_worker)
    ray.get(
        [shard.insert.remote(encode(training_record(n, created=time.time()))) for n in range(60)]
    )

    ray.get(registry.ping.remote())  # its imports take seconds on a busy machine

    def version() -> int:
        versions: dict[str, int] = ray.get(registry.stable_versions.remote(), timeout=5)
        return sum(versions.values())

    further = count(1_000)

    def grows() -> None:
        """While records come: after a round too short to gain the trainer waits for them."""
        before = version()

        def is_newer() -> bool:
            record = encode(training_record(next(further), created=time.time()))
            ray.get(shard.insert.remote(record))
            return version() > before

        eventually(is_newer)

    def status() -> TrainerStatus:
        facts: TrainerStatus = ray.get(trainer.status.remote(), timeout=5)
        return facts

    grows()
    [second] = eventually(ranks)
    os.kill(second, signal.SIGKILL)
    grows()
    assert eventually(status).failures >= 1
    [third] = eventually(ranks)
    assert third != second

    first = status().pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: third not in ranks())  # a rank does not outlive its trainer
    grows()
    assert status().pid != first
    ray.kill(trainer, no_restart=True)
    eventually(lambda: not ranks())
