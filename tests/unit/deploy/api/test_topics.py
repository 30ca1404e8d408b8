"""Adding a topic through the ingress, over the real registry, router and target in a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
from fixture_models import ROUTER, SMALL_MODELS
from local_ingress import Handle, SchedulerHandle
from replay_samples import make_record
from tiny_models import save_tiny, tiny_tokenizer
from topic_examples import trips

from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.router.router import TopicRouter
from paceline.actors.speculation.pending_updates import SwapWeights
from paceline.actors.weights.flat_weights import unflatten
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.subscriber import RegistrySubscriber
from paceline.actors.weights.topics import TopicActors
from paceline.cluster.learning_actors import LearningActors
from paceline.cluster.named_actor import NamedActor
from paceline.deploy.api import topic_admin as negatives
from paceline.deploy.api.ingress import Ingress, IngressSettings
from paceline.deploy.api.prompt_encoder import PromptEncoder
from paceline.deploy.api.topic_admin import TopicAdminSettings
from paceline.deploy.cli.operations import read_examples, server_url
from paceline.deploy.cli.tables import added_topic_lines, topic_table
from paceline.deploy.config.config import WEIGHTS_FOLDER, load_config
from paceline.deploy.config.replica_settings import topic_refusal
from paceline.deploy.demo.prompts import generate
from paceline.deploy.errors import ConfigError

EXPERTS = ("general", "math", "code", "sql", "shell")
URL = "/v1/paceline/topics"
BODY = {"name": "travel", "examples": trips(40)}


class Answer:
    """What a call has given, or raised: it may be awaited, or left alone."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._error: Exception | None = None
        try:
            self._found = call()
        except Exception as error:
            self._error = error

    def __await__(self) -> Generator[Any, None, Any]:
        if self._error is not None:
            raise self._error
        if asyncio.iscoroutine(self._found):
            return (yield from self._found.__await__())
        return self._found


@pytest.fixture(autouse=True, scope="module")
def local_references() -> Iterator[None]:
    """Subscribers wait for an Answer in place of Ray's reference, and end with the module."""
    started: list[RegistrySubscriber] = []
    start = RegistrySubscriber.start

    async def awaited(answer: Answer) -> Any:
        return await answer

    def start_noted(own: RegistrySubscriber) -> None:
        started.append(own)
        start(own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RegistrySubscriber, "get", lambda _, answer, _s: asyncio.run(awaited(answer)))
        patch.setattr(RegistrySubscriber, "start", start_noted)
        yield
        for own in started:
            own.stop(0.0)


