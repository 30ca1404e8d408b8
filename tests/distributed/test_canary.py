"""A poisoned trainer against a real server: noise published over Ray, requests over HTTP.

Greedy answers in float32, so each must be the target's own tokens whatever is on trial.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
import torch
from fixture_models import DRAFT, SMALL_MODELS
from free_ports import find_port
from waiting import wait_until

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.flat_weights import flatten
from paceline.actors.weights.versions import TopicStatus
from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]
SHARE = 0.3


@pytest.fixture(scope="module", params=["colocated", "pool"])
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
            "target.num_threads": 1,
            "drafts.topics": ["sql"],
            "drafts.placement": request.param,
            "router.enabled": False,
            "training.canary_share": SHARE,
            "training.round_seconds": 4.0,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


def body(prompt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "temperature": 0,
        "return_token_ids": True,
        "speculative": {"draft": "sql", "num_speculative_tokens": 4},
    } | more


async def ask_all(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(8)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def ask(content: dict[str, Any]) -> dict[str, Any]:
            async with gate:
                answer = await client.post("/v1/chat/completions", json=content)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        return list(await asyncio.gather(*(ask(content) for content in bodies)))


def served(running: RunningApp, prompts: list[str], **more: Any) -> list[dict[str, Any]]:
    return asyncio.run(ask_all(running.base_url, [body(p, **more) for p in prompts]))


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def speculation(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer["metrics"]["speculative_decoding"] for answer in answers]


def noise(size: float) -> Any:
    model = load_causal_lm(DRAFT, torch.float32, attention="sdpa")
    generator = torch.Generator().manual_seed(1)
    state = model.state_dict().items()
    return flatten(
        {name: w + size * torch.randn(w.shape, generator=generator) for name, w in state}
    )


def call(running: RunningApp, method: str, *arguments: Any) -> Any:
    return ray.get(getattr(running.registry, method).remote(*arguments), timeout=30)


def status(running: RunningApp) -> TopicStatus:
    found: TopicStatus = call(running, "topic_status")["sql"]
    return found


def test_noise_is_tried_on_a_share_and_removed_everywhere(running: RunningApp) -> None:
    ray.get(running.scheduler.pause.remote())
    prompts = generate("math", 40, seed=3)  # what the first draft knows
    plain = tokens(served(running, prompts, speculative={"draft": "off"}, store=False))
    before = speculation(served(running, prompts))
    stable = status(running).stable
    version = call(running, "publish", "sql", noise(0.5), {"forged": True})
    seen: list[dict[str, Any]] = []

    def removed() -> bool:
        answers = served(running, prompts)
        assert tokens(answers) == plain
        seen.extend(speculation(answers))
        return status(running).candidate is None

    wait_until(removed, "the end of the noise", 240)
    assert status(running).stable == stable
    last = [d for d in call(running, "history", "sql") if d["outcome"] != "drift"][-1]
    assert (last["outcome"], last["version"]) == ("rolled_back", version)
    assert last["canary_acceptance"] < last["stable_acceptance"]
    on_trial = [s for s in seen if s["weight_version"] == version]
    by_stable = [i for i, s in enumerate(seen) if s["weight_version"] == stable]
    assert 0 < len(on_trial) < 2 * SHARE * len(seen)
    served_rate = rate([seen[i] for i in by_stable])
    assert rate(on_trial) < 0.3 * served_rate
    same = [before[i % len(prompts)] for i in by_stable]
    assert served_rate == pytest.approx(rate(same), abs=0.05)

    def back() -> bool:
        return {s["weight_version"] for s in speculation(served(running, prompts))} == {stable}

    wait_until(back, "the stable draft for all", 60)
    with pytest.raises(ValueError, match="not finite"):
        call(running, "publish", "sql", noise(float("nan")), {})


def rate(figures: list[dict[str, Any]]) -> float:
    drafted = sum(s["num_draft_tokens"] for s in figures)
    return sum(s["num_accepted_draft_tokens"] for s in figures) / drafted


def test_a_candidate_survives_the_registrys_death(running: RunningApp) -> None:
    ray.get(running.scheduler.pause.remote())
    version = call(running, "publish", "sql", noise(0.3), {"forged": True})
    pid = ray.get(running.registry.__ray_call__.remote(lambda _self: os.getpid()))
    os.kill(pid, signal.SIGKILL)

    def there() -> bool:
        try:
            return bool(status(running).candidate == version)
        except ray.exceptions.RayError:
            return False

    wait_until(there, "the candidate", 60)
    assert call(running, "roll_back", "sql") == status(running).stable
    assert status(running).candidate is None


def test_what_is_learnt_is_promoted_by_live_requests(running: RunningApp) -> None:
    ray.get(running.scheduler.resume.remote())
    number = iter(range(1_000))

    def promoted() -> bool:
        served(running, generate("sql", 24, seed=100 + next(number)))
        time.sleep(1.0)  # what drafts learn in
        return "promoted" in {d["outcome"] for d in call(running, "history", "sql")}

    wait_until(promoted, "a promotion", 400)
    decision = [d for d in call(running, "history", "sql") if d["outcome"] == "promoted"][-1]
    assert decision["canary_acceptance"] > decision["stable_acceptance"]
    assert decision["canary_requests"] >= CanarySettings().least
    assert status(running).stable >= decision["version"]
