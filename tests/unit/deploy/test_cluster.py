"""The application for a cluster, its placement and the names of its actors; Ray does not run."""

from __future__ import annotations

import asyncio
import copy
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import ray
from fixture_models import SMALL_MODELS
from tiny_models import save_tiny
from waiting import wait_until

from paceline.actors.engine.settings import TargetSettings
from paceline.cluster import named_actor as named
from paceline.cluster import supervisor
from paceline.cluster.learning_actors import SHARDS, TRAINER, numbered
from paceline.cluster.named_actor import ActorNotFoundError, NamedActor
from paceline.cluster.placement import Booking, actor_options, find_misfit, share_of_gpus
from paceline.deploy.cli.tables import status_text
from paceline.deploy.cluster_app import build, for_cluster
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.learning_settings import occupied_above
from paceline.deploy.errors import ConfigError
from paceline.deploy.learning import factories, named_actors, rank_options, remove_stray_records

STORAGE = SMALL_MODELS | {"weights.storage": "/srv/somewhere"}


def config(**overrides: Any) -> PacelineConfig:
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(None, STORAGE | dotted)


def test_a_role_asks_for_what_its_placement_says() -> None:
    assert actor_options({}) == {"num_cpus": 0, "num_gpus": 0}
    assert actor_options({}, 0.25) == {"num_cpus": 0, "num_gpus": 0.25}
    asked = actor_options({"CPU": 2, "GPU": 0.5, "serving": 1}, 0.25)
    assert asked == {"num_cpus": 2, "num_gpus": 0.5, "resources": {"serving": 1}}


@pytest.mark.parametrize(
    ("devices", "taken", "replicas", "share"),
    [
        (1, [0.25], 1, 0.75),
        (4, [0.25], 1, 3.0),
        (4, [0.25], 2, 1.0),
        (2, [0.25], 2, 0.75),  # not 0.87, of which no device would have room for the trainer
        (8, [0.25], 8, 0.75),
        (2, [0.25, 0.25], 2, 0.5),  # Ray puts both trainers on one device
        (2, [0.25], 4, 0.37),
        (2, [0.25, 1.0], 1, 0.75),
        (3, [0.25, 1.0], 2, 0.75),
        (1, [0.1] * 5, 1, 0.5),
        (2, [0.6, 0.6], 2, 0.4),
        (2, [0.6, 0.6, 0.6], 1, 0.0),  # less than two GPUs, but no device has room for the third
        (2, [0.25, 2.0], 1, 0.0),
        (1, [], 200, 0.0),
    ],
)
def test_target_replicas_share_what_is_left_of_each_device(
    devices: int, taken: list[float], replicas: int, share: float
) -> None:
    assert share_of_gpus(devices, taken, replicas) == share


