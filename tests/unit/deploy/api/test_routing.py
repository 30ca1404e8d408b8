"""From a router's probabilities and a measured table to the draft of a real request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from local_ingress import Handle, nothing_learns
from tiny_models import save_tiny, tiny_tokenizer

from paceline.actors.engine.request import GenerationChunk, GenerationRequest, SamplingParams
from paceline.actors.engine.settings import TargetSettings
from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay import held_records
from paceline.actors.replay.record import ReplayRecord, decode
from paceline.actors.router.policy import Route
from paceline.actors.training.scorer import ScorerTable
from paceline.actors.weights.slots import slot_for
from paceline.deploy.api import routing
from paceline.deploy.api.ingress import Ingress, IngressSettings
from paceline.deploy.api.routing import (
    RouteSelector,
    RoutingRateLimiter,
    RoutingTable,
    canary_route,
)
from paceline.deploy.config.config import load_config
from paceline.deploy.config.learning_settings import evaluates_experts
from paceline.deploy.learning import load_evaluator

EXPERTS = ("general", "sql")
AGAINST_SQL = ScorerTable(
    weights={"sql": {"sql": 0.1, "general": 0.9}},
    acceptance={},
    rows={},
    versions={},
    waiting=0,
    on_trial=(),
    offered=0,
    refused=0,
    scores=0,
)


def remote(**calls: Callable[..., Any]) -> Any:
    """A handle of Ray's shape whose methods run here."""
    return SimpleNamespace(**{n: SimpleNamespace(remote=call) for n, call in calls.items()})


async def sure(_text: str) -> dict[str, float]:
    return {"sql": 0.95, "general": 0.05}


async def unsure(_text: str) -> dict[str, float]:
    return {"sql": 0.05, "general": 0.95}


def answers(*said: Any) -> Callable[[], Awaitable[Any]]:
    """One answer after the other, the last one for ever; an exception is raised."""
    left = list(said)

    async def answer() -> Any:
        now = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(now, Exception):
            raise now
        return now

    return answer


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.001)


def test_the_table_is_followed_and_its_source_may_die_for_a_while() -> None:
    now = [0.0]
    said = answers(RuntimeError("not up"), "odd", AGAINST_SQL, OSError("dead"))
    table = RoutingTable(remote(table=said), lambda: now[0], interval_s=0.0, max_age_s=5.0)

    async def follow() -> None:
        assert table.weights() is None
        await until(lambda: table.weights() is not None)
        assert table.weights() == AGAINST_SQL.weights
        now[0] = 5.5
        assert table.weights() is None

    asyncio.run(follow())


def test_a_trial_gets_as_many_stable_requests_as_candidates_and_no_others() -> None:
    lost, names = Route("sql", "general"), [f"chatcmpl-{n}-0" for n in range(2000)]
    taken = [name for name in names if canary_route(lost, name, {"sql"}, 0.1).draft == "sql"]
    assert all(canary_route(lost, name, {"sql"}, 0.1).topic == "sql" for name in names)
    held = {"sql", "sql@candidate"}
    slots = [slot_for("sql", name, 0.1, held) for name in taken]
    assert len(taken) / len(names) == pytest.approx(0.2, abs=0.03)
    assert slots.count("sql@candidate") / len(slots) == pytest.approx(0.5, abs=0.08)
    for other in (Route("sql", "sql"), Route("math", "general")):
        assert all(canary_route(other, name, {"sql"}, 0.1) == other for name in names)
    assert all(canary_route(lost, name, {"sql"}, 0.0) == lost for name in names)


def test_two_trials_at_once_give_both_slots_of_the_generalist_the_same_traffic() -> None:
    """Sql's trial takes requests from general's: as many from its candidate as from the other."""
    held = {"sql", "sql@candidate", "general", "general@candidate"}
    topics: dict[str, list[str]] = {"general": [], "general@candidate": []}
    for number in range(4000):
        topic, name = ("sql", "general")[number % 2], f"chatcmpl-{number}-0"
        route = canary_route(Route(topic, "general"), name, {"sql", "general"}, 0.1)
        if route.draft == "general":
            topics[slot_for("general", name, 0.1, held)].append(topic)
    expected = 0.8 / 1.8  # a fifth of sql's requests is sql's own
    for seen in topics.values():
        assert seen.count("sql") / len(seen) == pytest.approx(expected, abs=0.06)


def test_without_a_scorer_nothing_is_known_and_nothing_runs() -> None:
    assert RoutingTable(None, lambda: 0.0).weights() is None


def test_routes_are_counted_by_topic_and_expert() -> None:
    known: list[Any] = [None]
    selector = RouteSelector(
        remote(classify=sure), EXPERTS, 1.0, 0.5, lambda: 0.0, lambda: known[0]
    )
    assert asyncio.run(selector.select("SELECT")) == Route("sql", "sql")
    known[0] = AGAINST_SQL.weights
    for _ in range(2):
        assert asyncio.run(selector.select("SELECT")) == Route("sql", "general")
    assert selector.counts() == {"sql": {"sql": 1, "general": 2}}


