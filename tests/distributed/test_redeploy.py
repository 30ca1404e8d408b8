"""``serve deploy`` under load, on a cluster of one host: no request fails, no text is altered.

First what changes without a new replica (``user_config``), then what needs new ones of everything.
Answers are greedy or seeded in float32: each must be that of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import processes
import pytest
from clients import Load, Reply, bodies, until
from fixture_models import DRAFT, TARGET
from free_ports import find_port
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from replies import answered

from paceline.cluster.session import ray_session

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

STREAMS, MAX_TOKENS, COMES_S = 24, 60, 150.0
LONG_TOKENS = 800


class Cluster:
    """An application by Serve's config file, as ``serve deploy`` applies it."""

    def __init__(self, storage: str) -> None:
        self.port = find_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._application: dict[str, Any] = {
            "name": "paceline",
            "import_path": "paceline.deploy.cluster_app:build",
            "args": {
                "port": self.port,
                "weights": {"storage": storage},
                "target": {
                    "path": str(TARGET),
                    "dtype": "float32",
                    "num_threads": 1,
                    "drain_timeout_s": 0.5,
                },
                "drafts": {"general": str(DRAFT), "topics": ["sql"]},
                "router": {"enabled": False},
                "training": {"enabled": False},
            },
            "deployments": [],
        }

    def deploy(self, options: dict[str, dict[str, Any]] | None = None, **target: Any) -> None:
        """What the REST API behind ``serve deploy`` calls; returns before anything has changed.

        ``options`` are Serve's, by deployment, and ``target`` keys of our own configuration.
        """
        self._application["args"]["target"] |= target
        self._application["deployments"] = [
            {"name": name, **own} for name, own in (options or {}).items()
        ]
        config = {"applications": [copy.deepcopy(self._application)]}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(config))

    def retune(self, **user_config: dict[str, Any]) -> None:
        """Deploy with a ``user_config`` per deployment."""
        self.deploy({name: {"user_config": own} for name, own in user_config.items()})

    def running(self) -> bool:
        """Whether all of it is as deployed, by Serve's word."""
        status = serve.status().applications["paceline"]
        assert status.status != "DEPLOY_FAILED", status.message
        return bool(status.status == "RUNNING")

    def status(self) -> Any:
        return httpx.get(f"{self.url}/v1/paceline/status", timeout=60).json()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    found = Cluster(str(tmp_path_factory.mktemp("storage")))
    with ray_session(num_cpus=2):
        serve.start(proxy_location="Disabled")
        found.deploy()
        asyncio.run(until(found.running, "the application", COMES_S))
        yield found


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[Any]:
    return answered(asyncio.run(Load(cluster.url, bodies(STREAMS, MAX_TOKENS), 8).run()))


@pytest.fixture(scope="module")
def long_answers(cluster: Cluster) -> list[Any]:
    return answered(asyncio.run(Load(cluster.url, bodies(2, LONG_TOKENS)).run()))


@asynccontextmanager
async def traffic(
    url: str, expected: list[Any], asked: list[dict[str, Any]], at_once: int
) -> AsyncIterator[Load]:
    """Streams without a pause meanwhile; afterwards each must have had its text."""
    ended, began = asyncio.Event(), Load(url, asked, at_once)
    passes: list[list[Reply]] = []

    async def send() -> None:
        passes.append(await began.run())
        while not ended.is_set():
            passes.append(await Load(url, asked, at_once).run())

    sending = asyncio.create_task(send())
    try:
        await until(lambda: began.begun > 0, "the first tokens", 60)
        yield began
    finally:
        ended.set()
        await sending
    assert all(answered(replies) == expected for replies in passes)


def pids(*roles: str) -> set[int]:
    return {process.pid for role in roles for process in processes.of(role)}


def drafted(url: str) -> int:
    """Tokens drafted for one answer by the controller's choice."""
    body = bodies(1, 40, stream=False)[0]
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
    tokens: int = answer["metrics"]["speculative_decoding"]["num_draft_tokens"]
    return tokens


def shows(cluster: Cluster, what: Callable[[Any], Any], value: Any) -> Callable[[], bool]:
    return lambda: what(cluster.status()) == value


