"""The small models: a topic is added under load, is learnt, and outlives deaths and a restart.

Greedy answers in float32, so each must be the target's own tokens, whoever drafts.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from clients import Load, bodies
from fixture_models import SMALL_MODELS
from free_ports import find_port
from topic_examples import trips
from waiting import eventually, wait_until

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import PacelineConfig, load_config

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]

REQUESTS, AT_ONCE, MAX_TOKENS = 24, 4, 32
URL = "/v1/paceline/topics"


def config_of(state: Path, placement: str) -> PacelineConfig:
    return load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(state),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "drafts.topics": ["sql"],
            "drafts.placement": placement,
            "drafts.round_timeout_ms": 1000.0,
            "router.timeout_s": 10.0,
            "training.canary_share": 0.5,
            "training.round_seconds": 4.0,
            "training.enabled": placement == "colocated",
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )


def ask(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    } | more
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def figures(answer: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
    return found


def row(url: str, name: str = "travel") -> dict[str, Any]:
    rows = httpx.get(url + URL, timeout=60).json()["data"]
    return next((row for row in rows if row["name"] == name), {})


def own_share(url: str, prompts: list[str]) -> float:
    """Of the prompts, those that the topic's expert drafted for."""
    found = [figures(ask(url, p, speculative={"num_speculative_tokens": 3})) for p in prompts]
    return sum(f["topic"] == f["draft"] == "travel" for f in found) / len(found)


def added_under_load(running: RunningApp) -> None:
    """Add the topic while requests run: none fails or gives another text."""
    url = running.base_url
    plain = [body | {"speculative": {"draft": "off"}} for body in bodies(REQUESTS, MAX_TOKENS)]
    undisturbed = asyncio.run(Load(url, plain, AT_ONCE).run())
    load = Load(url, bodies(REQUESTS, MAX_TOKENS), AT_ONCE)
    with ThreadPoolExecutor(1) as beside:
        replies = beside.submit(lambda: asyncio.run(load.run()))
        new = {"name": "travel", "examples": trips(40)}
        answer = httpx.post(url + URL, json=new, timeout=200)
        assert answer.status_code == 200, answer.text
        assert answer.json()["router"]["recall"] >= 0.8
        found = replies.result()
    assert [reply.error for reply in found] == [None] * REQUESTS
    assert [r.answer for r in found] == [r.answer for r in undisturbed]
    wait_until(
        lambda: (
            bool(row(url).get("routed") and row(url)["drafting"])
            and row(url)["records"] is not None
        ),
        "all parts to take the topic up",
        120,
    )


def drafts_without_failures(url: str) -> None:
    prompts = trips(30, seed=7)[20:]
    wait_until(lambda: own_share(url, prompts) >= 0.7, "requests of the topic", 120)
    asked = {"speculative": {"draft": "travel", "num_speculative_tokens": 3}}
    drafted = [ask(url, p, **asked) for p in prompts]
    plain = [ask(url, p, speculative={"draft": "off"}) for p in prompts]
    texts = [[a["choices"][0]["token_ids"] for a in answers] for answers in (drafted, plain)]
    assert texts[0] == texts[1]
    assert all(figures(answer)["num_draft_tokens"] > 0 for answer in drafted)
    target = httpx.get(f"{url}/v1/paceline/status", timeout=60).json()["target"]
    assert target["draft_failures"] == 0


def test_a_topic_is_added_learnt_and_survives(tmp_path: Path) -> None:
    with app.start(config_of(tmp_path, "colocated")) as running:
        added_under_load(running)
        drafts_without_failures(running.base_url)
        number = iter(range(10_000))

        def published() -> bool:
            for prompt in trips(8, seed=100 + next(number)):
                ask(running.base_url, prompt)
            history = eventually(
                lambda: ray.get(running.registry.history.remote("travel"), timeout=30)
            )
            return "published" in {decision["outcome"] for decision in history}

        wait_until(published, "a version of the topic", 400)
        # The registry dies: catalogue and handles come back, and so does a trainer without them.
        for actor in (running.registry, running.trainer):
            pid = ray.get(actor.__ray_call__.remote(lambda _self: os.getpid()), timeout=60)
            os.kill(pid, signal.SIGKILL)
        parts = eventually(
            lambda: ray.get(running.registry.topics.remote(), timeout=30).actors, seconds=120
        )
        assert set(parts) == {"travel"}
        drafts_without_failures(running.base_url)
        learnt = ray.get(running.registry.stable_versions.remote(), timeout=30)["travel"]
    with app.start(config_of(tmp_path, "colocated")) as running:
        assert "travel" in running.target.drafts
        assert row(running.base_url)["weight_version"] >= learnt >= 1
        wait_until(lambda: bool(row(running.base_url).get("routed")), "the router", 60)
        drafts_without_failures(running.base_url)


def test_a_pool_gets_a_further_expert_and_keeps_the_others(tmp_path: Path) -> None:
    with app.start(config_of(tmp_path, "pool")) as running:
        url = running.base_url
        ask(url, "How many ships are there?", speculative={"draft": "sql"})
        before = pids(running)
        assert set(before) == {"general", "sql"}
        added_under_load(running)
        prompt, own = trips(1)[0], {"draft": "travel", "num_speculative_tokens": 3}

        def connected() -> bool:  # a round takes up what has come
            return figures(ask(url, prompt, speculative=own))["num_draft_tokens"] > 0

        wait_until(connected, "the expert's drafts", 180)
        drafts_without_failures(url)
        after = pids(running)
        assert {name: after[name] for name in before} == before  # no process was started again


def pids(running: RunningApp) -> dict[str, Any]:
    """By expert of the pool, the life of the process that the target is connected to."""
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=60).json()
    experts = status["target"]["experts"].items()
    return {name: facts["epoch"] for name, facts in experts if facts["connected"]}
