"""Experts by key: what a trainer's batches are made of, and what experts are scored on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fixture_models import SMALL_MODELS
from local_client import LocalClient, make_loop
from local_client import trainer_settings as quick_settings
from training_records import training_record

from paceline.actors.replay.record import ReplayRecord, encode
from paceline.actors.training.candidate import Candidate
from paceline.actors.training.expert_evaluation import ExpertEvaluator
from paceline.actors.training.scorer import ScoringLoop
from paceline.actors.training.settings import ScorerSettings
from paceline.deploy.config.config import load_config
from paceline.deploy.config.learning_settings import trainer_settings

EXPERTS = ("general", "acme.general", "acme.sql", "beta.general", "beta.sql")
LEARNING = EXPERTS[1:]


def record(topic: str, number: int) -> ReplayRecord:
    return dataclasses.replace(
        training_record(number), request_id=f"{topic}/{number}", topic=topic, expert=topic
    )


@pytest.mark.usefixtures("deepspeed")
def test_no_record_reaches_another_key_s_or_topic_s_batch(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = LocalClient(tmp_path, EXPERTS)
    for number in range(40):
        for topic in LEARNING:
            client.shards[topic].insert(encode(record(topic, number)))
    learnt: dict[str, set[str]] = {topic: set() for topic in LEARNING}
    judged: dict[str, set[str]] = {topic: set() for topic in LEARNING}
    make_shares, compare = Candidate.make_shares, Candidate.compare

    def watched(self: Candidate, step: Sequence[Sequence[ReplayRecord]]) -> Any:
        learnt[self.topic] |= {r.request_id.partition("/")[0] for each in step for r in each}
        return make_shares(self, step)

    def compared(self: Candidate, records: Sequence[ReplayRecord], *more: Any) -> Any:
        judged[self.topic] |= {r.request_id.partition("/")[0] for r in records}
        return compare(self, records, *more)

    monkeypatch.setattr(Candidate, "make_shares", watched)
    monkeypatch.setattr(Candidate, "compare", compared)
    loop = make_loop(quick_settings(draft, LEARNING, round_seconds=0.2), client)
    for _ in range(2 * len(LEARNING)):
        loop.run_round()
    assert learnt == judged == {topic: {topic} for topic in LEARNING}
    assert client.registry is not None
    versions = client.registry.stable_versions()
    assert versions["general"] == 0
    assert max(versions.values()) > 0


def test_the_general_of_no_key_is_not_among_what_is_trained() -> None:
    keys = {name: {"sha256": name[0] * 64} for name in ("acme", "beta")}
    given = SMALL_MODELS | {"auth.keys": keys, "drafts.topics": ["sql"]}
    assert set(trainer_settings(load_config(None, given)).draft_paths) == {"general", "sql"}
    scoped = load_config(None, given | {"replay.scope": "key"})
    assert tuple(scoped.experts) == EXPERTS
    assert tuple(trainer_settings(scoped).draft_paths) == LEARNING


def test_experts_are_scored_on_their_own_key_s_records_alone(draft: Path, tmp_path: Path) -> None:
    """The one that never learns on all: it is the floor of every topic."""
    settings = ScorerSettings(
        draft_paths=dict.fromkeys(EXPERTS, str(draft)),
        fingerprints=dict.fromkeys(EXPERTS, "mark"),
        dtype="float32",
        retention_s=1e12,
    )
    scoring, evaluator = ScoringLoop(settings), ExpertEvaluator(settings)
    for number in range(4):
        for topic in ("acme.sql", "beta.sql"):
            scoring.offer(encode(record(topic, number)))
    client = LocalClient(tmp_path, EXPERTS)
    while scoring.run_once(client, evaluator):
        pass
    table = scoring.table()
    assert (table.waiting, table.scores) == (0, 8 + 4 * 4)
    for key in ("acme", "beta"):
        own = {"general", f"{key}.general", f"{key}.sql"}
        assert set(table.acceptance[f"{key}.sql"]) == own
        assert set(table.weights[f"{key}.sql"]) == own
