"""Two ingress, two targets, one pool: what is shared serves both, and either may die."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import processes
import pytest
import ray
import torch
from clients import Load, Reply, bodies, until
from fixture_models import DRAFT, SMALL_MODELS
from free_ports import find_port
from replies import answered

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.replay.buffer import ShardStats
from paceline.actors.weights.flat_weights import flatten
from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

REQUESTS, AT_ONCE, MAX_TOKENS, BACK_S = 24, 8, 40, 180.0
EXPERTS = ("general", "sql")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "ingress.num_replicas": 2,
            "target.num_replicas": 2,
            "target.dtype": "float32",
            "target.num_threads": 1,
            "drafts.placement": "pool",
            "drafts.topics": ["sql"],
            "drafts.num_speculative_tokens": 3,
            "drafts.round_timeout_ms": 1000.0,
            "training.enabled": False,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


@pytest.fixture(scope="module")
def undisturbed(running: RunningApp) -> list[Any]:
    """The answers without speculation."""
    plain = [body | {"speculative": {"draft": "off"}} for body in bodies(REQUESTS, MAX_TOKENS)]
    return answered(asyncio.run(Load(running.base_url, plain, AT_ONCE).run()))


def drafted(url: str) -> int:
    """Tokens drafted for one answer."""
    body = bodies(1, MAX_TOKENS, stream=False)[0]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    tokens: int = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return tokens


def both_targets(url: str) -> dict[str, dict[str, Any]]:
    """What each replica of the target says of itself, by its id."""
    seen: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + 30.0  # one that was silent is avoided for some seconds
    while time.monotonic() < deadline:  # Serve picks a replica for every request
        target = httpx.get(f"{url}/v1/paceline/status", timeout=60).json()["target"]
        seen[target["replica_id"]] = target
        if len(seen) == 2:
            return seen
    pytest.fail(f"only {set(seen)} ever answered")


def shard_facts(running: RunningApp) -> ShardStats:
    facts: ShardStats = ray.get(running.shards["sql"].stats.remote(), timeout=30)
    return facts


def test_both_targets_draft_with_the_same_experts(
    running: RunningApp, undisturbed: list[Any]
) -> None:
    assert len(processes.of("target")) == len(processes.of("ingress")) == 2
    assert len(processes.of("expert")) == len(EXPERTS)
    asyncio.run(until(lambda: drafted(running.base_url) > 0, "experts to draft", BACK_S))
    load = Load(running.base_url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE)
    assert answered(asyncio.run(load.run())) == undisturbed
    for target in both_targets(running.base_url).values():
        assert all(part["connected"] for part in target["experts"].values()), target["experts"]


def test_both_targets_log_to_one_shard_and_take_up_one_version(running: RunningApp) -> None:
    """Records of both reach the shard of the topic, and a version both replicas' drafts."""
    url, named = running.base_url, {"draft": "sql"}
    asked = [body | {"store": True, "speculative": named} for body in bodies(REQUESTS, MAX_TOKENS)]

    def answered_by() -> dict[str, int]:
        return {name: t["experts"]["sql"]["answered"] for name, t in both_targets(url).items()}

    before, inserted = answered_by(), shard_facts(running).inserted_total
    assert all(reply.error is None for reply in asyncio.run(Load(url, asked, AT_ONCE).run()))
    after = answered_by()
    assert after.keys() == before.keys()
    assert all(after[name] > before[name] for name in after)  # both had a part in it
    asyncio.run(
        until(
            lambda: shard_facts(running).inserted_total == inserted + REQUESTS,
            "every record",
            30,
        )
    )

    draft = load_causal_lm(DRAFT, torch.float32, attention="sdpa")
    published = running.registry.publish.remote("sql", flatten(draft.state_dict()), {"test": True})
    version: int = ray.get(published, timeout=60)

    def taken_up() -> bool:
        asyncio.run(Load(url, asked[:AT_ONCE], AT_ONCE).run())
        return {t["drafts"]["sql"] for t in both_targets(url).values()} == {version}

    deadline = time.monotonic() + BACK_S
    while not taken_up():
        assert time.monotonic() < deadline


def generated(url: str) -> dict[str, float]:
    """Tokens that each target replica has generated, at the API's own /metrics."""
    found = re.findall(r'^vllm:generation_tokens_total{.*engine="(.+)"} (.+)$',
                       httpx.get(f"{url}/metrics", timeout=60).text, re.M)  # fmt: skip
    return {engine: float(tokens) for engine, tokens in found}


def test_metrics_are_those_of_both_targets_and_of_one_that_does_not_hang(
    running: RunningApp,
) -> None:
    url = running.base_url
    before = generated(url)
    assert before.keys() == both_targets(url).keys()
    load = Load(url, [b | {"ignore_eos": True} for b in bodies(REQUESTS, MAX_TOKENS)], AT_ONCE)
    answered(asyncio.run(load.run()))
    after = generated(url)
    assert all(after[engine] > before[engine] for engine in before)
    assert sum(after.values()) - sum(before.values()) == REQUESTS * MAX_TOKENS
    hung = processes.of("target")[0]
    hung.suspend()
    try:
        assert len(generated(url)) == 1
    finally:
        hung.resume()
    assert generated(url) == after


def test_one_ingress_dies_and_the_other_admits_requests(
    running: RunningApp, undisturbed: list[Any]
) -> None:
    async def one_dies() -> tuple[list[Reply], list[Reply], int]:
        load = Load(running.base_url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE, retry_s=BACK_S)
        answers = asyncio.create_task(load.run())
        await until(lambda: load.begun >= AT_ONCE // 2, "the first tokens", 120)
        processes.of("ingress")[0].kill()
        late = Load(running.base_url, bodies(2, 4), 2, retry_s=BACK_S)
        met = await late.run()
        return await answers, met, len(processes.of("ingress"))

    replies, met, _ = asyncio.run(one_dies())
    assert answered(replies) == undisturbed
    assert [reply.error for reply in met] == [None, None]
    asyncio.run(until(lambda: len(processes.of("ingress")) == 2, "the ingress", BACK_S))


def test_one_target_dies_and_the_other_goes_on_with_the_pool(
    running: RunningApp, undisturbed: list[Any]
) -> None:
    async def one_dies() -> list[Reply]:
        load = Load(running.base_url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE)
        answers = asyncio.create_task(load.run())
        await until(lambda: load.begun >= AT_ONCE // 2, "the first tokens", 120)
        processes.of("target")[0].kill()
        return await answers

    experts = {process.pid for process in processes.of("expert")}
    assert answered(asyncio.run(one_dies())) == undisturbed
    asyncio.run(until(lambda: drafted(running.base_url) > 0, "experts to draft", BACK_S))
    assert {process.pid for process in processes.of("expert")} == experts
