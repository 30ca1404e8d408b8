"""Experts by key, from a request's key to its draft and its record, over a real target."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from local_ingress import Handle, nothing_learns
from tiny_models import save_tiny, tiny_tokenizer

from paceline.actors.engine.target import TargetReplica
from paceline.actors.replay.record import ReplayRecord, decode
from paceline.actors.training.scorer import ScorerTable
from paceline.deploy.api.ingress import Ingress
from paceline.deploy.config.config import PacelineConfig, load_config
from paceline.deploy.config.replica_settings import ingress_settings, target_settings

NAMES = ("acme", "beta")
KEYS = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in NAMES}
BODY = {"model": "m", "prompt": "SELECT name", "max_tokens": 6, "temperature": 0, "n": 1}
# As if beta's expert were the best one for acme's requests.
MISLED = ScorerTable(
    weights={"acme.sql": {"beta.sql": 0.9, "acme.sql": 0.1}},
    acceptance={},
    rows={},
    versions={},
    waiting=0,
    on_trial=("beta.sql",),
    offered=0,
    refused=0,
    scores=0,
)


def remote(**calls: Any) -> Any:
    """A handle of Ray's shape whose methods run here."""
    return SimpleNamespace(**{n: SimpleNamespace(remote=call) for n, call in calls.items()})


async def sure(text: str) -> dict[str, float]:
    return {"sql": 0.95, "general": 0.05} if "SELECT" in text else {"general": 1.0}


async def misled() -> ScorerTable:
    return MISLED


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, vocab = tmp_path_factory.mktemp("models"), len(tiny_tokenizer())
    return {
        name: save_tiny(root / name, seed, vocab=vocab, layers=layers)
        for name, seed, layers in (("target", 1, 2), ("draft", 2, 1))
    }


def config_of(models: dict[str, Path], scope: str, *, records: bool = True) -> PacelineConfig:
    return load_config(
        None,
        {
            "model_name": "m",
            "target.path": str(models["target"]),
            "target.dtype": "float32",
            "target.num_threads": 1,
            "target.generation_config": "none",
            "drafts.general": str(models["draft"]),
            "drafts.topics": ["sql"],
            "drafts.num_speculative_tokens": 2,
            "replay.scope": scope,
            "replay.enabled": records,
            "training.enabled": records,
            "router.min_confidence": 0.5,
            "router.placement": "deployment",
            "auth.keys": KEYS,
        },
    )


class Served:
    """A target and an ingress as the configuration has them, with what they record."""

    def __init__(self, config: PacelineConfig) -> None:
        self.records: dict[str, list[ReplayRecord]] = {name: [] for name in config.experts}
        shards = {name: remote(insert=self._insert(name)) for name in config.experts}
        self.target = TargetReplica(target_settings(config), shards)
        actors = nothing_learns(scorer=remote(table=misled, offer=lambda _: None))
        self.ingress = Ingress(
            ingress_settings(config), Handle(self.target), remote(classify=sure), actors
        )

    def _insert(self, topic: str) -> Any:
        return lambda data, _left_out: self.records[topic].append(decode(data))

    def ask(self, *asked: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
        """Answers to (key, more of the body), one after the other."""

        async def send() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.ingress.api())
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
                self.ingress._routing_table.weights()
                while self.ingress._routing_table.weights() is None:
                    await asyncio.sleep(0.001)
                return [
                    await http.post(
                        "/v1/completions",
                        json=BODY | more,
                        headers={"Authorization": f"Bearer {key}"},
                    )
                    for key, more in asked
                ]

        return asyncio.run(send())

    def kept(self, count: int) -> dict[str, list[str]]:
        """Ids of the recorded answers by topic, once there are so many."""
        deadline = time.monotonic() + 10  # a record goes out behind its answer
        while sum(map(len, self.records.values())) < count:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return {
            topic: [record.request_id.rpartition("-")[0] for record in records]
            for topic, records in self.records.items()
        }


