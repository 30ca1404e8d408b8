"""What operators do over HTTP, to real parts in this process, and the commands for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from local_ingress import Handle, nothing_learns
from replay_samples import make_record

from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.host import ShardHost, shard_of
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.training.permits import Permit, TrainerIdentity
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.flat_weights import flatten, unflatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.cluster.named_actor import NamedActor
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.deploy.api.admission import DrainState
from paceline.deploy.api.ingress import Ingress, IngressSettings
from paceline.deploy.api.operations import FoundShards, Operations, shards_of
from paceline.deploy.cli import operations as operations_command
from paceline.deploy.cli import tables
from paceline.deploy.errors import ApiError, CallError, NoAnswerError

TOPICS = ("sql", "general")


class Remote:
    """An actor's handle, of an object that lives here; a dead one answers with what Ray raises."""

    def __init__(self, part: Any) -> None:
        self.part = part
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        async def called(*arguments: Any) -> Any:
            if self.dead:
                raise ConnectionError("the actor died")
            return getattr(self.part, name)(*arguments)

        return type("Method", (), {"remote": staticmethod(called)})


class World:
    """Registry, scheduler and shards, and the endpoints over them."""

    def __init__(self, folder: Path, *, enabled: bool = True, keyed: bool = False) -> None:
        self.registry = WeightRegistry(
            str(folder), TOPICS, "aa", keep_versions=9, put=lambda flat: flat
        )
        self.scheduler = TrainerScheduler()
        self.purged: list[tuple[str | None, str | None]] = []
        self.handed_over: list[str] = []  # by target replicas, before they answer a purge
        self.replicas_dead = False
        self.admitted = 0
        self.ingress_silent = False
        self.behind: dict[str, dict[str, int]] = {}  # of a replica, the versions that it has
        settings = ReplaySettings(held_out_fraction=0.0)
        self.shards = {
            topic: ReplayShard(topic, settings, seed=0, clock=lambda: 1_000.0) for topic in TOPICS
        }
        self.handles: dict[str, Any] = {
            "registry": Remote(self.registry),
            "scheduler": Remote(self.scheduler),
            **{topic: Remote(shard) for topic, shard in self.shards.items()},
        }
        self.drain = DrainState(self.handles["scheduler"])
        self.api = FastAPI()
        self.operations = Operations(
            self.handles["registry"],
            self.handles["scheduler"],
            self.shards_now,
            self.drain,
            self.purge_replicas,
            self.admitted_by_all,
            enabled=enabled,
            keyed=keyed,
        )
        self.operations.add_routes(self.api)

        async def answer(_: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, ApiError)
            return JSONResponse(error.body(), error.status, error.headers())

        self.api.add_exception_handler(ApiError, answer)

    async def admitted_by_all(self) -> int:
        if self.ingress_silent:
            raise TimeoutError
        return self.admitted

    async def purge_replicas(self, request_id: str | None, topic: str | None) -> int:
        self.purged.append((request_id, topic))
        if self.replicas_dead:
            raise ConnectionError
        self.insert(*self.handed_over)
        return 5

    async def shards_now(self) -> FoundShards:
        return FoundShards({topic: self.handles[topic] for topic in TOPICS})

    def post(self, path: str, body: Any, client: str = "127.0.0.1", **headers: str) -> Any:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.api, client=(client, 5))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.post(f"/v1/paceline/{path}", json=body, headers=headers)

        return asyncio.run(send())

    def publish(self, value: float) -> None:
        self.registry.publish("sql", flatten({"w": torch.full((2,), value)}), {})

    def served(self) -> float:
        stable = self.registry.stable_weights("sql")
        return float(unflatten(stable.reference)["w"][0])

    def insert(self, *names: str) -> None:
        for number, name in enumerate(names):
            self.shards["sql"].insert(encode(make_record(request_id=name, prompt=(number, 1))))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_topic_goes_back_to_the_version_before_or_a_named_one(world: World) -> None:
    for value in (1.0, 2.0, 3.0):
        world.publish(value)
    answer = world.post("rollback", {"topic": "sql"})
    assert answer.json() == {"topic": "sql", "weight_version": 4}
    assert world.served() == 2.0
    assert world.post("rollback", {"topic": "sql", "version": 1}).json()["weight_version"] == 5
    assert world.served() == 1.0
    assert world.registry.history("sql")[-1]["outcome"] == "rolled_back"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"topic": "poetry"}, 404, "topic"),
        ({"topic": "sql", "version": 9}, 409, "version"),
        ({"topic": "sql", "version": -1}, 400, "version"),
        ({"topic": "sql", "verison": 1}, 400, "verison"),
        ({}, 400, "topic"),
    ],
)
def test_a_wrong_rollback_changes_nothing_and_names_the_field(
    world: World, body: Any, status: int, param: str
) -> None:
    world.publish(1.0)
    answer = world.post("rollback", body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param
    assert world.registry.stable_versions()["sql"] == 1


def test_a_purge_reaches_the_target_replicas(world: World) -> None:
    removed = world.post("replay/purge", {"topic": "sql"}).json()["removed"]
    assert removed == {"sql": 0, "(replicas)": 5}
    world.replicas_dead = True
    removed = world.post("replay/purge", {"request_id": "cmpl-b"}).json()["removed"]
    assert removed == {"sql": 0, "general": 0, "(replicas)": None}
    assert world.purged == [(None, "sql"), ("cmpl-b", None)]


def test_a_purge_reaches_what_a_replica_was_just_handing_over(world: World) -> None:
    world.handed_over = ["cmpl-a-0"]
    removed = world.post("replay/purge", {"request_id": "cmpl-a"}).json()["removed"]
    assert removed == {"sql": 1, "general": 0, "(replicas)": 5}


def test_a_purge_reaches_records_on_disk_of_topics_that_are_configured_no_more(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, now = ReplaySettings(held_out_fraction=0.0), time.time()

    def open_hosts(topics: Sequence[str]) -> list[Any]:
        given = 2, topics, settings, str(tmp_path / "replay")
        return [Remote(ShardHost(i, *given, persist=True)) for i in (0, 1)]

    before = open_hosts(["travel", "art"])
    for name in ("travel", "art"):
        data = encode(make_record(request_id=f"{name}-a", topic=name, created=now))
        asyncio.run(shard_of(name, before).insert.remote(data))  # type: ignore[arg-type]

    hosts = open_hosts(TOPICS)

    async def shards_now() -> FoundShards:
        found = await shards_of(hosts)
        return found._replace(by_topic=found.by_topic | (await world.shards_now()).by_topic)

    monkeypatch.setattr(world.operations, "_shards", shards_now)
    world.insert("cmpl-a")
    none = dict.fromkeys(TOPICS, 0)
    assert world.post("replay/purge", {"request_id": "art-a"}).json()["removed"] == none | {
        "art": 1,
        "travel": 0,
        "(replicas)": 5,
    }
    assert world.post("replay/purge", {"topic": "travel"}).json()["removed"]["travel"] == 1
    assert not (tmp_path / "replay" / "travel.records").read_bytes()
    assert world.post("replay/purge", {"topic": "cooking"}).status_code == 404
    hosts[0].dead = hosts[1].dead = True
    for body in ({"all": True}, {"request_id": "art-a"}):
        removed = world.post("replay/purge", body).json()["removed"]
        assert {name for name, count in removed.items() if count is None} == {
            "(shard host 0)",
            "(shard host 1)",
        }
    unknown = world.post("replay/purge", {"topic": "art"})
    assert (unknown.status_code, unknown.headers["Retry-After"]) == (503, "1")
    assert unknown.json()["error"]["code"] == "server_overloaded"
    assert world.post("replay/purge", {"topic": "sql"}).status_code == 200


def test_a_purge_needs_no_registry(
    target: TargetReplica, target_folder: Path, tmp_path: Path
) -> None:
    settings = ReplaySettings(held_out_fraction=0.0)
    host: Any = Remote(ShardHost(0, 1, TOPICS, settings, str(tmp_path), persist=False))
    data = encode(make_record(request_id="cmpl-a", created=time.time()))
    asyncio.run(shard_of("sql", [host]).insert.remote(data))  # type: ignore[arg-type]
    actors = nothing_learns(shard_hosts=[host])
    ingress_settings = IngressSettings("m", str(target_folder), None, ("general",), 1.0, 0.5, 8)
    api = Ingress(ingress_settings, Handle(target), None, actors).api()  # type: ignore[arg-type]

    async def purge() -> httpx.Response:
        transport = httpx.ASGITransport(api, client=("127.0.0.1", 5))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            return await http.post("/v1/paceline/replay/purge", json={"request_id": "cmpl-a"})

    answer = asyncio.run(purge())
    assert answer.json() == {"removed": {"sql": 1, "general": 0, "(replicas)": 0}}


def test_an_answer_is_purged_with_all_its_choices_and_no_other(world: World) -> None:
    world.insert("cmpl-a-0", "cmpl-a-1", "cmpl-ab-0", "cmpl-b-0")
    assert world.post("replay/purge", {"request_id": "cmpl-a"}).json() == {
        "removed": {"sql": 2, "general": 0, "(replicas)": 5}
    }
    assert world.shards["sql"].stats().records("train") == 2
    assert world.post("replay/purge", {"topic": "sql"}).json()["removed"]["sql"] == 2
    assert world.post("replay/purge", {"topic": "art"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "invalid_value", "all"),
        ({"topic": None, "all": False}, "invalid_value", "all"),
        ({"topic": "sql", "all": True}, "invalid_value", "all"),
        ({"topic": "sql", "request_id": "cmpl-a"}, "invalid_value", "all"),
        ({"all": 1}, "invalid_type", "all"),
        ({"topics": ["sql"]}, "unknown_parameter", "topics"),
    ],
)
def test_a_purge_that_does_not_say_of_what_removes_nothing(
    world: World, body: Any, code: str, param: str
) -> None:
    world.insert("cmpl-a-0")
    answer = world.post("replay/purge", body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)
    assert world.shards["sql"].stats().records("train") == 1
    assert world.purged == []


def test_a_dead_shard_differs_from_an_empty_one(world: World) -> None:
    world.insert("cmpl-a-0")
    world.handles["general"].dead = True
    assert world.post("replay/purge", {"all": True}).json() == {
        "removed": {"sql": 1, "general": None, "(replicas)": 5}
    }


def test_draining_is_known_to_all_and_ends(world: World) -> None:
    world.scheduler.report_load("r", 2, 1)
    answer = world.post("drain", {}).json()
    assert answer == {"draining": True, "running": 2, "waiting": 1}
    other = DrainState(world.handles["scheduler"])
    asyncio.run(other.refresh())
    for view in (world.drain, other):
        with pytest.raises(ApiError) as refused:
            view.check()
        assert (refused.value.status, refused.value.headers()) == (503, {"Retry-After": "5"})
    world.scheduler.report_load("r", 0, 0)
    world.admitted = 3  # their replica has died, or they wait for a grammar
    assert world.post("drain", {}).json() == {"draining": True, "running": 0, "waiting": 3}
    world.admitted = 0
    assert not world.scheduler.may_train()
    world.handles["scheduler"].dead = True
    asyncio.run(other.refresh())
    assert other.draining  # the last known state holds
    world.handles["scheduler"].dead = False
    assert world.post("drain", {"on": False}).json()["draining"] is False
    world.drain.check()


def test_a_dead_part_is_a_503_that_does_not_say_what_was_done(world: World) -> None:
    world.handles["registry"].dead = world.handles["scheduler"].dead = True
    for path, body in (("rollback", {"topic": "sql"}), ("drain", {})):
        answer = world.post(path, body)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unknown_outcome"
        assert "Retry-After" not in answer.headers  # it may have been done


def test_a_part_that_was_never_there_is_a_503_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing_actor(name: str, _: str) -> Any:
        raise ValueError(f"Failed to look up actor with name '{name}'")

    monkeypatch.setattr(ray, "get_actor", missing_actor)
    world.operations._registry = world.operations._scheduler = NamedActor("paceline-somebody")
    world.handles |= {t: shard_of(t, [NamedActor("paceline-nobody")]) for t in TOPICS}
    for path, body in (("rollback", {"topic": "sql"}), ("drain", {})):
        answer = world.post(path, body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
    removed = world.post("replay/purge", {"all": True}).json()["removed"]
    assert removed == {"sql": None, "general": None, "(replicas)": 5}


@pytest.mark.parametrize(
    ("client", "headers", "keyed", "status"),
    [
        ("127.0.0.1", {}, False, 200),
        ("::1", {}, False, 200),
        ("10.0.0.9", {}, False, 403),
        ("10.0.0.9", {}, True, 200),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.9"}, False, 403),
        ("127.0.0.1", {"origin": "http://elsewhere"}, False, 403),
        ("127.0.0.1", {"origin": "http://elsewhere"}, True, 403),
        ("127.0.0.1", {"content-type": "text/plain"}, False, 415),
    ],
)
def test_only_operators_may_call(
    tmp_path: Path, client: str, headers: dict[str, str], keyed: bool, status: int
) -> None:
    world = World(tmp_path, keyed=keyed)
    answer = world.post("drain", {"on": True}, client, **headers)
    assert answer.status_code == status
    assert world.scheduler.status().draining is (status == 200)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    world = World(tmp_path, enabled=False)
    world.insert("cmpl-a-0")
    assert world.post("replay/purge", {"all": True}).status_code == 403
    assert world.shards["sql"].stats().records("train") == 1


@pytest.fixture
def asked(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """The commands' calls go to that world, whose target has two replicas."""

    def call(_: str, method: str, path: str, body: Any = None, *_options: Any) -> Any:
        if (method, path) == ("GET", "/v1/paceline/status"):
            poll = world.registry.wait_for_changes
            present = asyncio.run(poll({}, None, 0.0)).weights
            loaded = {slot: weights.weight_version for slot, weights in present.items()}
            for name in ("one", "two"):
                asyncio.run(poll(loaded | world.behind.get(name, {}), None, 0.0, name))
            return {
                "live_drafts": {
                    topic: asdict(own) for topic, own in world.registry.topic_status().items()
                },
                "scheduler": {"replicas": 2},
            }
        assert method == "POST"
        answer = world.post(path.removeprefix("/v1/paceline/"), body)
        if answer.status_code != 200:
            error = answer.json()["error"]
            raise CallError(error["message"], error["code"])
        return answer.json()

    monkeypatch.setattr(operations_command, "call", call)
    monkeypatch.setattr(operations_command, "_POLL_S", 0.0)
    return world


def asleep(monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], None]) -> None:
    """Call that where a command sleeps, and only there: other threads may sleep meanwhile."""
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(operations_command, "time", clock)


def test_the_commands_say_what_came_of_it(asked: World) -> None:
    said: list[str] = []
    say: Callable[[str], None] = said.append
    asked.publish(1.0)
    asked.publish(2.0)
    operations_command.roll_back("u", "sql", None, say)
    asked.insert("cmpl-a-0")
    asked.handles["general"].dead = True
    assert not operations_command.purge("u", {"all": True}, say)
    assert said == [
        "sql: stable is version 3, with the weights of the one before",
        "sql: 1 removed",
        "general: does not answer, try again",
        "(replicas): 5 removed",
    ]
    with pytest.raises(CallError, match="no topic art"):
        operations_command.roll_back("u", "art", None, say)


def test_a_rollback_succeeds_only_if_every_replica_takes_it(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_command, "_ROLLOUT_S", 0.05)
    for value in (1.0, 2.0):
        asked.publish(value)
    asked.behind["two"] = {"sql": 2}
    said = list[str]()
    with pytest.raises(CallError, match=r"version 3 is stable.*within 0 s: two;"):
        operations_command.roll_back("u", "sql", None, said.append)
    assert said == []
    asked.behind.clear()
    operations_command.roll_back("u", "sql", 1, said.append)
    assert said == ["sql: stable is version 4, with the weights of version 1"]
    asked.registry._canary = CanarySettings()
    asked.publish(5.0)
    operations_command.roll_back("u", "sql", None, said.append)
    assert said[1:] == ["sql: stable is version 4, candidate 5 is withdrawn"]


@pytest.mark.parametrize("canary", [False, True])
@pytest.mark.parametrize("lost", [NoAnswerError("reset"), CallError("?", "unknown_outcome")])
def test_a_rollback_with_a_lost_answer_is_done_once(
    asked: World, monkeypatch: pytest.MonkeyPatch, lost: CallError, canary: bool
) -> None:
    for value in (1.0, 2.0, 3.0):
        asked.publish(value)
    if canary:
        asked.registry._canary = CanarySettings()
        asked.publish(4.0)
    answered, losses, said = operations_command.call, [lost], list[str]()

    def call(url: str, method: str, *rest: Any) -> Any:
        answer = answered(url, method, *rest)
        if method == "POST" and losses:
            raise losses.pop()
        return answer

    monkeypatch.setattr(operations_command, "call", call)
    operations_command.roll_back("u", "sql", None, said.append)
    assert asked.served() == (3.0 if canary else 2.0)
    stable = 3 if canary else 4
    [line] = said
    assert line.startswith(f"sql: stable is version {stable} (an answer was lost")
    with pytest.raises(CallError, match="nothing was changed"):  # as the operator repeats it
        operations_command.roll_back("u", "sql", None, said.append, expected=4 if canary else 3)
    assert asked.registry.topic_status()["sql"].stable == stable


def test_a_rollback_without_an_answer_explains_how_to_repeat_it(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.publish(1.0)
    asked.handles["registry"].dead = True
    with pytest.raises(NoAnswerError, match="rollback sql --expect 1` rolls back only if this did"):
        operations_command.roll_back("u", "sql", None, print)
    asked.handles["registry"].dead = False
    answered = operations_command.call

    def call(url: str, method: str, *rest: Any) -> Any:
        if method == "POST" and asked.registry.stable_versions()["sql"] == 1:
            asked.registry._canary = CanarySettings()
            if asked.registry.topic_status()["sql"].candidate is None:
                asked.publish(2.0)
                raise NoAnswerError("reset before it came")
        return answered(url, method, *rest)

    monkeypatch.setattr(operations_command, "call", call)
    with pytest.raises(CallError, match="version 2 is served, and not 1: nothing was changed"):
        operations_command.roll_back("u", "sql", None, print)
    assert asked.registry.topic_status()["sql"].candidate == 2


def test_the_command_waits_until_nothing_is_under_way(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        asked.scheduler.report_load("r", 0, 0)

    asked.scheduler.report_load("r", 1, 0)
    asleep(monkeypatch, sleep)
    assert operations_command.drain("u", said.append)
    assert said[:2] == ["draining: 1 running, 0 waiting", "draining: 0 running, 0 waiting"]
    assert said[2].startswith("no request is left")
    assert len(waits) == 4  # one look is not enough
    asked.scheduler.report_load("r", 1, 0)
    assert not operations_command.drain("u", said.append, wait_s=-1.0)
    assert operations_command.drain("u", said.append, on=False)
    assert not asked.scheduler.status().draining


def test_the_status_fits_a_screen_and_names_what_is_dead() -> None:
    status = {
        "target": {
            "model_type": "llama",
            "dtype": "bfloat16",
            "device": "cpu",
            "numerics": "invariant",
            "running": 1,
            "waiting": 0,
            "kv_blocks_total": 64,
            "kv_blocks_available": 60,
            "draft_failures": 0,
        },
        "scheduler": {"may_train": False, "paused": False, "draining": False, "running": 1}
        | {"replicas": 1, "waiting": 0},
        "weight_versions": {"general": 0, "sql": 3},
        "live_drafts": {"sql": {"candidate": 4, "requests": 9, "rounds": 40, "accepted": 30}},
        "shards": {
            "sql": {"splits": {"train": {"records": 7}, "held_out": {"records": 2}}},
            "general": {"error": "Died"},
        },
        "trainer": {"error": "ActorDiedError"},
        "decisions": [],
    }
    words = tables.status_text("http://x", status)
    assert "4 of 64 KV blocks" in words
    assert "training waits" in words
    row = next(line for line in words.splitlines() if line.startswith("sql"))
    assert row.split() == ["sql", "3", "4", "0.75", "9", "9"]
    assert "trainer   does not answer (ActorDiedError)" in words
    assert len(words.splitlines()) <= 24
    assert "leases" not in words  # this status has none
    scheduler = TrainerScheduler()
    scheduler.acquire_topic(TrainerIdentity("paceline-trainer"), "life", {"sql": 1.0})
    assert scheduler.acquire_permit("paceline-trainer", "life") is Permit.GRANTED
    busy = status | {
        "scheduler": asdict(scheduler.status()),
        "further_trainers": {"t-2": {"state": "training"}, "t-3": {"error": "TimeoutError"}},
    }
    words = tables.status_text("http://x", busy)
    assert "leases    1 working; 0 of 0 s idle used, 0 killed" in words
    assert words.count("trainer   ") == 3
    assert "trainer   is loading, or busy" in words
    still = status | {"trainer": None, "records": False}
    still["scheduler"] = status["scheduler"] | {"may_train": True}
    words = tables.status_text("http://x", still)
    assert "training off" in words
    assert "records   off" in words
    bare = tables.status_text("http://x", {"target": {"error": "TimeoutError"}})
    assert "the target does not answer (TimeoutError)" in bare
    assert "trainer   off" in bare


def test_drain_is_repeated_to_a_scheduler_that_restarts(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    asked.scheduler.report_load("r", 1, 0)
    steps = iter([("dead", True), ("dead", False), ("idle", None), *9 * [("", None)]])

    def pass_time(_: float) -> None:
        what, value = next(steps)
        if what == "dead":
            asked.handles["scheduler"].dead = bool(value)
            asked.scheduler.drain(on=False)  # as one that was made again
        if what == "idle":
            asked.scheduler.report_load("r", 0, 0)

    asleep(monkeypatch, pass_time)
    assert operations_command.drain("u", said.append)
    assert any("did not answer" in line for line in said)
    assert asked.scheduler.status().draining


def test_a_drain_outlasts_an_ingress_replica_that_does_not_answer(
    asked: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    silent = iter([True, False, False, False, True, *4 * [False]])

    def pass_time(_: float) -> None:
        asked.ingress_silent = next(silent)

    asleep(monkeypatch, pass_time)
    asked.ingress_silent = True
    assert operations_command.drain("u", said.append)
    *lines, done = said
    silence = "The server is draining; an ingress replica does not say what it still runs."
    assert lines == 2 * [silence, "draining: 0 running, 0 waiting"]
    assert done.startswith("no request is left")
    assert next(silent, None) is None  # a look that failed does not count: four more were needed
    asked.ingress_silent = True
    assert operations_command.drain("u", said.append, on=False)
    assert not asked.scheduler.status().draining


def test_a_name_that_is_not_loopback_s_gives_a_proxy_away(world: World) -> None:
    assert world.post("drain", {"on": True}, host="paceline.example").status_code == 403
    assert world.post("drain", {"on": True}, host="localhost:8000").status_code == 200


def test_remote_errors_are_shown_without_their_traceback(world: World) -> None:
    class RefusedError(ValueError):
        """As Ray raises it: the text is a traceback, the cause is behind it."""

        cause = ValueError("sql: the weights of version 9 are not there")

    def roll_back(*_: object) -> int:
        raise RefusedError("ray::WeightRegistry.roll_back() (pid=7)\nTraceback ...")

    world.handles["registry"].part = type("Part", (), {"roll_back": staticmethod(roll_back)})
    answer = world.post("rollback", {"topic": "sql", "version": 9})
    assert answer.status_code == 409
    assert "Traceback" not in answer.json()["error"]["message"]
    assert "version 9" in answer.json()["error"]["message"]
