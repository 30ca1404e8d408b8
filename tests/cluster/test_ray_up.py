"""Three hosts, `ray up`, `serve deploy`: learning across hosts, and the death of one under load.

Each host has a network, processes, folders and an sshd of its own; only the storage is common. The
tests are steps of one course and stand in its order.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import processes
import pytest
from clients import Load, Reply, bodies, until
from fixture_models import DRAFT, TARGET
from hosts import ROOT, Host, Hosts, missing
from launched import Launched

from paceline.deploy.demo.prompts import endless

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

ARGUMENTS = {
    "target": {
        "path": str(TARGET),
        "dtype": "float32",
        "num_threads": 1,
        "num_replicas": 2,
        "max_num_seqs": 8,
        "stall_timeout_s": 20.0,
        "failover_timeout_s": 200.0,
    },
    "drafts": {
        "general": str(DRAFT),
        "placement": "pool",
        "topics": ["sql"],
        "num_threads": 1,
        "round_timeout_ms": 2000.0,
    },
    "router": {"enabled": False},
    "training": {"num_threads": 1, "round_seconds": 3.0, "canary_share": 0.0, "max_occupancy": 1.0},
    "placement": {
        "experts": {"drafting": 0.01},
        "learning": {"training": 0.01},  # not on the head: its host is to die
    },
}
# Learning may go on where either of the others has died; targets take a whole `serving` each.
RESOURCES = {
    "front": {"front": 1, "drafting": 1},
    "east": {"serving": 1, "training": 1},
    "west": {"serving": 1, "training": 1},
}
PARTS = {
    "ingress": 1,
    "target": 2,
    "expert": 2,
    "registry": 1,
    "scheduler": 1,
    "shard": 1,
    "trainer": 1,
}
REQUESTS, AT_ONCE, MAX_TOKENS = 16, 8, 144


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("cluster")
    links = ROOT / ".typing"  # a checkout that is not installed is found by these
    hosts = Hosts(folder, list(RESOURCES), {"PYTHONPATH": str(links), "RAY_AUTH_MODE": "token"})
    launched = None
    try:
        hosts.start(RESOURCES)
        launched = Launched(hosts, folder)
        launched.up()
        yield launched
    finally:
        hosts.stop()
        if launched is not None:
            launched.forget()


def on_host(host: Host, role: str) -> int:
    """How many processes of a role run on a host."""
    here = {process.pid for process in host.processes}
    return sum(process.pid in here for process in processes.of(role))


def places(cluster: Launched, role: str) -> list[Host]:
    return [host for host in cluster.hosts.hosts if on_host(host, role)]


def status(cluster: Launched) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{cluster.url}/v1/paceline/status", timeout=60).json()
    return found


def version_of_experts(cluster: Launched) -> int:
    """The weight_version of sql that the target has seen the expert propose with."""
    return int(status(cluster)["target"].get("drafts", {}).get("sql", 0))


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        "speculative": {"draft": "sql", "num_speculative_tokens": 4},
    } | more


def answers(replies: list[Reply]) -> list[Any]:
    assert [reply.error for reply in replies] == [None] * len(replies)
    return [reply.answer for reply in replies]


def drafted(replies: list[Reply]) -> int:
    return sum(reply.speculative.get("num_draft_tokens", 0) for reply in replies)


async def teach(cluster: Launched, prompts: Iterator[str], above: int, seconds: float) -> None:
    """Ask questions on sql until the experts propose with a version above the given one."""
    deadline = time.monotonic() + seconds
    while await asyncio.to_thread(version_of_experts, cluster) <= above:
        if time.monotonic() > deadline:
            raise TimeoutError(json.dumps(await asyncio.to_thread(status, cluster))[:6000])
        answers(await Load(cluster.url, [body(next(prompts)) for _ in range(8)], 4).run())


@pytest.fixture(scope="module")
def plain(cluster: Launched) -> list[Any]:
    """The target's own answers, without speculation; they are not learnt from."""
    off = [asked | {"speculative": {"draft": "off"}} for asked in bodies(REQUESTS, MAX_TOKENS)]
    return answers(asyncio.run(Load(cluster.url, off, AT_ONCE).run()))


@pytest.fixture(scope="module")
def prompts() -> Iterator[str]:
    return endless("sql", seed=11)


def test_every_part_is_on_a_host_of_its_own(cluster: Launched) -> None:
    cluster.deploy(ARGUMENTS)

    def up() -> bool:
        return all(len(processes.of(role)) == count for role, count in PARTS.items()) and healthy()

    def healthy() -> bool:
        try:
            return httpx.get(f"{cluster.url}/health", timeout=10).status_code == 200
        except httpx.HTTPError:
            return False

    try:
        asyncio.run(until(up, "the application", 300))
    except TimeoutError:
        pytest.fail(cluster.on_head("serve status"))
    front = cluster.head
    assert places(cluster, "expert") == places(cluster, "ingress") == [front]
    assert places(cluster, "target") == cluster.others
    (learning,) = places(cluster, "trainer")
    assert learning in cluster.others  # so the target of the other host shares with neither


