"""Replicas that come with a load and go with it, over real HTTP: no request fails or is altered.

The drafts are in a pool, whose expert is scaled as well: its second replica comes only once there
are two targets, and takes one of their sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import processes
import pytest
from clients import Load, Reply, bodies, until
from fixture_models import SMALL_MODELS
from free_ports import find_port
from ray import serve
from replies import answered

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

REQUESTS, MAX_TOKENS, COMES_S = 24, 40, 150.0
FAST = {"min_replicas": 1, "max_replicas": 2, "upscale_delay_s": 1.0, "look_back_s": 4.0}


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
            "target.max_num_seqs": 4,
            "target.autoscaling": FAST | {"downscale_delay_s": 4.0},
            "drafts.topics": [],
            "drafts.placement": "pool",
            "drafts.round_timeout_ms": 1000.0,
            "drafts.num_speculative_tokens": 3,
            "drafts.autoscaling": FAST | {"occupancy": 0.02, "downscale_delay_s": 600.0},
            "router.enabled": False,
            "training.enabled": False,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


@pytest.fixture(scope="module")
def plain(running: RunningApp) -> list[Any]:
    """The answers without speculation; one at a time is no reason for a second replica."""
    off = [body | {"speculative": {"draft": "off"}} for body in bodies(REQUESTS, MAX_TOKENS)]
    return answered(asyncio.run(Load(running.base_url, off, at_once=1).run()))


@asynccontextmanager
async def traffic(url: str, plain: list[Any], at_once: int) -> Any:
    """Requests without a pause meanwhile; afterwards each must have had its text."""
    ended = asyncio.Event()
    passes: list[list[Reply]] = []

    async def send() -> None:
        while not ended.is_set():
            passes.append(await Load(url, bodies(REQUESTS, MAX_TOKENS), at_once).run())

    sending = asyncio.create_task(send())
    try:
        yield
    finally:
        ended.set()
        await sending
    assert passes
    assert all(answered(replies) == plain for replies in passes)


def serving(name: str) -> int:
    """Replicas of a deployment that serve, by Serve's word."""
    states = serve.status().applications["paceline"].deployments[name].replica_states
    return int(states.get("RUNNING", 0))


def test_replicas_come_with_the_load_take_requests_and_go_with_it(
    running: RunningApp, plain: list[Any]
) -> None:
    assert serving("target") == len(processes.of("target")) == 1

    def facts() -> Any:
        return httpx.get(f"{running.base_url}/v1/paceline/status", timeout=60).json()["target"]

    first = facts()["replica_id"]

    def the_other_works() -> bool:
        found = facts()
        return bool(found["replica_id"] != first and found["running"] and found["experts"])

    async def rises() -> None:
        async with traffic(running.base_url, plain, at_once=12):
            await until(lambda: serving("target") == 2, "a second target", COMES_S)
            await until(the_other_works, "requests on the second target", COMES_S)
            await until(lambda: serving("expert-general") == 2, "a second expert", COMES_S)
            await until(both_drafted_for, "a session for each expert", COMES_S)

    epochs: dict[str, int | None] = {}  # by target, of the expert's replica that it drafts with

    def both_drafted_for() -> bool:
        found = facts()
        epochs[found["replica_id"]] = found["experts"]["general"]["epoch"]
        return len({*epochs.values()} - {None}) == 2

    async def falls() -> None:
        async with traffic(running.base_url, plain, at_once=1):
            await until(lambda: len(processes.of("target")) == 1, "the end of one", COMES_S)
            assert serving("target") == 1

    asyncio.run(rises())
    asyncio.run(falls())
    assert facts()["draft_failures"] == 0
