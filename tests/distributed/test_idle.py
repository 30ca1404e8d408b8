"""Two real trainers under the scheduler: load, hanging, its death, and a pending replica.

One Ray session with a logical GPU, of which each trainer books a quarter.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from free_ports import find_port
from ray import serve
from tiny_models import tiny_llama
from training_records import TINY_VOCAB, training_record
from waiting import eventually

from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.distiller import DistillerSettings
from paceline.actors.training.permits import ResourceSlot, TrainerIdentity
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.settings import TrainerSettings
from paceline.actors.training.topic_schedule import ScheduleSettings
from paceline.actors.training.trainer import Trainer
from paceline.actors.weights.registry import WeightRegistry
from paceline.cluster.scheduler.leases import SchedulerSettings, SchedulerStatus
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.cluster.session import ray_session, thread_environment
from paceline.cluster.supervisor import TrainerSupervisor

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

TOPICS = ("sql", "code")
NAMES = ("trainer-1", "trainer-2")
SHARE = {"GPU": 0.25}
LEASES = SchedulerSettings(yield_timeout_s=2.0, restart_after_s=1.0)


@dataclasses.dataclass
class System:
    """Handles of a small system that learns, without targets."""

    scheduler: Any
    registry: Any
    supervisor: TrainerSupervisor
    optimizer_dir: Path

    def scheduling(self) -> SchedulerStatus:
        found: SchedulerStatus = ray.get(self.scheduler.status.remote(), timeout=5)
        return found

    def status(self, name: str) -> TrainerStatus:
        found: TrainerStatus = ray.get(self.supervisor.handles()[name].status.remote(), timeout=5)
        return found

    def at_work(self, trainers: int = 2) -> bool:
        return [lease.state for lease in self.scheduling().leases].count("working") >= trainers

    def load(self, running: int) -> None:
        ray.get(self.scheduler.report_load.remote("replica", running, 0), timeout=5)

    def decided_topics(self, since: float) -> set[str]:
        """Topics about which something was decided after a unix time."""
        history = ray.get(self.registry.history.remote(None), timeout=5)
        return {decision["topic"] for decision in history if decision["time"] > since}


def actor(cls: type, *args: Any, **options: Any) -> Any:
    made = ray.remote(max_restarts=-1, max_task_retries=0, **{"num_cpus": 0, **options})(cls)
    return made.remote(*args)


def pid_of(handle: Any) -> int:
    found: int = ray.get(handle.__ray_call__.remote(lambda _self: os.getpid()), timeout=10)
    return found


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("idle")
    draft = folder / "draft"
    tiny_llama(0, vocab=TINY_VOCAB, layers=1).save_pretrained(draft)
    settings = TrainerSettings(
        draft_paths=dict.fromkeys(TOPICS, str(draft)),
        distiller=DistillerSettings(learning_rate=1e-3, dtype="float32"),
        # what a topic has learnt does not matter here: there is always something to do
        schedule=ScheduleSettings(min_train=4, min_held_out=3, min_new=0, max_rejections=10**9),
        round_seconds=0.3,
        refresh_s=0.1,
        low_priority=False,
        optimizer_dir=str(folder / "optimizer"),
    )
    with ray_session(num_cpus=2, num_gpus=1, environment=thread_environment(1)):
        node = ray.get_runtime_context().get_node_id()
        replay = ReplaySettings(held_out_fraction=0.3)
        shards = {topic: actor(ReplayShard, topic, replay) for topic in TOPICS}
        for topic, shard in shards.items():
            for number in range(60):
                record = dataclasses.replace(
                    training_record(number, created=time.time()), topic=topic
                )
                ray.get(shard.insert.remote(encode(record)), timeout=30)
        registry = actor(WeightRegistry, str(folder / "weights"), TOPICS, "mark")
        scheduler = actor(TrainerScheduler, 0.05, 60.0, 0, LEASES)

        def trainer(name: str) -> Any:
            identity = TrainerIdentity(name, (ResourceSlot(name, node, SHARE),), sole=False)
            arguments = settings, shards, registry, scheduler, None, "127.0.0.1", identity
            return actor(Trainer, *arguments, num_gpus=SHARE["GPU"])

        factories = {name: partial(trainer, name) for name in NAMES}
        supervisor = TrainerSupervisor(factories, SHARE, scheduler).start()
        yield System(scheduler, registry, supervisor, folder / "optimizer")
        serve.shutdown()
        supervisor.stop()


def test_two_trainers_learn_two_topics(system: System) -> None:
    began = time.time()
    eventually(system.at_work)
    for _ in range(20):
        leases = system.scheduling().leases
        topics = [lease.topic for lease in leases if lease.topic is not None]
        slots = [lease.slot for lease in leases if lease.slot is not None]
        assert len(topics) == len(set(topics))
        assert len(slots) == len(set(slots))
        time.sleep(0.02)
    eventually(lambda: system.decided_topics(began) == set(TOPICS))
    assert all(eventually(lambda n=n: system.status(n).rounds) for n in NAMES)

    def kept() -> bool:
        """Whoever takes a published topic over finds the optimizer's state of it."""
        versions = ray.get(system.registry.stable_versions.remote(), timeout=5)
        published = {topic: number for topic, number in versions.items() if number}
        whole: dict[str, set[int]] = {}  # beside a version, the one that it replaced
        for path in system.optimizer_dir.glob("*/*/index.json"):
            number, _, _ = path.parent.name.partition("-")
            whole.setdefault(path.parent.parent.name, set()).add(int(number))
        newest = {topic: max(numbers) for topic, numbers in whole.items()}
        return newest == published

    eventually(kept)


