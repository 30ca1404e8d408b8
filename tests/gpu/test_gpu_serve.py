"""The whole system on one GPU over real HTTP: answers, learning beside them, both placements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fixture_models import SMALL_MODELS
from free_ports import find_port
from waiting import wait_until

from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

SETTINGS: dict[str, dict[str, object]] = {
    "colocated": {"target.cuda_graphs": True},
    "pool": {"drafts.placement": "pool", "drafts.num_gpus": 0.1, "drafts.topics": ["sql", "code"]},
    "pool on CPUs": {"drafts.placement": "pool", "drafts.topics": ["sql"]},
}


@pytest.fixture(scope="module", params=SETTINGS)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningApp]:
    config = load_config(
        None,
        {
            **SMALL_MODELS,
            "port": find_port(),
            "state_dir": str(tmp_path_factory.mktemp("state")),
            "target.dtype": "float32",
            "target.num_threads": 2,
            "training.canary_share": 0.0,  # a new version is served at once
            "ray.dashboard": False,
        }
        | SETTINGS[request.param],
    )
    with app.start(config) as application:
        yield application


def ask(running: RunningApp, prompts: Sequence[str], **speculative: object) -> list[dict[str, Any]]:
    def one(client: httpx.Client, prompt: str) -> dict[str, Any]:
        answer = client.post(
            "/v1/chat/completions",
            json={
                "model": "paceline",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 32,
                "temperature": 0,
                "return_token_ids": True,
                "speculative": speculative,
            },
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    with (
        httpx.Client(base_url=running.base_url, timeout=120) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        return list(threads.map(lambda prompt: one(client, prompt), prompts))


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def test_it_answers_as_the_target_does_and_learns(running: RunningApp) -> None:
    assert running.target.device == "cuda"
    prompts = generate("sql", 96, 3)
    off = ask(running, prompts[:24], draft="off")
    drafted = ask(running, prompts[:24], draft="sql", num_speculative_tokens=4)
    assert tokens(drafted) == tokens(off)
    assert sum(a["metrics"]["speculative_decoding"]["num_draft_tokens"] for a in drafted) > 0
    ask(running, prompts, draft="sql", num_speculative_tokens=4)

    def version() -> int:
        with httpx.Client(base_url=running.base_url, timeout=30) as client:
            status = client.get("/v1/paceline/status").json()
        return int(status["weight_versions"]["sql"])

    wait_until(lambda: version() > 0, "a new version of sql", 200)
    assert tokens(ask(running, prompts[:24], draft="sql", num_speculative_tokens=4)) == tokens(off)
