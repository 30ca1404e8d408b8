"""Two target replicas. If one dies or hangs under fifty streams, none is lost, none is altered."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import processes
import psutil
import pytest
import torch
from clients import Load, Reply, bodies, until
from fixture_models import SMALL_MODELS
from free_ports import find_port

from paceline.actors.engine.native.kernels import kernels_for
from paceline.deploy import app
from paceline.deploy.api.operations import REPLICAS
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(300)]

STREAMS, WHOLE, MAX_TOKENS, STALL_S = 56, 8, 240, 4.0


def two_replicas(dtype: str, state_dir: Path) -> Any:
    return load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(state_dir),
            "target.dtype": dtype,
            "target.num_threads": 1,
            "target.num_replicas": 2,
            "target.max_num_seqs": STREAMS + WHOLE,  # none waits, however Ray spreads them
            "target.stall_timeout_s": STALL_S,
            "router.timeout_s": 5.0,
            "training.enabled": False,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningApp]:
    with app.start(two_replicas(request.param, tmp_path_factory.mktemp("state"))) as application:
        yield application


def requests() -> list[dict[str, Any]]:
    """Streams first, then whole answers; greedy and seeded, every topic."""
    every = bodies(STREAMS + WHOLE, MAX_TOKENS)
    return [body | {"stream": index < STREAMS} for index, body in enumerate(every)]


@pytest.fixture(scope="module")
def undisturbed(running: RunningApp) -> list[Reply]:
    return asyncio.run(Load(running.base_url, requests()).run())


def resume(process: psutil.Process) -> None:
    """Let a process go on, unless Serve has replaced it in the meantime."""
    with suppress(psutil.NoSuchProcess):
        process.resume()


async def disturbed(running: RunningApp, victim: psutil.Process, fault: str) -> list[Reply]:
    """All requests at once; once every stream has begun and none has ended, the fault."""
    load = Load(running.base_url, requests())
    answers = asyncio.create_task(load.run())
    try:
        await until(lambda: load.begun >= STREAMS, "the first tokens of every stream")
        assert sum(reply.finish is None for reply in load.seen[:STREAMS]) >= 50
        victim.kill() if fault == "kill" else victim.suspend()
        return await answers
    finally:
        answers.cancel()
        if fault == "stop":
            resume(victim)


def check(running: RunningApp, found: list[Reply], expected: list[Reply]) -> None:
    """None is lost. None is altered in float32; in bfloat16 none where products are invariant."""
    assert [reply.error for reply in found] == [None] * len(found)
    altered = sum(f.answer != e.answer for f, e in zip(found, expected, strict=True))
    dtype = running.target.dtype
    print(f"{dtype}: {altered} of {len(found)} answers altered")  # noqa: T201
    if dtype == "float32" or kernels_for(torch.device("cpu"), torch.bfloat16) is not None:
        assert altered == 0


def failovers(running: RunningApp) -> dict[str, int]:
    counts: dict[str, int] = status(running)["failover"]
    return counts


def status(running: RunningApp) -> Any:
    return httpx.get(f"{running.base_url}/v1/paceline/status", timeout=30).json()


def both_serve(running: RunningApp) -> None:
    """Return when two replicas answer, each for itself."""
    seen: set[str] = set()

    def two() -> bool:
        facts = status(running)["target"]
        seen.add(facts.get("replica_id", ""))
        return len(processes.of("target")) == 2 and len(seen - {""}) >= 2

    def fresh() -> bool:
        seen.clear()
        return any(two() for _ in range(40))

    asyncio.run(until(fresh, "two replicas that answer", 90))


def test_a_killed_replica_loses_no_stream_and_alters_none_and_comes_back(
    running: RunningApp, undisturbed: list[Reply]
) -> None:
    assert {reply.finish for reply in undisturbed} == {"length"}
    both_serve(running)
    before, victim = failovers(running), processes.of("target")[0]
    found = asyncio.run(disturbed(running, victim, "kill"))
    check(running, found, undisturbed)
    assert failovers(running)["resumed"] - before["resumed"] >= 10
    assert not victim.is_running()
    both_serve(running)


def test_a_hung_replica_loses_no_stream_and_later_requests_do_not_wait_for_it(
    running: RunningApp, undisturbed: list[Reply]
) -> None:
    """The older one hangs: after the kill before, the one that came back serves them all."""
    both_serve(running)
    before = failovers(running)
    victim = processes.of("target")[0]
    found = asyncio.run(disturbed(running, victim, "stop"))
    check(running, found, undisturbed)
    assert failovers(running)["resumed"] - before["resumed"] >= 10

    async def next_ones() -> list[Reply]:
        with suppress(psutil.NoSuchProcess):  # where all this took long, Serve has ended it
            victim.suspend()
        try:
            return await Load(running.base_url, requests()[:8], at_once=1).run()
        finally:
            with suppress(psutil.NoSuchProcess):
                victim.kill()  # resumed, it may live on although Ray has told it to end

    replies = asyncio.run(next_ones())
    check(running, replies, undisturbed[:8])
    # distrust has begun with the first fault: no request goes to the stopped one again
    assert max(max(reply.pauses_s) for reply in replies) < STALL_S


def generated(url: str) -> set[tuple[str, str]]:
    """Each target replica's labels and the tokens that it has generated, at the API's /metrics."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    return set(re.findall(r"^vllm:generation_tokens_total({.*}) (.+)$", text, re.MULTILINE))


def test_a_purge_reaches_the_answers_that_both_replicas_draft_from(running: RunningApp) -> None:
    both_serve(running)
    url, count = running.base_url, 24

    def purge(**what: Any) -> int:
        answer = httpx.post(f"{url}/v1/paceline/replay/purge", json=what, timeout=60)
        removed: int = answer.json()["removed"][REPLICAS]
        return removed

    purge(all=True)
    before = generated(url)
    asked = [body | {"store": True} for body in bodies(count, 8, stream=False)]
    with ThreadPoolExecutor(8) as threads, httpx.Client(base_url=url, timeout=120) as http:
        replies = list(
            threads.map(lambda body: http.post("/v1/chat/completions", json=body), asked)
        )
    assert len(generated(url) - before) == 2  # each had a part in it
    ids = [reply.json()["id"] for reply in replies]
    assert [purge(request_id=one) for one in ids[:8]] == [1] * 8
    assert purge(all=True) == count - 8
    assert purge(all=True) == 0
