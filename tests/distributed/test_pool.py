"""The small models with their drafts in a pool, over real HTTP: same text, whatever is killed.

Two experts, each a Serve deployment. Answers are greedy in float32, so each must be the target's
own tokens, however it was drafted and whoever died meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import processes
import pytest
import ray
import torch
from fixture_models import DRAFT, SMALL_MODELS
from free_ports import find_port
from waiting import wait_until

from paceline.actors.engine.model_loader import load_causal_lm
from paceline.actors.weights.flat_weights import flatten
from paceline.deploy import app
from paceline.deploy.app import RunningApp
from paceline.deploy.config.config import load_config
from paceline.deploy.demo.prompts import generate

# tests/unit/speculation/pool has the same over sockets.
pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(240)]
EXPERTS = ("general", "sql")
ASKED = [
    (expert, prompt)
    for i in range(12)
    for expert, prompt in zip(EXPERTS, (generate("code", 12, 5)[i], generate("sql", 12, 5)[i]))  # noqa: B905
]
OFF = {"draft": "off"}


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
            "drafts.placement": "pool",
            "router.enabled": False,
            "training.enabled": False,
            "ray.num_cpus": 2,
            "ray.dashboard": False,
        },
    )
    with app.start(config) as application:
        yield application


def ask(client: httpx.Client, expert: str, prompt: str, **more: Any) -> dict[str, Any]:
    """An answer; every status but 200 is a failure."""
    content = {
        "model": "paceline",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 32,
        "temperature": 0,
        "return_token_ids": True,
        "speculative": {"draft": expert, "num_speculative_tokens": 4},
    } | more
    answer = client.post("/v1/chat/completions", json=content)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask_all(running: RunningApp, **more: Any) -> list[dict[str, Any]]:
    with (
        httpx.Client(base_url=running.base_url, timeout=120) as client,
        ThreadPoolExecutor(4) as threads,
    ):
        return list(threads.map(lambda asked: ask(client, *asked, **more), ASKED))


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def accepted(answers: list[dict[str, Any]]) -> dict[str, int]:
    """Accepted draft tokens per expert."""
    sums = dict.fromkeys(EXPERTS, 0)
    for (expert, _), answer in zip(ASKED, answers, strict=True):
        sums[expert] += answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    return sums


def target(running: RunningApp) -> dict[str, Any]:
    status = httpx.get(f"{running.base_url}/v1/paceline/status", timeout=30).json()
    found: dict[str, Any] = status["target"]
    return found


def pids(expert: str) -> set[int]:
    """The processes of an expert's replicas, among those that this run has started."""
    return {process.pid for process in processes.of_expert(expert)}


@pytest.fixture(scope="module")
def plain(running: RunningApp) -> list[list[int]]:
    """The target's own answers, without speculation."""
    return tokens(ask_all(running, speculative=OFF))


def test_answers_are_the_targets_own_and_drafts_come_from_the_pool(
    running: RunningApp, plain: list[list[int]]
) -> None:
    assert running.target.experts.keys() == set(EXPERTS)
    answers = ask_all(running)
    assert tokens(answers) == plain
    assert all(count > 0 for count in accepted(answers).values())
    facts = target(running)
    assert facts["draft_failures"] == 0
    assert set(facts["drafts"]) == {"general", "general@0", "sql", "sql@0"}
    for expert in EXPERTS:
        assert len(pids(expert)) == 1
        assert facts["experts"][expert]["circuit"] == "closed"
        assert facts["experts"][expert]["answered"] > 10