@pytest.fixture
def served(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("PACELINE_API_KEYS", "guest")
    found = Served(config_of(models, "key"))
    yield found
    found.target._loop.close()


def figures(answer: httpx.Response) -> tuple[str, str]:
    assert answer.status_code == 200, answer.text
    found = answer.json()["metrics"]["speculative_decoding"]
    return found["topic"], found["draft"]


def test_a_key_s_requests_are_drafted_for_and_recorded_by_its_own_experts_alone(
    served: Served,
) -> None:
    other = {"prompt": "List all files"}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("acme", {}),
        ("beta", {}),
        ("acme", other),
        ("beta", other),
        ("acme", {"speculative": {"draft": "acme.general"}}),
        ("acme", {"speculative": {"draft": "acme.sql@0"}}),
        ("acme", {"speculative": {"draft": "off"}}),
        ("acme", {"store": False}),
        ("acme", {"speculative": {"draft": "general"}}),
        ("guest", {}),
        ("guest", other),
        ("guest", {"speculative": {"draft": "general@0"}}),
    ]
    answers = served.ask(*asked)
    assert [figures(answer) for answer in answers] == [
        ("acme.sql", "acme.sql"),
        ("beta.sql", "beta.sql"),
        ("acme.general", "acme.general"),
        ("beta.general", "beta.general"),
        ("acme.general", "acme.general"),
        ("acme.sql", "acme.sql@0"),
        ("acme.sql", "off"),
        ("acme.sql", "acme.sql"),
        ("general", "general"),
        ("general", "general"),
        ("general", "general"),
        ("general", "general@0"),
    ]
    ids = [answer.json()["id"] for answer in answers]
    assert served.kept(7) == {
        "general": [],  # it learns from nobody
        "acme.general": [ids[2], ids[4]],
        "acme.sql": [ids[0], ids[5], ids[6]],
        "beta.general": [ids[3]],
        "beta.sql": [ids[1]],
    }


@pytest.mark.parametrize("key", ["acme", "guest"])
@pytest.mark.parametrize("draft", ["beta.sql", "beta.general@0", "beta.sql@candidate", "sql"])
def test_another_key_s_expert_cannot_be_asked_for(served: Served, key: str, draft: str) -> None:
    (answer,) = served.ask((key, {"speculative": {"draft": draft}}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "speculative.draft"
    assert "beta" not in error["message"].replace(draft, "")


def test_answers_are_those_without_a_scope(models: dict[str, Path], served: Served) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        (key, {"prompt": text, "max_tokens": 24})
        for key in (*NAMES, "guest")
        for text in ("SELECT name", "List all files")
    ]
    shared = Served(config_of(models, "all"))
    try:
        texts = [
            [answer.json()["choices"][0]["text"] for answer in each.ask(*asked)]
            for each in (served, shared)
        ]
        assert texts[0] == texts[1]
        assert set(shared.kept(6)) == {"general", "sql"}
    finally:
        shared.target._loop.close()
    assert served.target._loop.stats().draft_failures == 0


def test_a_server_that_records_nothing_answers_the_same(models: dict[str, Path]) -> None:
    asked: list[tuple[str, dict[str, Any]]] = [
        ("acme", {}),
        ("acme", {"store": True}),
        ("acme", {"speculative": {"draft": "off"}}),
    ]
    found = []
    for records in (True, False):
        served = Served(config_of(models, "all", records=records))
        answers = served.ask(*asked)
        served.target._loop.close()  # once it has handed over all records
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        found.append((texts, [figures(answer) for answer in answers], served.records))
    (texts, routed, kept), (texts_without, routed_without, kept_without) = found
    assert texts == texts_without
    assert routed == [("sql", "sql"), ("sql", "sql"), ("sql", "off")]
    # What nothing drafts for and nobody learns from is not routed.
    assert routed_without == [*routed[:2], ("general", "off")]
    assert {topic: len(own) for topic, own in kept.items()} == {"general": 0, "sql": 3}
    assert not any(kept_without.values())