@pytest.mark.parametrize(
    ("amounts", "count", "total", "said"),
    [
        ({}, 9, {}, None),
        ({"CPU": 1.0}, 0, {}, None),
        ({"CPU": 0.1}, 20, {"CPU": 3.0}, None),
        ({"CPU": 1.0}, 3, {"CPU": 3.0}, "3 x 1 CPU .* is 3 on this machine, .* parts book 1$"),
        ({"serving": 1.0}, 1, {"CPU": 3.0}, "1 x 1 serving .* is 0 on this machine, .* book 0$"),
        ({"GPU": 0.6}, 2, {"CPU": 1.0, "GPU": 2.0}, None),
        ({"GPU": 0.6}, 3, {"CPU": 1.0, "GPU": 2.0}, "3 x 0.6 GPU"),  # each on one device
        ({"GPU": 2.0}, 1, {"CPU": 1.0, "GPU": 2.0}, None),
    ],
)
def test_what_a_machine_cannot_book_is_named(
    amounts: dict[str, float], count: int, total: dict[str, float], said: str | None
) -> None:
    cpu = Booking("placement.ingress", {"CPU": 1.0} if "CPU" in total else {}, 1)
    found = find_misfit([cpu, Booking("placement.target", amounts, count)], total)
    if said is None:
        assert found is None
    else:
        assert re.match(f"placement.target: {said}", found or "")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"target": {"memory": 1}}, "memory cannot be booked here"),
        ({"experts": {"GPU": 0.1}}, "the GPU of an expert is drafts.num_gpus"),
        ({"trainer": {"training": -1}}, "placement.trainer.training: "),
        ({"trainr": {}}, "did you mean trainer?"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(section: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        load_config(None, {"placement": section})


def test_a_trainer_on_hosts_of_its_own_minds_no_load_but_the_configured_one() -> None:
    apart = config(
        placement={"target": {"serving": 1}, "trainer": {"training": 1}},
        training__max_occupancy=1.0,
        target__max_num_seqs=8,
        target__num_threads=4,
    )
    assert occupied_above(apart, cores=1) == 8
    shared = {"target": {"serving": 0.5}, "trainer": {"serving": 0.1}}
    one = config(placement=shared, target__num_threads=4, target__device="cpu")
    assert not one.placement.trainer_is_apart


@pytest.mark.parametrize(
    ("cores", "chosen", "requests"),
    [(2, "auto", 0), (3, "auto", 0), (4, "auto", 4), (8, "auto", 4), (2, 0.5, 8), (8, 0.0, 0)],
)
def test_on_one_machine_training_runs_beside_requests_only_where_a_core_is_left(
    cores: int, chosen: Any, requests: int
) -> None:
    one = config(training__max_occupancy=chosen, target__max_num_seqs=16, target__device="cpu")
    assert occupied_above(one, cores) == requests


@pytest.mark.parametrize("storage", [None, "state", "./state"])
def test_a_cluster_needs_storage_that_all_hosts_see(storage: str | None) -> None:
    with pytest.raises(ConfigError, match=r"weights\.storage: .* absolute path"):
        for_cluster(load_config(None, {"weights.storage": storage}))


def test_on_a_cluster_experts_listen_on_tcp_and_gpus_are_named() -> None:
    given = for_cluster(config(placement={"target": {"GPU": 0.7}}))
    assert given.drafts.across_nodes
    assert given.placement.target == {"GPU": 0.7}
    assert given.placement.trainer == {"GPU": 0.0}
    assert str(given.state_path) == STORAGE["weights.storage"]


def test_the_storage_takes_the_place_of_the_state_folder() -> None:
    both = load_config(None, STORAGE | {"state_dir": "/else"})
    assert str(both.state_path) == STORAGE["weights.storage"]


@pytest.mark.parametrize(
    ("changes", "gone"),
    [
        ({}, {"by-key/replay/acme.sql.records"}),
        ({"drafts.general": "none"}, {"by-key/replay/acme.sql.records", "replay/sql.records"}),
        ({"replay.scope": "key"}, {"replay/sql.records"}),
    ],
)
def test_records_that_no_shard_would_let_expire_are_removed(
    changes: dict[str, str], gone: set[str], tmp_path: Path
) -> None:
    keys = {"acme": {"sha256": "0" * 64}}
    own = {"weights.storage": str(tmp_path), "replay.persist": True, "auth.keys": keys}
    kept = {"by-key/replay/acme.sql.records", "replay/sql.records", "weights/decisions.jsonl"}
    for name in kept:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    remove_stray_records(load_config(None, SMALL_MODELS | own | changes))
    assert {name for name in kept if not (tmp_path / name).exists()} == gone


@pytest.mark.parametrize("router", ["ingress", "deployment"])
def test_the_application_is_built_without_actors_and_with_the_roles_places(router: str) -> None:
    placement = {role: {f"for-{role}": 0.5} for role in ("target", "experts", "router", "ingress")}
    placement |= {"learning": {"for-learning": 0.5}, "trainer": {"for-trainer": 0.5}}
    pool = {"drafts__placement": "pool", "drafts__topics": ["sql"]}
    built = deployments(build(config(placement=placement, router__placement=router, **pool)))
    places = {name: options["resources"] for name, options in built.items()}
    assert places == {
        "ingress": {"for-ingress": 0.5},
        "target": {"for-target": 0.5},
        **({"router": {"for-router": 0.5}} if router == "deployment" else {}),
        "supervisor": {"for-learning": 0.5},
        "expert-general": {"for-experts": 0.5},
        "expert-sql": {"for-experts": 0.5},
    }


def test_the_application_names_the_draft_in_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    own = save_tiny(tmp_path / "target", 1)
    asked = {"target.path": str(own), "weights.storage": str(tmp_path / "storage")}
    built = built_of(build(load_config(None, asked | {"router.enabled": False})))
    (target,) = [found for found in built if found.name == "target"]
    (folder,) = (tmp_path / "storage" / "drafts").iterdir()
    settings: TargetSettings = target.init_args[0]
    assert set(settings.drafts.values()) == {str(folder)}


def deployments(application: Any) -> dict[str, dict[str, Any]]:
    """Every deployment of an application, with its actor options."""
    return {found.name: found.ray_actor_options for found in built_of(application)}


def built_of(application: Any) -> list[Any]:
    from ray.serve._private.build_app import build_app

    return list(build_app(application, name="paceline", default_runtime_env={}).deployments)


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("0.0.0.0", "", True), ("0.0.0.0", "sesame", False), ("127.0.0.1", "", False)],
)
def test_an_open_server_without_keys_is_warned_of_once_and_in_the_status(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
    key: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("PACELINE_API_KEYS", key)
    monkeypatch.setattr(supervisor, "_TICK_S", 0.01)
    bound = next(
        found for found in built_of(build(config(host=host))) if found.name == "supervisor"
    )
    *_, scheduler, warning = bound.init_args
    supervised = supervisor.Supervisor({}, {}, {}, scheduler, warning)  # actors would start Ray
    begun = time.monotonic()
    wait_until(lambda: supervised._polled_at > begun, "a poll", 10)
    facts = asyncio.run(supervised.status())
    words = status_text("u", {"target": {"error": "Died"}, "supervisor": asdict(facts)})
    said = [record.getMessage() for record in caplog.records if "API key" in record.getMessage()]
    assert len(said) == (1 if warned else 0)
    assert ("host 0.0.0.0 can be reached from other machines" in words) == warned


def test_actors_are_found_under_the_names_that_they_are_started_with() -> None:
    asked = config(drafts__topics=["sql"])
    actors = named_actors(asked)
    found = [*actors.shard_hosts, actors.registry, actors.scheduler]
    assert [actor._name for actor in found] == list(factories(asked))
    assert actors.scorer is actors.trainer
    assert (actors.trainer._name, actors.further_trainers) == ("paceline-trainer", {})
    assert named_actors(config(training__enabled=False)).trainer is None
    three = config(training__trainers=3)
    further = named_actors(three).further_trainers
    assert [actor._name for actor in further.values()] == numbered(TRAINER, 3)[1:]
    assert list(further) == ["paceline-trainer-2", "paceline-trainer-3"]


@pytest.mark.parametrize(
    ("amounts", "options"),
    [
        ({}, {"num_cpus": 0, "num_gpus": 0}),
        ({"training": 0.01}, {"num_cpus": 0, "num_gpus": 0, "resources": {"training": 0.01}}),
        ({"CPU": 2, "GPU": 0.5, "training": 1}, None),
    ],
)
def test_further_ranks_run_where_their_trainer_may(
    amounts: dict[str, float], options: dict[str, Any] | None
) -> None:
    """Each books what the trainer does, but a whole GPU: NCCL refuses two ranks on one device."""
    asked = for_cluster(config(placement={"trainer": amounts}, training__ranks=2))
    whole = {"num_cpus": 2, "num_gpus": 1, "resources": {"training": 1}}
    assert rank_options(asked) == (options or whole)


def test_every_trainer_has_a_host_of_shards() -> None:
    three = config(training__trainers=3)
    hosts = numbered(SHARDS, 3)
    assert [actor._name for actor in named_actors(three).shard_hosts] == hosts
    assert list(factories(three))[:3] == hosts
    assert len(named_actors(config(training__enabled=False)).shard_hosts) == 1
    assert not named_actors(config(drafts__general="none", drafts__topics=[])).shard_hosts


class Cluster:
    """Ray's names: what stands behind one may change, or be gone."""

    def __init__(self) -> None:
        self.behind: dict[str, Any] = {}
        self.asked = 0

    def get_actor(self, name: str, namespace: str) -> Any:
        assert namespace == "paceline"
        self.asked += 1
        if name not in self.behind:
            raise ValueError(name)
        return self.behind[name]


class Handle:
    def __init__(self, answer: str) -> None:
        self.ping = self
        self._answer = answer

    def remote(self, *arguments: object) -> tuple[str, tuple[object, ...]]:
        return self._answer, arguments


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    there = Cluster()
    monkeypatch.setattr(ray, "get_actor", there.get_actor)
    return there


def test_an_actor_that_was_never_there_is_an_error_and_then_is_found(cluster: Cluster) -> None:
    actor = NamedActor("registry")
    with pytest.raises(ActorNotFoundError, match="registry"):
        actor.ping.remote()
    cluster.behind["registry"] = Handle("first")
    assert actor.ping.remote(1) == ("first", (1,))
    assert actor.ping.remote() == ("first", ())
    assert cluster.asked == 2


def test_a_restarted_actor_is_found_and_a_missing_one_keeps_its_handle(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.behind["registry"] = Handle("first")
    actor = NamedActor("registry")
    actor.find()
    monkeypatch.setattr(named, "_REFRESH_S", 0.0)
    del cluster.behind["registry"]
    assert actor.ping.remote() == ("first", ())
    cluster.behind["registry"] = Handle("second")
    wait_until(lambda: actor.ping.remote()[0] == "second", "the new one", 10)


def test_a_name_crosses_process_borders_alone(cluster: Cluster) -> None:
    cluster.behind["registry"] = Handle("first")
    actor = NamedActor("registry")
    actor.find()
    sent = copy.copy(actor)  # by the same rules as pickling
    assert sent._handle is None
    assert sent.ping.remote() == ("first", ())