def test_an_expert_pulls_new_weights_and_the_initial_ones_stay(
    running: RunningApp, plain: list[list[int]]
) -> None:
    model = load_causal_lm(DRAFT, torch.float32, attention="sdpa")
    noise = torch.Generator().manual_seed(1)
    state = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=noise)
        for name, weight in model.state_dict().items()
    }
    published = running.registry.publish.remote("sql", flatten(state), {"test": True})
    version: int = ray.get(published)

    def pulled() -> bool:
        with httpx.Client(base_url=running.base_url, timeout=60) as client:
            answer = ask(client, *ASKED[1])
        assert answer["choices"][0]["token_ids"] == plain[1]
        return target(running)["drafts"]["sql"] == version

    wait_until(pulled, "the new weights", 30)
    assert target(running)["drafts"]["sql@0"] == 0
    old = {"draft": "sql@0", "num_speculative_tokens": 4}
    answers = ask_all(running, speculative=old)
    assert tokens(answers) == plain
    assert sum(accepted(answers).values()) > 0


def test_a_stopped_expert_costs_speed_only_and_rejoins_by_itself(
    running: RunningApp, plain: list[list[int]]
) -> None:
    (pid,) = pids("sql")
    before = target(running)["experts"]["sql"]
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = ask_all(running)
        stopped = target(running)["experts"]["sql"]
    finally:
        os.kill(pid, signal.SIGCONT)
    assert tokens(answers) == plain
    assert accepted(answers)["general"] > 0
    assert stopped["circuit"] != "closed"
    # every deadline missed opened the circuit: rounds did not wait one by one
    assert 1 <= stopped["silent"] - before["silent"] <= 5

    def rejoined() -> bool:
        with httpx.Client(base_url=running.base_url, timeout=60) as client:
            assert ask(client, *ASKED[1])["choices"][0]["token_ids"] == plain[1]
        facts = target(running)["experts"]["sql"]
        return bool(facts["circuit"] == "closed" and facts["answered"] > stopped["answered"] + 5)

    wait_until(rejoined, "the stopped expert", 60)
    assert pids("sql") == {pid}


def kill(expert: str) -> set[int]:
    """Kill -9 the processes of an expert; returns their ids."""
    found = pids(expert)
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return found


@contextlib.contextmanager
def load(running: RunningApp, plain: list[list[int]]) -> Iterator[None]:
    """Requests without a pause meanwhile; afterwards each must have had its text."""
    passes: list[list[list[int]]] = []
    failures: list[BaseException] = []
    done = threading.Event()

    def serve() -> None:
        try:
            while not done.is_set():
                passes.append(tokens(ask_all(running)))
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not failures, failures
    assert passes
    assert all(texts == plain for texts in passes)


def test_kill_9_of_experts_fails_no_request_and_they_propose_again(
    running: RunningApp, plain: list[list[int]]
) -> None:
    """One expert dies under load, then all of them, that one perhaps while it comes back."""

    def count(expert: str, what: str) -> int:
        found: int = target(running)["experts"][expert][what]
        return found

    versions = target(running)["drafts"]
    lost = {expert: count(expert, "lost") for expert in EXPERTS}
    with load(running, plain):
        wait_until(lambda: target(running)["running"] > 0, "load")
        dead = kill("sql")
        wait_until(lambda: count("sql", "lost") > lost["sql"], "the loss of sql")
        dead |= set().union(*(kill(expert) for expert in EXPERTS))
        wait_until(lambda: count("general", "lost") > lost["general"], "the loss of general")
        answered = {expert: count(expert, "answered") for expert in EXPERTS}
        for expert in EXPERTS:
            wait_until(
                lambda expert=expert: count(expert, "answered") > answered[expert] + 5,
                f"the return of {expert}",
            )
        assert len(dead) >= 2
        assert all(len(pids(e)) == 1 and not pids(e) & dead for e in EXPERTS)
    answers = ask_all(running)
    assert tokens(answers) == plain
    assert all(number > 0 for number in accepted(answers).values())
    facts = target(running)
    assert all(facts["experts"][expert]["circuit"] == "closed" for expert in EXPERTS)
    assert facts["draft_failures"] == 0
    assert facts["drafts"] == versions  # pulled before the first answer
