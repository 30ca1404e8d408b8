"""The application for a cluster on one host: what the supervisor keeps, and what ends with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from free_ports import find_port
from ray import serve
from tiny_models import tiny_llama, tiny_tokenizer
from waiting import eventually

from paceline.cluster import supervisor
from paceline.cluster.scheduler.leases import SchedulerStatus
from paceline.cluster.session import NAMESPACE, ray_session
from paceline.deploy.cluster_app import build
from paceline.deploy.config.config import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(240)]
TRAINERS = {"paceline-trainer", "paceline-trainer-2"}
NAMES = {
    "paceline-registry",
    "paceline-scheduler",
    "paceline-shards",
    "paceline-shards-2",
    *TRAINERS,
}


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory, storage: Path) -> Iterator[Any]:
    """Serve's handle of the supervisor of a running application of tiny models."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    for seed, (name, layers) in enumerate([("target", 2), ("draft", 1)]):
        tiny_llama(seed, layers=layers, vocab=len(tokenizer)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    config = load_config(
        None,
        {
            "port": find_port(),
            "weights.storage": str(storage),
            "target.path": str(folder / "target"),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "drafts.general": str(folder / "draft"),
            "drafts.topics": ["sql"],
            "router.enabled": False,
            "training.trainers": 2,
            "replay.persist": True,
        },
    )
    with ray_session(num_cpus=2):
        serve.start(proxy_location="Disabled")
        serve.run(build(config), name="paceline", route_prefix=None)
        yield serve.get_deployment_handle("supervisor", "paceline")


@pytest.mark.usefixtures("handle")
def test_an_actor_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinged:  # workers cannot import this module
        def ping(self) -> bool:
            return True

        def pid(self) -> int:
            return os.getpid()

    monkeypatch.setattr(supervisor, "_HANG_POLLS", 8)
    make = ray.remote(num_cpus=0, max_restarts=-1)(Pinged).remote
    actors = supervisor.SupervisedActors[Any]({"pinged": make})
    actors.start_missing()

    def answers() -> bool:
        actors.poll()
        return actors.silent() == 0

    eventually(answers)
    (actor,) = actors.handles().values()
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: not answers())
    eventually(answers)
    assert ray.get(actor.pid.remote()) != pid
    actors.kill_all()


def starts(handle: Any) -> dict[str, int]:
    found: dict[str, int] = handle.status.remote().result(timeout_s=30).starts
    return found


def named() -> set[str]:
    found = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in found if actor["namespace"] == NAMESPACE}


def answer(actor: str, method: str) -> Any:
    """What an actor says; None where there is none at the moment."""
    try:
        found = ray.get_actor(actor, NAMESPACE)
    except ValueError:
        return None
    return ray.get(getattr(found, method).remote(), timeout=30)


def registered() -> set[str]:
    """The trainers that have begun to work."""
    status: SchedulerStatus | None = answer("paceline-scheduler", "status")
    return set() if status is None else {lease.trainer for lease in status.leases}


def versions() -> Any:
    return answer("paceline-registry", "stable_versions")


def test_a_server_on_loopback_is_not_warned_of(handle: Any) -> None:
    assert handle.status.remote().result(timeout_s=30).warning is None


def test_an_actor_that_ray_gives_up_on_is_started_again_under_its_name(handle: Any) -> None:
    eventually(lambda: named() == NAMES)
    # an actor has its name a moment before its start is counted
    assert eventually(lambda: starts(handle) == dict.fromkeys(NAMES, 1))
    eventually(lambda: registered() == TRAINERS)  # one that starts without a registry fails
    assert eventually(versions) == {"general": 0, "sql": 0}
    ray.kill(ray.get_actor("paceline-registry", NAMESPACE), no_restart=True)
    assert eventually(lambda: versions() == {"general": 0, "sql": 0})
    assert eventually(lambda: starts(handle)["paceline-registry"] == 2)
    assert starts(handle) == dict.fromkeys(NAMES, 1) | {"paceline-registry": 2}


def test_a_trainer_that_ray_gives_up_on_is_started_again_and_both_register(
    handle: Any,
) -> None:
    eventually(lambda: registered() == TRAINERS)
    ray.kill(ray.get_actor("paceline-trainer-2", NAMESPACE), no_restart=True)
    assert eventually(lambda: starts(handle)["paceline-trainer-2"] == 2)
    eventually(lambda: named() == NAMES)
    eventually(lambda: registered() == TRAINERS)
    assert starts(handle)["paceline-trainer"] == 1


def test_nothing_outlives_the_application(handle: Any, storage: Path) -> None:  # noqa: ARG001
    from paceline.actors.weights.state_folder import is_locked

    assert is_locked(storage / "weights")
    serve.delete("paceline")
    assert eventually(lambda: named() == set())
    assert eventually(lambda: not is_locked(storage / "weights"))