def test_a_request_has_both_yield_and_its_end_lets_them_go_on(system: System) -> None:
    eventually(system.at_work)
    before = system.scheduling().leases_ended["revoked"]
    system.load(1)
    eventually(lambda: not system.at_work(1) and "revoked" not in str(system.scheduling().leases))
    steps = [system.status(name).micro_steps for name in NAMES]
    seen = system.scheduling()
    assert seen.leases_ended["revoked"] >= before + 1
    assert 0.0 < seen.last_yield_s <= seen.longest_yield_s < LEASES.yield_timeout_s
    for _ in range(5):  # a replica that is at work says so every second
        system.load(1)
        time.sleep(0.1)
    assert [system.status(name).micro_steps for name in NAMES] == steps
    assert seen.leases_ended["killed"] == 0
    system.load(0)
    eventually(system.at_work)
    assert system.scheduling().idle_s["used"] > 0.0


def test_a_trainer_that_hangs_is_killed_and_comes_back(system: System) -> None:
    eventually(system.at_work)
    pids = {name: system.status(name).pid for name in NAMES}
    hung = NAMES[0]

    def hangs_in_a_micro_step() -> bool:
        os.kill(pids[hung], signal.SIGSTOP)
        if _state(system, hung) == "working":
            return True
        os.kill(pids[hung], signal.SIGCONT)
        return False

    eventually(hangs_in_a_micro_step)
    began = time.monotonic()
    system.load(1)
    eventually(lambda: system.scheduling().leases_ended["killed"] == 1)
    assert time.monotonic() - began >= LEASES.yield_timeout_s
    system.load(0)
    eventually(lambda: system.status(hung).pid != pids[hung])
    eventually(system.at_work)
    assert system.status(NAMES[1]).pid == pids[NAMES[1]]
    assert system.supervisor.status().starts == dict.fromkeys(NAMES, 1)


def _state(system: System, name: str) -> str:
    found = [one.state for one in system.scheduling().leases if one.trainer == name]
    return str(found[0]) if found else ""


def test_trainers_acquire_topics_again_from_a_scheduler_that_died(system: System) -> None:
    eventually(system.at_work)
    began = time.time()
    pids = {name: system.status(name).pid for name in NAMES}
    scheduler = pid_of(system.scheduler)
    ray.kill(system.scheduler, no_restart=False)
    eventually(lambda: pid_of(system.scheduler) != scheduler)
    eventually(system.at_work)
    assert system.scheduling().leases_ended["killed"] == 0  # it has forgotten
    eventually(lambda: system.decided_topics(began) == set(TOPICS))
    assert {name: system.status(name).pid for name in NAMES} == pids
    assert [system.status(name).failures for name in NAMES] == [0, 0]


def test_a_pending_replica_preempts_the_trainers_and_they_restart(system: System) -> None:
    eventually(system.at_work)
    serve.start(http_options={"host": "127.0.0.1", "port": find_port()})
    options = {"num_cpus": 0, "num_gpus": 0.5}
    # Any class will do that a replica's process can import.
    small = serve.deployment(name="small", ray_actor_options=options)(TrainerScheduler)
    serve.run(small.bind(), name="first", route_prefix=None)
    assert set(system.supervisor.handles()) == set(NAMES)  # there was room
    began = time.monotonic()
    handle = serve.run(small.bind(), name="second", route_prefix=None)
    assert handle.ping.remote().result(timeout_s=60)
    seen = system.scheduling()
    assert seen.trainers_preempted == NAMES
    assert system.supervisor.handles() == {}
    assert seen.leases_ended["killed"] == 0
    assert time.monotonic() - began < 60.0
    serve.delete("second")
    eventually(lambda: set(system.supervisor.handles()) == set(NAMES))
    eventually(system.at_work)
    assert system.scheduling().trainers_preempted == ()
    assert system.supervisor.status().starts == dict.fromkeys(NAMES, 2)
