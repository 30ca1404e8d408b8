"""The small models behind real HTTP: exact answers, swaps, and kill -9 of every learner.

One application for the module; it trains while it serves. Every answer is greedy in float32, so
each must be the same tokens however it was drafted and whatever died meanwhile.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import ray
import torch
from fixture_models import DRAFT, SMALL_MODELS, TARGET
from waiting import wait_until

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.weights.flat_weights import flatten
from paceline.cluster.learning_actors import SHARDS
from paceline.cluster.session import NAMESPACE
from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import TOPICS, generate

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
MAX_TOKENS = 32
PER_TOPIC = 26


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": free_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "training.num_threads": 1,
            "training.round_seconds": 3.0,
            "training.canary_share": 0.0,  # noise is published here, which a canary would withdraw
            "router.timeout_s": 5.0,
            "router.sample_share": 1.0,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


def body(topic: str, prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        # a fixed number: left to the engine, drafts that do not pay yet would rest
        "speculative": {"draft": topic, "num_speculative_tokens": 4},
    } | more


async def ask_all(
    url: str, bodies: list[dict[str, Any]], at_once: int = 8
) -> list[tuple[int, dict[str, Any]]]:
    """Status and answer of every request, in order."""
    gate = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with gate:
                answer = await client.post("/v1/chat/completions", json=content)
                return answer.status_code, answer.json()

        return list(await asyncio.gather(*(ask(content) for content in bodies)))


def tokens(answers: list[tuple[int, dict[str, Any]]]) -> list[list[int]]:
    assert [status for status, _ in answers] == [200] * len(answers)
    return [answer["choices"][0]["token_ids"] for _, answer in answers]


PROMPTS = [(topic, prompt) for topic in TOPICS for prompt in generate(topic, PER_TOPIC, seed=77)]


@pytest.fixture(scope="module")
def plain(running: RunningApp) -> list[list[int]]:
    """The target's own answers, without speculation."""
    off = {"draft": "off"}
    bodies = [body(t, p, speculative=off, store=False) for t, p in PROMPTS]
    return tokens(asyncio.run(ask_all(running.base_url, bodies)))


def publish_noise(running: RunningApp, topic: str, seed: int, scale: float = 0.02) -> int:
    """Publish a disturbed draft, as a trainer would; returns its weight_version."""
    model = load_causal_lm(DRAFT, torch.float32, attention="sdpa")
    generator = torch.Generator().manual_seed(seed)
    state = {
        name: weight + scale * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }
    version: int = ray.get(running.registry.publish.remote(topic, flatten(state), {"test": True}))
    return version


def served_versions(running: RunningApp) -> dict[str, int]:
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=30).json()
    drafts: dict[str, int] = status["target"]["drafts"]
    return drafts


def test_greedy_answers_are_the_targets_own_with_speculation_and_after_swaps(
    running: RunningApp, plain: list[list[int]]
) -> None:
    assert len(plain) >= 100
    on = [body(t, p) for t, p in PROMPTS]
    first = asyncio.run(ask_all(running.base_url, on))
    assert tokens(first) == plain
    drafted = [a["metrics"]["speculative_decoding"]["num_draft_tokens"] for _, a in first]
    assert sum(d > 0 for d in drafted) >= 100
    versions = {topic: publish_noise(running, topic, seed=i) for i, topic in enumerate(TOPICS)}
    wait_until(lambda: served_versions(running).items() >= versions.items(), "the swap", 30)
    assert tokens(asyncio.run(ask_all(running.base_url, on))) == plain


def test_a_swap_in_the_middle_of_answers_changes_no_token(
    running: RunningApp, plain: list[list[int]]
) -> None:
    landed: list[dict[str, int]] = []

    async def both() -> list[tuple[int, dict[str, Any]]]:
        before = await asyncio.to_thread(served_versions, running)
        load = asyncio.create_task(
            ask_all(running.base_url, [body(t, p) for t, p in PROMPTS], at_once=4)
        )
        seed = 100
        while not load.done():
            await asyncio.to_thread(publish_noise, running, TOPICS[seed % 4], seed)
            seed += 1
            now = await asyncio.to_thread(served_versions, running)
            # asked for after the requests were sent, answered before the last one was
            if now != before and not load.done():
                landed.append(now)
        return await load

    assert tokens(asyncio.run(both())) == plain
    assert landed, "no swap reached the drafts while requests were in flight"


