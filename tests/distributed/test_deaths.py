"""Every other part killed under load over real HTTP: the text is unchanged, the part comes back.

One application for the module, with one target replica. Answers are greedy or seeded, in float32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import processes
import pytest
from clients import Load, Reply, ask, bodies, until
from fixture_models import SMALL_MODELS
from free_ports import find_port

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config

# Failover, the pool and the learners' deaths have files of their own, part of every `make test`.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

REQUESTS, AT_ONCE, MAX_TOKENS, BACK_S = 24, 8, 40, 180.0
ROUTER_S = 2.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "target.failover_timeout_s": BACK_S,
            "router.timeout_s": ROUTER_S,
            "router.placement": "deployment",  # a process that can die alone
            "training.round_seconds": 3.0,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


def requests() -> list[dict[str, Any]]:
    every = bodies(REQUESTS, MAX_TOKENS)
    return [body | {"stream": index % 4 > 0} for index, body in enumerate(every)]


@pytest.fixture(scope="module")
def undisturbed(running: RunningApp) -> list[Reply]:
    replies = asyncio.run(Load(running.base_url, requests(), AT_ONCE).run())
    assert [reply.error for reply in replies] == [None] * REQUESTS
    return replies


async def killed_under_load(running: RunningApp, roles: tuple[str, ...]) -> list[Reply]:
    """Kill a process of every role while requests run; return when all are answered and back."""
    load = Load(running.base_url, requests(), AT_ONCE)
    before = {role: len(processes.of(role)) for role in roles}
    answers = asyncio.create_task(load.run())
    await until(lambda: load.begun >= AT_ONCE // 2, "the first tokens", 120)
    victims = [processes.of(role)[0] for role in roles]
    assert load.open >= REQUESTS // 3
    for victim in victims:
        victim.kill()
    replies = await answers

    def back() -> bool:
        """As many processes of the role as before, none of them the one that was killed."""
        gone = {victim.pid for victim in victims}
        now = {role: [p.pid for p in processes.of(role)] for role in roles}
        return all(len(now[role]) >= before[role] and not gone & {*now[role]} for role in roles)

    await until(back, f"{roles} to come back", BACK_S)
    return replies


def check(found: list[Reply], expected: list[Reply]) -> None:
    assert [reply.error for reply in found] == [None] * len(found)
    assert [reply.answer for reply in found] == [reply.answer for reply in expected]


def topic_of(running: RunningApp, prompt: str) -> str:
    body = bodies(1, 4, stream=False)[0] | {"messages": [{"role": "user", "content": prompt}]}
    answer = httpx.post(f"{running.base_url}/v1/chat/completions", json=body, timeout=120)
    topic: str = answer.json()["metrics"]["speculative_decoding"]["topic"]
    return topic


def rejoined(running: RunningApp) -> bool:
    """Every part answers for itself, and the router classifies again."""
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=60).json()
    parts = [status[name] for name in ("target", "weight_versions", "trainer", "scheduler")]
    if any("error" in part for part in [*parts, *status["shards"].values()]):
        return False
    return topic_of(running, "Write a SQL query that lists the names of all people.") == "sql"


@pytest.mark.parametrize(
    "roles",
    [
        ("target",),
        ("registry", "shard"),
        ("router", "trainer"),
        ("router",),
        ("trainer",),
        ("registry",),
        ("shard",),
        ("scheduler",),
        ("controller",),
        ("controller", "router"),
        ("target", "router"),
        ("target", "controller"),
    ],
    ids="+".join,
)
def test_requests_go_on_and_the_part_comes_back(
    running: RunningApp, undisturbed: list[Reply], roles: tuple[str, ...]
) -> None:
    """The drafts are in the target's process: they die with it. It has no second replica here."""
    check(asyncio.run(killed_under_load(running, roles)), undisturbed)
    asyncio.run(until(lambda: rejoined(running), "all parts to answer again", BACK_S))


async def retried(running: RunningApp, role: str) -> tuple[list[Reply], int]:
    """Kill the role once; every request whose connection breaks is sent again, as it was."""
    broken = 0
    begun: list[Reply] = []
    gate = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=running.base_url, timeout=300) as http:

        async def one(body: dict[str, Any]) -> Reply:
            nonlocal broken
            async with gate:
                while True:
                    reply = Reply()
                    begun.append(reply)
                    await ask(http, body, reply)
                    if reply.error is None:
                        return reply
                    broken += 1
                    assert "HTTP 4" not in reply.error, reply.error
                    await asyncio.sleep(0.2)  # a client's own back-off

        answers = asyncio.gather(*map(one, requests()))
        await until(lambda: sum(r.begun for r in begun) >= AT_ONCE // 2, "the first tokens", 120)
        processes.of(role)[0].kill()
        async with asyncio.timeout(BACK_S):
            return await answers, broken


def test_connections_of_the_ingress_break_and_a_retry_gives_the_same_text(
    running: RunningApp, undisturbed: list[Reply]
) -> None:
    found, broken = asyncio.run(retried(running, "ingress"))
    assert broken >= 1, "nothing broke: was it the ingress?"
    check(found, undisturbed)
    asyncio.run(until(lambda: rejoined(running), "all parts to answer again", BACK_S))


def test_a_hung_router_costs_a_time_box_now_and_then(
    running: RunningApp, undisturbed: list[Reply]
) -> None:
    asyncio.run(until(lambda: rejoined(running), "all parts to answer", BACK_S))
    (router,) = processes.of("router")
    router.suspend()
    try:
        one_by_one = Load(running.base_url, [b | {"stream": True} for b in requests()], at_once=1)
        found = asyncio.run(one_by_one.run())
    finally:
        if router.is_running():
            router.resume()
    check(found, undisturbed)
    boxed = sum(reply.pauses_s[0] >= ROUTER_S for reply in found)
    assert 1 <= boxed <= 6  # after 0.5, 1, 2, 4 and 8 s of quiet, each with its own box
    asyncio.run(until(lambda: rejoined(running), "the router to answer again", BACK_S))