class Actor:
    """A handle of Ray's shape whose methods run here."""

    def __init__(self, instance: Any) -> None:
        self._instance = instance

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._instance, name)
        return SimpleNamespace(remote=lambda *arguments: Answer(lambda: method(*arguments)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, vocab = tmp_path_factory.mktemp("models"), len(tiny_tokenizer())
    return {
        name: save_tiny(root / name, seed, vocab=vocab, layers=layers)
        for name, seed, layers in (("target", 1, 2), ("draft", 2, 1))
    }


class System:
    """What a server has, in one process; the handles of the real one hold what these hold."""

    def __init__(self, folders: dict[str, Path], state: Path, **rules: Any) -> None:
        drafts = dict.fromkeys(EXPERTS, str(folders["draft"]))
        self.registry = WeightRegistry(
            str(state / WEIGHTS_FOLDER), EXPERTS, "mark", initial=drafts, put=lambda x: x
        )
        self.shards = {topic: ReplayShard(topic) for topic in EXPERTS}
        handles = {topic: Actor(shard) for topic, shard in self.shards.items()}
        self.router = TopicRouter(str(ROUTER), registry=Actor(self.registry))
        self.target = TargetReplica(
            TargetSettings(
                str(folders["target"]),
                drafts,
                dtype="float32",
                num_threads=1,
                max_num_seqs=4,
                num_speculative_tokens=2,
            ),
            handles,
        )
        actors = LearningActors(handles, Actor(self.registry), SchedulerHandle(), None)
        settings = IngressSettings(
            "m",
            str(folders["target"]),
            None,
            EXPERTS,
            20.0,
            0.5,
            64,
            topics=TopicAdminSettings(**rules),
        )
        self.ingress = Ingress(settings, Handle(self.target), Actor(self.router), actors)
        self.api = self.ingress.api()

    def door(self, host: str = "127.0.0.1") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.api, client=(host, 5))
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    def take_up(self) -> None:
        """What the target's threads and the topic supervisor do over Ray."""
        self.shards["travel"] = ReplayShard("travel")
        self.registry.register_actors("travel", TopicActors(Actor(self.shards["travel"])))
        self.target._add_topics(self.registry.topics())
        stable = self.registry.stable_weights("travel")
        state = unflatten(stable.reference)
        self.target._loop.update(SwapWeights("travel", stable.weight_version, state))

    def close(self) -> None:
        self.target._loop.close()


@pytest.fixture(scope="module")
def shared(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """For calls that change nothing."""
    system = System(folders, tmp_path_factory.mktemp("state"))
    yield system
    system.close()


def post(system: System, body: Any, host: str = "127.0.0.1", **headers: str) -> httpx.Response:
    async def ask() -> httpx.Response:
        async with system.door(host) as http:
            kind = {"content-type": "application/json"}
            return await http.post(URL, content=json.dumps(body), headers=kind | headers)

    return asyncio.run(ask())


def code(answer: httpx.Response) -> tuple[int, str | None]:
    return answer.status_code, answer.json()["error"]["code"]


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.005)


def test_a_topic_is_added_and_its_requests_get_its_expert(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    system = System(folders, tmp_path)
    ask = {"model": "m", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    prompts = trips(30, seed=7)[20:]

    async def texts(http: httpx.AsyncClient, **more: Any) -> list[Any]:
        bodies = [ask | {"prompt": prompt} | more for prompt in prompts]
        answers = await asyncio.gather(*(http.post("/v1/completions", json=b) for b in bodies))
        assert {answer.status_code for answer in answers} == {200}
        return [answer.json() for answer in answers]

    async def scenario() -> None:
        async with system.door() as http:
            await texts(http)  # so that what follows the registry is there
            answer = (await http.post(URL, json=BODY)).json()
            assert answer["weight_version"] == 1
            assert answer["router"]["recall"] >= 0.8
            assert max(answer["router"]["moved_by_topic"].values()) <= 0.1
            system.take_up()
            await until(lambda: "travel" in system.target._loop.stats().drafts)
            await until(lambda: "travel" in system.router._classifier.labels)
            rows = (await http.get(URL)).json()["data"]
            assert rows[-1] == {
                "name": "travel",
                "added": True,
                "weight_version": 1,
                "routed": True,
                "drafting": True,
                "records": 0,
            }
            assert [row["name"] for row in rows] == [*EXPERTS, "travel"]
            found = await texts(http)
            figures = [a["metrics"]["speculative_decoding"] for a in found]
            own = [f for f in figures if f["topic"] == f["draft"] == "travel"]
            assert len(own) >= 7
            assert all(f["num_draft_tokens"] > 0 and f["weight_version"] == 1 for f in own)
            plain = await texts(http, speculative={"draft": "off"})
            words = [[a["choices"][0]["text"] for a in answers] for answers in (found, plain)]
            assert words[0] == words[1]
            again = await http.post(URL, json=BODY)
            assert code(again) == (409, "topic_exists")

    asyncio.run(scenario())
    assert system.target._loop.stats().draft_failures == 0
    system.close()  # which hands over all records
    assert system.shards["travel"].stats().inserted_total >= 7
    config = load_config(None, SMALL_MODELS | {"state_dir": str(tmp_path)}).with_added_topics()
    assert config.drafts.topics == (*EXPERTS[1:], "travel")
    assert config.draft_paths["travel"] == config.draft_paths["general"]


@pytest.mark.parametrize(
    ("host", "headers", "expected"),
    [
        ("192.0.2.7", {}, (403, "forbidden")),
        ("", {}, (403, "forbidden")),
        ("127.0.0.1", {"x-forwarded-for": "192.0.2.7"}, (403, "forbidden")),
        ("127.0.0.1", {"origin": "http://127.0.0.1:8000"}, (403, "forbidden")),
        ("127.0.0.1", {"content-type": "text/plain"}, (415, "invalid_type")),
        ("::1", {}, (400, "invalid_value")),
        ("::ffff:127.0.0.1", {}, (400, "invalid_value")),
    ],
)
def test_only_an_operator_at_the_server_itself_may_add(
    shared: System, host: str, headers: dict[str, str], expected: tuple[int, str]
) -> None:
    assert code(post(shared, {"name": "Bad name"}, host, **headers)) == expected


@pytest.mark.parametrize(
    ("body", "status", "error", "param"),
    [
        (None, 400, "invalid_type", None),
        ({"examples": trips(20)}, 400, "missing_required_parameter", "name"),
        *((BODY | {"name": n}, 400, "invalid_value", "name") for n in ("off", "suffix", "mixed")),
        (BODY | {"name": "../x"}, 400, "invalid_value", "name"),
        (BODY | {"name": "general"}, 400, "invalid_value", "name"),
        (BODY | {"name": "sql"}, 409, "topic_exists", "name"),
        (BODY | {"examples": trips(11) * 2}, 400, "invalid_value", "examples"),
        (BODY | {"examples": [*trips(20), " "]}, 400, "invalid_value", "examples.20"),
        (BODY | {"examples": [1]}, 400, "invalid_type", "examples.0"),
        (BODY | {"mood": 1}, 400, "unknown_parameter", "mood"),
        (
            {"name": "queries", "examples": generate("sql", 30, 77)},
            400,
            "topic_not_separable",
            "examples",
        ),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(
    shared: System, body: Any, status: int, error: str, param: str | None
) -> None:
    answer = post(shared, body)
    assert code(answer) == (status, error)
    assert answer.json()["error"]["param"] == param
    assert shared.registry.topics().topics == ()


def test_a_server_may_refuse_all_additions(folders: dict[str, Path], tmp_path: Path) -> None:
    fixed = System(folders, tmp_path / "fixed", mutable=False)
    full = System(folders, tmp_path / "full", restart_reason="No room.", max_topics=4)
    many = System(folders, tmp_path / "many", max_topics=4)
    try:
        assert code(post(fixed, BODY)) == (403, "forbidden")
        assert code(post(full, BODY)) == (409, "topic_needs_restart")
        assert code(post(many, BODY)) == (409, "too_many_topics")
        for system in (fixed, full):
            assert not asyncio.run(system.ingress._topic_admin.list_topics())["mutable"]
    finally:
        fixed.close()
        full.close()
        many.close()


def test_a_dead_registry_or_router_is_a_503_and_adds_nothing(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = System(folders, tmp_path)

    async def dead(*_: object) -> None:
        raise ConnectionError

    handle = SimpleNamespace(
        topics=SimpleNamespace(remote=dead), fit_topic=SimpleNamespace(remote=dead)
    )
    admin = system.ingress._topic_admin
    try:
        admin._router, alive = handle, admin._router
        assert code(post(system, BODY)) == (503, "server_overloaded")
        admin._router = alive
        admin._actors = LearningActors({}, handle, SchedulerHandle(), None)
        assert code(post(system, BODY)) == (503, "server_overloaded")
        assert system.registry.topics().topics == ()
        monkeypatch.setattr(ray, "get_actor", missing_actor)
        never = NamedActor("paceline-registry")  # on a cluster, before its first start
        admin._actors = LearningActors({"sql": never}, never, SchedulerHandle(), None)
        assert code(post(system, BODY)) == (503, "server_overloaded")
        rows = asyncio.run(admin.list_topics())["data"]
        assert [(row["weight_version"], row["records"]) for row in rows] == [(None, None)] * 5
    finally:
        system.close()


def missing_actor(name: str, _: str) -> Any:
    raise ValueError(f"Failed to look up actor with name '{name}'")


def test_an_addition_without_an_answer_is_not_called_undone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    system = System(folders, tmp_path)

    async def lost(*arguments: Any) -> None:
        system.registry.add_topic(*arguments)
        raise ConnectionError

    class Losing(Actor):
        add_topic = SimpleNamespace(remote=lost)

    losing = LearningActors({}, Losing(system.registry), SchedulerHandle(), None)
    system.ingress._topic_admin._actors = losing
    try:
        assert code(post(system, BODY)) == (503, "unknown_outcome")
        assert [topic.name for topic in system.registry.topics().topics] == ["travel"]
    finally:
        system.close()


def test_stored_prompts_of_other_topics_are_kept_as_the_router_saw_them() -> None:
    tokenizer = tiny_tokenizer()
    encoder = PromptEncoder(tokenizer, len(tokenizer))
    turns = ("user", "hello"), ("assistant", "What is it?"), ("user", "SELECT name")
    chat = [{"role": role, "content": text} for role, text in turns]
    templated = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    settings = ReplaySettings(held_out_fraction=0.0)
    shard, general = (
        ReplayShard(topic, settings, clock=lambda: 1_000.0) for topic in ("sql", "general")
    )
    for own in (shard, general):
        for prompt in (templated, [*templated, 5, 6], encoder.encode_text("SELECT age")):
            own.insert(encode(make_record(prompt=tuple(prompt), request_id=str(len(prompt)))))

    async def dead(*_: object) -> None:
        raise ConnectionError

    broken = SimpleNamespace(sample=SimpleNamespace(remote=dead))
    handles = {"sql": Actor(shard), "general": Actor(general), "math": broken}
    found = asyncio.run(negatives.stored_prompts(handles, encoder))
    assert sorted(found) == ["SELECT age", "SELECT name", "SELECT name"]
    tokenizer.chat_template = "{{ messages[-1].content }}"  # no marks: what is a user's?
    unmarked = PromptEncoder(tokenizer, len(tokenizer))
    assert asyncio.run(negatives.stored_prompts(handles, unmarked)) == []
    assert len(set(negatives.bundled_prompts())) > 300


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, False),
        ({"drafts.placement": "pool"}, False),
        ({"drafts.placement": "pool", "drafts.num_gpus": 0.1}, True),
        ({"drafts.general": "none"}, True),
    ],
)
def test_a_topic_without_a_draft_or_a_place_for_it_needs_a_restart(
    changes: dict[str, Any], refused: bool
) -> None:
    assert (topic_refusal(load_config(None, changes)) is not None) == refused


def test_added_topics_are_those_of_the_state_folder(tmp_path: Path) -> None:
    config = load_config(None, SMALL_MODELS | {"state_dir": str(tmp_path)})
    assert config.with_added_topics() is config
    registry = WeightRegistry(
        str(tmp_path / WEIGHTS_FOLDER),
        config.drafts.experts,
        "mark",
        initial={name: str(path) for name, path in config.draft_paths.items()},
        put=lambda x: x,
    )
    registry.add_topic("travel", "general")
    merged = config.with_added_topics()
    assert merged.drafts.experts == (*config.drafts.experts, "travel")
    named = load_config(
        None, {"state_dir": str(tmp_path), "drafts.topics": ["travel"], "drafts.general": "/x"}
    )
    assert named.with_added_topics() == named


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", "one\n\n  two \n{three}\n", ["one", "two", "{three}"]),
        ("a.jsonl", '{"prompt": "one"}\n\n{"prompt": "two\\nlines", "topic": "x"}\n', None),
        ("a.jsonl", '{"prompt": "a\u2028b"}\r\n', ["a\u2028b"]),
    ],
)
def test_examples_are_read_from_lines_or_json_lines(
    tmp_path: Path, name: str, content: str, found: list[str] | None
) -> None:
    (tmp_path / name).write_text(content)
    assert read_examples(tmp_path / name) == (found or ["one", "two\nlines"])


@pytest.mark.parametrize("content", ['{"text": "x"}', "one", '{"prompt": 3}', "[1]"])
def test_a_line_without_a_prompt_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n' + content)
    with pytest.raises(ConfigError, match=r"a\.jsonl: line 2"):
        read_examples(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"nowhere"):
        read_examples(tmp_path / "nowhere.txt")


def test_the_command_finds_the_server_and_says_what_was_measured() -> None:
    assert server_url(load_config()) == "http://127.0.0.1:8000"
    assert server_url(load_config(None, {"host": "::", "port": 9})) == "http://[::1]:9"
    answer = {
        "name": "travel",
        "weight_version": 1,
        "examples": 40,
        "router": {
            "recall": 0.975,
            "moved": 0.01,
            "moved_by_topic": {"general": 0.05, "sql": 0.0},
            "prompts_by_topic": {"general": 60, "sql": 240},
            "examples_before": {"general": 38, "math": 2},
        },
    }
    words = "\n".join(added_topic_lines(answer))
    for part in ("version 1", "97.5% of 40", "38 general, 2 math", "1.0% of 300", "5.0% of 60"):
        assert part in words
    assert "off" in added_topic_lines(answer | {"router": None})[1]
    row = {"name": "x", "added": True, "weight_version": None, "routed": None, "drafting": False}
    assert topic_table([row | {"records": 3}]).splitlines()[1].split() == [
        "x", "added", "?", "?", "no", "3",
    ]  # fmt: skip
