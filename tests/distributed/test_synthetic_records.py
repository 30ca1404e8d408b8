"""The small models: an idle target answers stored prompts again, and lets go for requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import ray
from fixture_models import SMALL_MODELS
from free_ports import find_port
from waiting import eventually

from paceline.actors.replay.buffer import ShardStats
from paceline.actors.replay.record import ReplayRecord, belongs, decode, source_id
from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(400)]

PER_RECORD, MAX_TOKENS = 2.0, 24


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
            "drafts.topics": ["sql"],
            "replay.held_out_fraction": 0.3,
            "training.round_seconds": 2.0,
            "training.canary_share": 0.0,
            "training.synthetic_per_record": PER_RECORD,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as started:
        yield started


def ask(running: RunningApp, prompt: str) -> dict[str, Any]:
    body = {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
        "speculative": {"draft": "sql"},
    }
    answer = httpx.post(f"{running.base_url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def stats(running: RunningApp) -> ShardStats:
    found: ShardStats = ray.get(running.shards["sql"].stats.remote(), timeout=10)
    return found


def synthetic_records(running: RunningApp) -> list[ReplayRecord]:
    drawn = ray.get(running.shards["sql"].sample.remote(1_000, "synthetic"), timeout=10)
    return [decode(data) for data in drawn]


def test_an_idle_target_answers_again_unnoticed(running: RunningApp) -> None:
    prompts = generate("sql", 40, seed=11)
    first = [ask(running, prompt) for prompt in prompts]
    assert eventually(lambda: stats(running).records("synthetic") >= 8)
    again = [ask(running, prompt) for prompt in prompts]
    for one, two in zip(first, again, strict=True):
        assert one["choices"][0]["token_ids"] == two["choices"][0]["token_ids"]
    names = [answer["id"] for answer in first + again]
    records = synthetic_records(running)
    assert all(any(belongs(r.request_id, name) for name in names) for r in records)
    assert {(record.topic, record.expert) for record in records} == {("sql", "off")}
    known = {tuple(r.output_token_ids.tolist()) for r in records}
    assert len(known) > len(records) // 2, "answers differ from one another"
    assert np.mean([len(record.output_token_ids) for record in records]) > 4
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=60).json()
    assert status["trainer"]["synthetic"]["made"] > 0
    assert status["target"]["draft_failures"] == 0


def test_there_are_no_more_than_wanted_and_they_are_learnt_from(running: RunningApp) -> None:
    def done() -> bool:
        found = stats(running)
        assert found.records("synthetic") <= PER_RECORD * found.records("train") + 4
        return found.records("synthetic") >= PER_RECORD * found.records("train") - 1

    assert eventually(done)
    load = ray.get(running.scheduler.status.remote(), timeout=10)
    assert (load.running, load.waiting) == (0, 0)
    assert eventually(
        lambda: ray.get(running.registry.stable_versions.remote(), timeout=10)["sql"] >= 1
    )


def test_a_purge_takes_a_request_s_synthetic_records(running: RunningApp) -> None:
    records = synthetic_records(running)
    source = source_id(records[0].request_id).removesuffix("-0")
    own = sum(belongs(record.request_id, source) for record in records)
    url = f"{running.base_url}/v1/paceline/replay/purge"
    answer = httpx.post(url, json={"request_id": source}, timeout=60).json()
    assert answer["removed"]["sql"] >= own + 1  # another may have come meanwhile
    assert not any(belongs(record.request_id, source) for record in synthetic_records(running))


def test_a_killed_trainer_has_prompts_answered_again(running: RunningApp) -> None:
    (trainer,) = running.trainers().values()
    pid = ray.get(trainer.status.remote(), timeout=10).pid
    os.kill(pid, signal.SIGKILL)
    for prompt in generate("sql", 12, seed=12):
        ask(running, prompt)

    def came_back() -> bool:
        (now,) = running.trainers().values()
        found = ray.get(now.status.remote(), timeout=10)
        return bool(found.pid != pid and found.synthetic is not None and found.synthetic.made > 0)

    assert eventually(came_back)
