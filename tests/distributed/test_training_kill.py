"""Trainer, shard and registry under kill -9: they come back, and versions only grow."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import ray
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record
from waiting import eventually

from paceline.actors.replay.buffer import ReplaySettings, ShardStats
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.settings import DistillerSettings, TrainerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.trainer import Trainer
from paceline.actors.weights.flat_weights import unflatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.cluster.session import ray_session, thread_environment

pytestmark = [pytest.mark.cluster, pytest.mark.full]

TOPICS = ("sql", "general")


def actor(cls: type, *args: Any, **options: Any) -> Any:
    made = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=0, **options)(cls)
    return made.remote(*args)


def pid_of(handle: Any) -> int:
    found: int = ray.get(handle.__ray_call__.remote(lambda _self: os.getpid()), timeout=10)
    return found


@pytest.fixture(scope="module")
def _session() -> Iterator[None]:
    with ray_session(num_cpus=2, environment=thread_environment(1)):
        yield


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def feed(shard: Any, numbers: Iterable[int]) -> None:
    ray.get([shard.insert.remote(encode(training_record(n, created=time.time()))) for n in numbers])


def total(stats: ShardStats) -> int:
    return stats.records("train", "held_out")


def decisions_since(registry: Any, when: float) -> list[dict[str, Any]]:
    """Of sql, taken after a unix time: what lay on disk before does not count."""
    history = ray.get(registry.history.remote("sql"), timeout=5)
    return [d for d in history if d["outcome"] in ("published", "rejected") and d["time"] > when]


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("_session")
def test_learning_survives_kill_9_of_everything(tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(draft)
    replay = ReplaySettings(held_out_fraction=0.3)
    shard = actor(ReplayShard, "sql", replay, str(tmp_path / "replay"))
    registry = actor(WeightRegistry, str(tmp_path / "weights"), TOPICS, "mark")
    scheduler = actor(TrainerScheduler, 0.05)
    settings = TrainerSettings(
        draft_paths=dict.fromkeys(TOPICS, str(draft)),
        distiller=DistillerSettings(learning_rate=1e-3, dtype="float32"),
        schedule=ScheduleSettings(min_train=4, min_held_out=3, min_new=1),
        round_seconds=0.3,
        refresh_s=0.1,
        low_priority=False,
    )
    trainer = actor(Trainer, settings, {"sql": shard}, registry, scheduler)
    seen, further = [0], count(1_000)

    def version() -> int:
        now: int = ray.get(registry.stable_versions.remote(), timeout=5)["sql"]
        assert now >= seen[-1], "a version fell"
        seen.append(now)
        return now

    def grows() -> None:
        """While records come: after a round too short to gain the trainer waits for them."""
        before = seen[-1]

        def is_newer() -> bool:
            feed(shard, [next(further)])
            return version() > before

        eventually(is_newer)

    feed(shard, range(60))
    grows()

    # the trainer dies: another one goes on from the published weights
    first = eventually(lambda: ray.get(trainer.status.remote(), timeout=5))
    kill(first.pid)
    again = eventually(lambda: ray.get(trainer.status.remote(), timeout=5), 60)
    assert again.pid != first.pid
    feed(shard, range(60, 70))
    grows()

    # the shard dies: what was persisted is there, and learning goes on
    before = ray.get(shard.stats.remote())
    pid, killed_at = pid_of(shard), time.time()
    kill(pid)
    after = eventually(lambda: ray.get(shard.stats.remote(), timeout=5), 60)
    assert after.records("train") == before.records("train") > 0
    assert after.inserted_total == 0  # what comes back from disk is no new traffic
    feed(shard, range(70, 80))
    assert total(ray.get(shard.stats.remote())) == total(before) + 10
    eventually(lambda: decisions_since(registry, killed_at))

    # the registry dies: the last version comes back from disk, at once
    last = version()
    pid, killed_at = pid_of(registry), time.time()
    kill(pid)
    assert eventually(version, 60) >= last
    assert pid_of(registry) != pid
    changes = eventually(
        lambda: ray.get(registry.wait_for_changes.remote({}, None, 1.0), timeout=5), 60
    )
    published = changes.weights["sql"]
    assert published.weight_version >= last
    assert unflatten(ray.get(published.reference, timeout=5))["model.norm.weight"].shape == (32,)
    feed(shard, range(80, 90))
    newer = eventually(lambda: decisions_since(registry, killed_at))
    assert newer[-1]["topic"] == "sql"
    assert newer[-1]["version"] >= last
    version()

    # the scheduler dies: training waits for its return, and no longer
    ray.kill(scheduler, no_restart=False)
    eventually(lambda: ray.get(scheduler.ping.remote(), timeout=5), 60)
    assert eventually(lambda: ray.get(trainer.status.remote(), timeout=5)).alive
    assert seen == sorted(seen)