ROUTED = GenerationRequest("r", (1,), SamplingParams(max_tokens=9))
LIMITED = replace(ROUTED, replayed=False)


def observe(
    limiter: RoutingRateLimiter, tokens: int, share: float, asked: GenerationRequest = ROUTED
) -> None:
    """Rounds of which a share drafts with a model, four tokens that are accepted."""
    seen = drafted = rounds = 0
    while seen < tokens:
        rounds += 1
        own = ((4, 4),) if drafted < share * rounds else ()
        drafted += len(own)
        given = (7,) * (5 if own else 1)
        limiter.observe(asked, GenerationChunk("a", given, rounds=own))
        seen += len(given)


def routed(limiter: RoutingRateLimiter, now: list[float]) -> int:
    """How many of sixty prompts within six seconds are routed."""
    count = 0
    for _ in range(60):
        count += limiter.allow("", recorded=True)
        now[0] += 0.1
    return count


@pytest.mark.parametrize(
    ("running", "share", "expected"),
    [
        (64, 0.0, 6),
        (4, 0.0, 6),
        (4, 0.04, 6),
        (4, 0.1, 60),
        (4, 0.6, 60),
        (4, 1.0, 60),
        (3, 0.0, 60),
        (1, 0.0, 60),
    ],
)
def test_one_prompt_a_second_is_routed_if_many_run_and_drafts_are_off(
    running: int, share: float, expected: int
) -> None:
    now, sequences = [1e6], [4]
    limiter = RoutingRateLimiter(lambda: sequences[0], lambda: now[0])
    observe(limiter, 3000, share)
    assert routed(limiter, now) == 60  # too little is known
    observe(limiter, 3000, share)
    sequences[0] = running
    assert routed(limiter, now) == expected


def test_rounds_that_suffixes_draft_say_nothing_of_drafts() -> None:
    limiter = RoutingRateLimiter(lambda: 8, lambda: 0.0)
    rounds = {"rounds": ((4, 4),), "suffix_rounds": ((9, 9),) * 9}
    for _ in range(100):  # of ten rounds that could have drafted with a model all did
        limiter.observe(ROUTED, GenerationChunk("a", (7,) * 95, **rounds))
    assert all(limiter.allow("", recorded=True) for _ in range(9))


def test_keys_have_limits_of_their_own() -> None:
    """The traffic of one must not keep the experts of another from learning."""
    now = [0.0]
    limiter = RoutingRateLimiter(lambda: 8, lambda: now[0])
    observe(limiter, 5000, 0.0)
    keys = ("a", "a", "b", "b", "")
    allowed = [limiter.allow(key, recorded=True) for key in keys]
    assert allowed == [True, False, True, False, True]
    now[0] = 1.0
    # What leaves no record has no use of being routed, and takes no other prompt's turn.
    assert not limiter.allow("a", recorded=False)
    assert [limiter.allow(key, recorded=True) for key in "ba"] == [True, True]


def test_drafts_are_measured_again_while_all_prompts_are_routed() -> None:
    """With one prompt a second routed they would stay off, whatever they have learnt."""
    now, sequences = [0.0], [8]
    limiter = RoutingRateLimiter(lambda: sequences[0], lambda: now[0])
    observe(limiter, 5000, 0.0)
    assert routed(limiter, now) == 6
    sequences[0] = 3
    observe(limiter, 50_000, 1.0)  # says nothing about more
    sequences[0] = 8
    assert routed(limiter, now) == 6
    observe(limiter, 33_000, 0.0, LIMITED)
    assert routed(limiter, now) == 60
    observe(limiter, 50_000, 0.0, LIMITED)  # of before, and still under way
    assert routed(limiter, now) == 60
    observe(limiter, 5000, 0.6)
    assert routed(limiter, now) == 60
    observe(limiter, 5000, 0.0)
    assert routed(limiter, now) == 6


@pytest.mark.parametrize("key", ["", "acme"])
def test_a_prompt_beyond_the_limit_is_neither_routed_nor_recorded(key: str) -> None:
    asked = []

    async def classify(text: str) -> dict[str, float]:
        asked.append(text)
        return await sure(text)

    experts = (*EXPERTS, "acme.general", "acme.sql")
    selector = RouteSelector(remote(classify=classify), experts, 1.0, 0.5, lambda: 0.0)
    general, sql = (f"{key}.{topic}" if key else topic for topic in EXPERTS)
    assert asyncio.run(selector.select(None, key)) == Route(general, general, classified=False)
    assert asyncio.run(selector.select("SELECT", key)) == Route(sql, sql)
    assert asked == ["SELECT"]
    assert dict(selector.calls) == {"answered": 1, "limited": 1}