def test_a_topic_with_a_bad_expert_goes_to_general_and_keeps_its_records(
    running: RunningApp,
) -> None:
    """All experts are scored on held-out requests; math's, spoilt, would learn for minutes."""
    publish_noise(running, "math", seed=9, scale=0.3)
    fresh = iter(generate("math", 600, seed=31))
    drafts: list[str] = []

    def routed() -> bool:
        auto = {"draft": "auto", "num_speculative_tokens": 4}
        bodies = [body("", next(fresh), speculative=auto) for _ in range(10)]
        answers = asyncio.run(ask_all(running.base_url, bodies, at_once=4))
        figures = [answer["metrics"]["speculative_decoding"] for _, answer in answers]
        drafts.extend(f["draft"] for f in figures if f["topic"] == "math")
        return drafts[-1:] == ["general"]

    before = ray.get(running.shards["math"].stats.remote()).inserted_total
    wait_until(routed, "the generalist", 90)
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=30).json()
    table = status["routing"]
    assert table["weights"]["math"]["general"] > table["weights"]["math"]["math"]
    assert table["acceptance"]["math"]["general"] > table["acceptance"]["math"]["math"]
    assert status["routed"]["math"]["general"] >= 1
    kept = ray.get(running.shards["math"].stats.remote()).inserted_total
    assert kept - before >= len(drafts) - 10  # the last ones may be on their way


def test_the_target_answers_as_transformers_generate_does(plain: list[list[int]]) -> None:
    from transformers import AutoTokenizer

    path = TARGET
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = load_causal_lm(path, torch.float32, attention="sdpa")
    for index in range(0, len(PROMPTS), 13):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPTS[index][1]}],
            add_generation_prompt=True,
            return_dict=False,
        )
        answer = model.generate(
            torch.tensor([ids]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0
        )
        assert answer[0, len(ids) :].tolist() == plain[index]


def pid_of(handle: Any) -> int:
    """The process of an actor, asked by its handle; one that is down is asked again."""
    found: list[int] = []

    def answers() -> bool:
        try:
            found.append(ray.get(handle.__ray_call__.remote(lambda _self: os.getpid()), timeout=5))
        except (ray.exceptions.RayError, TimeoutError):
            return False
        return True

    wait_until(answers, "an actor's pid", 60)
    return found[-1]


def test_kill_9_of_learners_fails_no_request_and_versions_only_grow(
    running: RunningApp, plain: list[list[int]]
) -> None:
    """The trainer, the shards and the registry die under load; all come back and go on."""
    seen: list[dict[str, int]] = [served_versions(running)]
    victims = [running.trainer, ray.get_actor(SHARDS, NAMESPACE), running.registry]
    killed: list[int] = []

    async def fire() -> list[tuple[int, dict[str, Any]]]:
        load = asyncio.create_task(
            ask_all(running.base_url, [body(t, p) for t, p in PROMPTS], at_once=4)
        )
        for victim in victims:
            await asyncio.sleep(0.5)
            killed.append(await asyncio.to_thread(pid_of, victim))
            assert not load.done(), "the load ended before the last kill"
            os.kill(killed[-1], signal.SIGKILL)
        seen.append(await asyncio.to_thread(served_versions, running))
        return await load

    assert tokens(asyncio.run(fire())) == plain
    assert not any(psutil.pid_exists(pid) for pid in killed)
    assert all(pid_of(victim) not in killed for victim in victims)
    before = wait_for_registry(running)
    assert all(before[topic] >= version for topic, version in seen[0].items() if "@" not in topic)

    def learned() -> bool:
        """Serve prompts never seen before until a gate decision publishes something new."""
        fresh = generate("sql", 12, seed=len(seen))
        tokens(asyncio.run(ask_all(running.base_url, [body("sql", p) for p in fresh])))
        time.sleep(3.0)
        seen.append(served_versions(running))
        return seen[-1]["sql"] > before["sql"]

    wait_until(learned, "a version learned after the kills", 240)
    for earlier, later in itertools.pairwise(seen):
        assert all(later[topic] >= version for topic, version in earlier.items())


def wait_for_registry(running: RunningApp) -> dict[str, int]:
    """Versions from the registry once it answers again."""
    versions: dict[str, int] = {}

    def answers() -> bool:
        try:
            versions.update(ray.get(running.registry.stable_versions.remote(), timeout=5))
        except ray.exceptions.RayError:
            return False
        return True

    wait_until(answers, "the registry", 60)
    return versions


def test_the_last_version_survives_a_restart(running: RunningApp) -> None:
    """Two deaths in a row: what was published is there again, from disk."""
    version = publish_noise(running, "shell", seed=5)
    for _ in range(2):
        pid = pid_of(running.registry)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not psutil.pid_exists(pid), "the end of the registry", 30)
        assert wait_for_registry(running)["shell"] >= version
    history = ray.get(running.registry.history.remote("shell"))
    assert any(decision.get("test") for decision in history)