def test_user_config_changes_what_runs_and_breaks_no_stream(
    cluster: Cluster, undisturbed: list[Any]
) -> None:
    asyncio.run(until(lambda: drafted(cluster.url) > 0, "drafts", 60))
    before = pids("target", "ingress")
    limits = {"max_in_flight": 1}
    quiet = {"max_speculative_tokens": 0}

    async def changes() -> None:
        asked = bodies(STREAMS, MAX_TOKENS)
        async with traffic(cluster.url, undisturbed, asked, at_once=4) as load:
            cluster.retune(target=quiet, ingress={"min_confidence": 0.9})
            taken = shows(cluster, lambda s: s["target"]["user_config"]["changed"], quiet)
            await until(taken, "the target's values", COMES_S)
            taken = shows(cluster, lambda s: s["user_config"]["changed"], {"min_confidence": 0.9})
            await until(taken, "the ingress' values", COMES_S)
            assert load.begun > 0

    asyncio.run(changes())
    assert drafted(cluster.url) == 0

    async def refuses() -> list[int]:
        cluster.retune(target={"max_speculative_tokns": 3}, ingress=limits)
        said = "max_speculative_tokns: no such key; did you mean max_speculative_tokens?"
        refused = shows(cluster, lambda s: s["target"]["user_config"]["refused"], said)
        await until(refused, "the refusal", COMES_S)
        taken = shows(cluster, lambda s: s["user_config"]["changed"], limits)
        await until(taken, "the ingress' values", COMES_S)
        replies = await Load(cluster.url, bodies(2, 40)).run()
        return [reply.error is None for reply in replies]

    assert sorted(asyncio.run(refuses())) == [False, True]  # one is let in at a time
    assert cluster.status()["target"]["user_config"]["changed"] == quiet  # what was there stays
    assert drafted(cluster.url) == 0
    cluster.retune(target={}, ingress={})

    def changed(status: Any) -> list[Any]:
        return [own["user_config"]["changed"] for own in (status, status["target"])]

    taken_back = shows(cluster, changed, [{}, {}])
    asyncio.run(until(taken_back, "everything as configured", COMES_S))
    asyncio.run(until(lambda: drafted(cluster.url) > 0, "drafts", 60))
    asyncio.run(until(cluster.running, "the application", COMES_S))
    assert pids("target", "ingress") == before


async def redeployed(
    cluster: Cluster, undisturbed: list[Any], long_answers: list[Any], deploy: Callable[[], None]
) -> None:
    """Deploy under streams short and long; returns when the old target has gone."""
    old = pids("target")
    async with (
        traffic(cluster.url, undisturbed, bodies(STREAMS, MAX_TOKENS), at_once=4),
        traffic(cluster.url, long_answers, bodies(2, LONG_TOKENS), at_once=2),
    ):
        deploy()
        await until(lambda: pids("target") > old, "the successor beside the old one", COMES_S)
        await until(lambda: not pids("target") & old, "the end of the old one", COMES_S)
        await until(cluster.running, "the application", COMES_S)


def test_what_outlasts_the_time_to_drain_goes_on_in_the_successor(
    cluster: Cluster, undisturbed: list[Any], long_answers: list[Any]
) -> None:
    """The target alone is replaced: the ingress, which counts, stays."""
    front, resumed = pids("ingress"), cluster.status()["failover"]["resumed"]
    books = {"target": {"ray_actor_options": {"num_cpus": 0.01}}}
    asyncio.run(redeployed(cluster, undisturbed, long_answers, lambda: cluster.deploy(books)))
    assert pids("ingress") == front
    failover = cluster.status()["failover"]
    assert failover["resumed"] > resumed
    assert failover["given_up"] == 0


def test_new_replicas_of_everything_under_streams_fail_no_request(
    cluster: Cluster, undisturbed: list[Any], long_answers: list[Any]
) -> None:
    old = pids("target", "ingress")
    changed = {"prefill_chunk": 128}
    asyncio.run(redeployed(cluster, undisturbed, long_answers, lambda: cluster.deploy(**changed)))
    asyncio.run(until(lambda: not pids("target", "ingress") & old, "the old ones' end", COMES_S))
    assert len(pids("target")) == len(pids("ingress")) == 1
    assert cluster.status()["target"]["draft_failures"] == 0