def test_without_a_router_all_prompts_are_recorded() -> None:
    selector = RouteSelector(None, EXPERTS, 1.0, 0.5, lambda: 0.0)
    both = [asyncio.run(selector.select(text)) for text in ("SELECT", None)]
    assert both == [Route("general", "general")] * 2
    assert not selector.calls


def test_of_a_topic_s_requests_those_without_a_record_count_too() -> None:
    selector = RouteSelector(remote(classify=unsure), EXPERTS, 1.0, 0.5, lambda: 0.0)
    for text in ("SELECT", None, None):
        asyncio.run(selector.select(text))
    assert selector.counts() == {"general": {"general": 3}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("router.sample_share", 0),
        ("router.enabled", False),
        ("training.enabled", False),
        ("drafts.topics", []),
    ],
)
def test_scoring_is_on_where_there_is_a_choice_and_can_be_switched_off(
    key: str, value: object
) -> None:
    assert evaluates_experts(load_config())
    assert not evaluates_experts(load_config(None, {key: value}))


def test_training_goes_on_if_the_evaluator_cannot_load_its_drafts(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"target.path": str(models["target"]), "drafts.topics": ["sql"]}
    sound = load_config(None, paths | {"drafts.general": str(models["draft"])})
    found = load_evaluator(sound)
    assert found is not None
    assert set(found[0].draft_paths) == {"general", "sql"}
    assert load_evaluator(load_config(None, paths | {"router.sample_share": 0})) is None
    assert caplog.messages == []
    assert load_evaluator(load_config(None, paths | {"drafts.general": str(tmp_path)})) is None
    assert "are not evaluated" in caplog.text


class Kept:
    """The far side of shards and scorer: what a real target sends."""

    def __init__(self) -> None:
        self.shards: dict[str, list[ReplayRecord]] = {expert: [] for expert in EXPERTS}
        self.left_out = dict.fromkeys(EXPERTS, 0)
        self.offered: list[ReplayRecord] = []

    def shard(self, topic: str) -> Any:
        def insert(data: bytes, left_out: int) -> None:
            self.shards[topic].append(decode(data))
            self.left_out[topic] += left_out

        return remote(insert=insert)

    def scorer(self) -> Any:
        return remote(
            offer=lambda data: self.offered.append(decode(data)), table=answers(AGAINST_SQL)
        )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    vocab = len(tiny_tokenizer())
    return {
        name: save_tiny(root / name, seed, vocab=vocab, layers=layers)
        for name, seed, layers in (("target", 1, 2), ("draft", 2, 1))
    }


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def target(models: dict[str, Path], kept: Kept) -> Iterator[TargetReplica]:
    settings = TargetSettings(
        str(models["target"]),
        dict.fromkeys(EXPERTS, str(models["draft"])),
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        num_speculative_tokens=2,
        sample_share=1.0,
    )
    shards = {expert: kept.shard(expert) for expert in EXPERTS}
    replica = TargetReplica(settings, shards, scorer=kept.scorer())
    yield replica
    replica._loop.close()


def test_replay_is_kept_by_topic_whoever_drafts(
    target: TargetReplica, models: dict[str, Path], kept: Kept
) -> None:
    settings = IngressSettings("m", str(models["target"]), None, EXPERTS, 1.0, 0.5, 8)
    actors = nothing_learns(scorer=kept.scorer())
    ingress = Ingress(settings, Handle(target), remote(classify=sure), actors)
    api = ingress.api()
    body = {"model": "m", "prompt": "SELECT", "max_tokens": 6, "ignore_eos": True}

    async def ask() -> list[dict[str, Any]]:
        door = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here")
        async with door as http:

            async def post(**more: Any) -> dict[str, Any]:
                answer = (await http.post("/v1/completions", json=body | more)).json()
                figures: dict[str, Any] = answer["metrics"]["speculative_decoding"]
                return figures

            found = [await post()]  # before the table is there
            await until(lambda: ingress._routing_table.weights() is not None)
            found += [
                await post(),
                await post(speculative={"draft": "sql"}),
                await post(speculative={"draft": "general@0"}),
                await post(store=False),
                await post(speculative={"draft": "off"}),
                # nobody asks for the topic of these
                await post(speculative={"draft": "off"}, store=False),
                await post(speculative={"num_speculative_tokens": 0}, store=False),
            ]
            status = (await http.get("/v1/paceline/status")).json()
        await until(lambda: len(kept.shards["sql"]) == 5)
        assert status["routing"]["weights"] == AGAINST_SQL.weights
        assert status["routed"] == {"sql": {"sql": 1, "general": 4}}
        return found

    found = [(figures["topic"], figures["draft"]) for figures in asyncio.run(ask())]
    drafts = ["sql", "general", "sql", "general@0", "general", "off"]
    assert found == [*(("sql", draft) for draft in drafts), *[("general", "off")] * 2]
    recorded = [record.expert for record in kept.shards["sql"]]
    assert recorded == ["sql", "general", "sql", "general@0", "off"]
    assert kept.shards["general"] == []
    assert [r.request_id for r in kept.offered] == [r.request_id for r in kept.shards["sql"]]
    assert target._loop.stats().draft_failures == 0


