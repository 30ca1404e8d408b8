"""Two keys on a real server: one teaches its drafts, the other one's stay as they were.

Greedy answers in float32, so each must be the target's own tokens, whoever drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import pytest
import ray
from fixture_models import SMALL_MODELS
from free_ports import find_port
from waiting import wait_until

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]
KEYS = {"acme": True, "beta": False}  # by name, the default of store


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    keys = {
        name: {"sha256": sha256(f"{name}'s".encode()).hexdigest(), "store": store}
        for name, store in KEYS.items()
    }
    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "auth.keys": keys,
            "target.dtype": "float32",
            "target.num_threads": 1,
            "target.prefix_cache": "key",
            "drafts.topics": ["sql"],
            "replay.scope": "key",
            "router.timeout_s": 10.0,
            "training.canary_share": 0.0,
            "training.round_seconds": 4.0,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


def ask(running: RunningApp, key: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "temperature": 0,
        "return_token_ids": True,
        "speculative": {"num_speculative_tokens": 3},
    } | more
    headers = {"Authorization": f"Bearer {key}'s"}
    url = f"{running.base_url}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def versions(running: RunningApp) -> dict[str, int]:
    found: dict[str, int] = ray.get(running.registry.stable_versions.remote(), timeout=30)
    return found


def inserted(running: RunningApp) -> dict[str, int]:
    stats = {topic: shard.stats.remote() for topic, shard in running.shards.items()}
    return {topic: ray.get(s, timeout=30).inserted_total for topic, s in stats.items()}


def test_what_one_key_teaches_drafts_for_it_alone(running: RunningApp) -> None:
    seeds = iter(range(10_000))

    def published() -> bool:
        for prompt in generate("sql", 8, next(seeds)):
            ask(running, "acme", prompt)
        return versions(running)["acme.sql"] > 0

    wait_until(published, "a version of acme's expert", 400)
    prompts = generate("sql", 8, 10_001)
    answers = {key: [ask(running, key, prompt) for prompt in prompts] for key in KEYS}
    plain = [ask(running, "acme", p, store=False, speculative={"draft": "off"}) for p in prompts]
    for own in answers.values():
        assert [a["choices"][0]["token_ids"] for a in own] == [
            a["choices"][0]["token_ids"] for a in plain
        ]
    for key, own in answers.items():
        found = [answer["metrics"]["speculative_decoding"] for answer in own]
        assert {figures["topic"] for figures in found} == {f"{key}.sql"}
        assert {figures["draft"] for figures in found} <= {"general", f"{key}.sql"}
        if key == "beta":
            assert {figures["weight_version"] for figures in found} == {0}
    others = {
        topic: n for topic, n in versions(running).items() if topic.partition(".")[0] != "acme"
    }
    assert others == {"general": 0, "beta.general": 0, "beta.sql": 0}
    kept = inserted(running)
    assert kept["acme.sql"] > 0
    assert {topic: kept[topic] for topic in others} == dict.fromkeys(others, 0)  # by its default
    ask(running, "beta", prompts[0], store=True)
    wait_until(lambda: inserted(running)["beta.sql"] == 1, "a record that beta asked for", 30)


def test_a_prompt_s_blocks_are_reused_for_its_key_alone(running: RunningApp) -> None:
    prompt = "Nobody has asked for this before: how many legs have seven horses and a hen? " * 3

    def cached(key: str) -> int:
        usage = ask(running, key, prompt, store=True)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached("acme"), cached("beta")] == [0, 0]
    assert min(cached("acme"), cached("beta")) > 0


def test_records_are_removed_by_key_and_topic(running: RunningApp) -> None:
    ask(running, "beta", "SELECT name FROM people", store=True)
    kept = inserted(running)
    assert kept["acme.sql"] > 0
    url = f"{running.base_url}/v1/paceline/replay/purge"
    headers = {"Authorization": "Bearer acme's"}
    answer = httpx.post(url, json={"topic": "acme.sql"}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text

    def held() -> dict[str, int]:
        stats = {topic: shard.stats.remote() for topic, shard in running.shards.items()}
        every = {topic: ray.get(own, timeout=30) for topic, own in stats.items()}
        return {topic: own.records("train", "held_out") for topic, own in every.items()}

    after = held()
    assert after["acme.sql"] == 0
    assert after["beta.sql"] + after["beta.general"] > 0