def test_answers_come_from_outside_and_are_the_targets_own(
    cluster: Launched, plain: list[Any]
) -> None:
    def connected() -> bool:
        experts = status(cluster)["target"].get("experts", {})
        return bool(experts) and all(expert["connected"] for expert in experts.values())

    asyncio.run(until(connected, "the targets to reach the experts", 120))
    asked = [
        request | {"speculative": {"draft": "general", "num_speculative_tokens": 4}}
        for request in bodies(REQUESTS, MAX_TOKENS)
    ]
    replies = asyncio.run(Load(cluster.url, asked, AT_ONCE).run())
    assert answers(replies) == plain
    assert drafted(replies) > 0
    assert status(cluster)["target"]["draft_failures"] == 0


def test_a_version_goes_from_the_trainers_host_to_the_experts(
    cluster: Launched, prompts: Iterator[str]
) -> None:
    asyncio.run(teach(cluster, prompts, above=0, seconds=300))
    assert places(cluster, "expert") == [cluster.head] != places(cluster, "trainer")
    storage = cluster.hosts.storage / "state"
    assert list((storage / "weights").rglob("*.safetensors"))
    assert (storage / "replay" / "sql.records").stat().st_size > 0
    # kept after the publication, in files with a permit each
    asyncio.run(
        until(lambda: bool(list((storage / "optimizer").glob("sql/*/index.json"))), "moments", 60)
    )


def test_a_host_dies_under_load_and_no_request_is_lost(
    cluster: Launched, plain: list[Any], prompts: Iterator[str]
) -> None:
    before = status(cluster)
    version = before["weight_versions"]["sql"]
    (lost,) = places(cluster, "registry")
    assert on_host(lost, "target") == 1
    kept = before["shards"]["sql"]["splits"]["train"]["records"]

    async def load() -> list[Reply]:
        running = Load(cluster.url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE)
        replies = asyncio.create_task(running.run())
        await until(lambda: running.begun >= AT_ONCE // 2, "the first tokens", 120)
        await asyncio.to_thread(lost.cut_off)
        return await replies

    assert answers(asyncio.run(load())) == plain
    assert not lost.processes
    assert status(cluster)["failover"]["resumed"] > before["failover"]["resumed"]

    def recovered() -> bool:
        now = status(cluster)
        shards, versions = now["shards"], now["weight_versions"]
        splits = shards.get("sql", {}).get("splits", {})
        records = splits.get("train", {}).get("records", 0)
        whole = records >= 0.9 * kept  # what came in the last moment may not be on the disk
        return versions.get("sql", -1) >= version and whole and "error" not in now["trainer"]

    asyncio.run(until(recovered, "versions and replay from the storage", 240))
    decided = status(cluster)["decisions"]
    assert 1 in {d["version"] for d in decided if d["outcome"] == "published"}
    asyncio.run(teach(cluster, prompts, above=version, seconds=300))


def test_the_host_comes_back_and_ray_with_it(cluster: Launched, plain: list[Any]) -> None:
    (lost,) = [host for host in cluster.others if host.first is None]
    cluster.hosts.switch_on(lost)
    asyncio.run(until(lambda: on_host(lost, "target") == 1, "a target on the host", 300))
    replies = asyncio.run(Load(cluster.url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE).run())
    assert answers(replies) == plain


def test_a_host_that_is_to_go_drains_and_no_request_is_lost(
    cluster: Launched, plain: list[Any]
) -> None:
    leaving = cluster.others[0]
    script = ROOT / "cluster" / "kubernetes" / "drain.sh"

    async def load() -> list[Reply]:
        running = Load(cluster.url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE)
        replies = asyncio.create_task(running.run())
        await until(lambda: running.begun >= AT_ONCE // 2, "the first tokens", 120)
        said = await asyncio.to_thread(cluster.on, leaving, f"bash {script} 20 2>&1")
        assert on_host(leaving, "target") == 0, said
        return await replies

    assert on_host(leaving, "target") == 1
    assert answers(asyncio.run(load())) == plain


def test_ray_down_leaves_nothing(cluster: Launched) -> None:
    cluster.down()

    def stopped() -> bool:
        running = [p.name() for host in cluster.hosts.hosts for p in host.processes]
        return not {"raylet", "gcs_server"} & set(running) and not processes.of("target")

    asyncio.run(until(stopped, "the end of Ray on every host", 60))