def test_a_busy_server_with_its_drafts_off_routes_and_records_one_prompt_a_second(
    models: dict[str, Path], kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All answers are kept for suffix drafts; without `store` none is, and none is routed."""
    drafts = dict.fromkeys(EXPERTS, str(models["draft"]))
    engine = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    target = TargetReplica(
        TargetSettings(str(models["target"]), drafts, num_speculative_tokens=0, **engine),
        {expert: kept.shard(expert) for expert in EXPERTS},
    )
    settings = IngressSettings("m", str(models["target"]), None, EXPERTS, 1.0, 0.5, 64)
    ingress = Ingress(settings, Handle(target), remote(classify=sure), nothing_learns())
    ingress._routing_limiter._clock = lambda: 0.0  # within one second
    api = ingress.api()
    body = {"model": "m", "max_tokens": 4, "ignore_eos": True}
    monkeypatch.setattr(routing, "_MEASURED_TOKENS", 20)

    async def ask() -> list[Any]:
        door = httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here")
        async with door as http:

            async def post(prompts: int, **more: Any) -> Any:
                asked = body | {"prompt": ["SELECT"] * prompts} | more
                answer = (await http.post("/v1/completions", json=asked)).json()
                assert [c["finish_reason"] for c in answer["choices"]] == ["length"] * prompts
                return (await http.get("/v1/paceline/status")).json()["routed"]

            return [await post(6), await post(6, store=False), await post(6), await post(1)]

    found = asyncio.run(ask())
    sql, general = (lambda n: {"sql": {"sql": n}}), (lambda n: {"general": {"general": n}})
    assert found == [sql(6), sql(6) | general(6), sql(7) | general(11), sql(8) | general(11)]
    asyncio.run(until(lambda: len(kept.shards["sql"]) == 8))
    assert kept.shards["general"] == []
    target._loop.close()


def test_of_a_flood_some_are_kept_and_all_are_answered(
    target: TargetReplica, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_records, "_IDLE_S", 3600.0)
    held = target._held_records
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)

    async def ask(name: str, topic: str, *, store: bool = True, resumed: bool = False) -> int:
        asked = GenerationRequest(
            name,
            (5, 6, 7),
            sampling,
            topic,
            "sql",
            store=store,
            attempt=int(resumed),
            output_token_ids=(8,) if resumed else (),
        )
        return sum([len(chunk.token_ids) async for chunk in target.generate(asked)])

    async def flood() -> list[int]:
        found = [await ask("sql-a", "sql")]
        await until(lambda: len(held) == 1)
        held._max_bytes = 2 * held.num_bytes
        # Neither would be recorded anyway, so it is not the lack of room that leaves them out.
        found += [await ask("private", "sql", store=False), await ask("r", "sql", resumed=True)]
        found += [await ask("sql-b", "sql"), await ask("general-a", "general")]
        await until(lambda: len(held) == 2)
        return [*found, await ask("general-b", "general")]

    assert asyncio.run(flood()) == [4, 4, 3, 4, 4, 4]
    monkeypatch.undo()
    assert asyncio.run(ask("private", "sql", store=False)) == 4  # wakes the engine
    asyncio.run(until(lambda: not held))
    assert asyncio.run(ask("sql-c", "sql")) == 4
    asyncio.run(until(lambda: len(kept.shards["sql"]) == 2))
    assert [r.request_id for r in kept.shards["sql"]] == ["sql-a", "sql-c"]
    assert kept.left_out["sql"] == 1
    assert [r.request_id for r in kept.shards["general"]] == ["general-a"]


def test_suffix_drafts_may_repeat_an_answer_whose_record_has_no_room(
    target: TargetReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target._held_records, "has_room", lambda topic: topic != "sql")
    asked = GenerationRequest("a", (5, 6, 7), SamplingParams(max_tokens=4), "sql", "sql")
    assert target._limit_records(replace(asked, topic="general")).has_record
    limited = target._limit_records(asked)
    assert (limited.has_record, limited.may_be_repeated) == (False, True)


def test_nothing_is_recorded_where_no_shard_takes_it(target: TargetReplica) -> None:
    asked = GenerationRequest("a", (5, 6, 7), SamplingParams(max_tokens=4), "sql", "sql")
    assert target._limit_records(asked).has_record
    target._shards = {}
    assert not target._limit_records(asked).may_be_repeated
