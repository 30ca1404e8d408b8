"""Samples of real parts: together they have every metric of the catalogue."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest
from engines import request
from training_records import training_record
from unit.engine.test_stats import served
from unit.weights.test_registry import weights

from paceline.actors.engine.stats import RoundStats
from paceline.actors.replay.buffer import ReplaySettings
from paceline.actors.replay.record import encode
from paceline.actors.replay.shard import ReplayShard
from paceline.actors.router.hedge import Hedge
from paceline.actors.speculation.pool.client import ExpertClient
from paceline.actors.training.permits import Permit, TrainerIdentity
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.scorer import ScorerTable
from paceline.actors.weights.canary import CanarySettings
from paceline.actors.weights.draft_outcomes import DraftOutcome
from paceline.actors.weights.history import Outcome
from paceline.actors.weights.registry import WeightRegistry
from paceline.actors.weights.version_store import outcome_of
from paceline.cluster.scheduler.trainer_scheduler import TrainerScheduler
from paceline.deploy.monitoring.catalogue import (
    BY_NAME,
    METRICS,
    REGISTRY,
    SCHEDULER,
    SHARD,
    TARGET,
)
from paceline.deploy.monitoring.exporter import Sample
from paceline.deploy.monitoring.samples import (
    TRAINER_STATES,
    UPDATES,
    _versions,
    pool_samples,
    registry_samples,
    scheduler_samples,
    shard_samples,
    slot_labels,
    target_samples,
    trainer_samples,
)

GATE = {"candidate_expected_acceptance": 0.6, "served_expected_acceptance": 0.4}


def by_labels(samples: Iterable[Sample], name: str) -> dict[tuple[str, ...], float]:
    return {s.labels: s.value for s in samples if s.name == name}


def check(samples: list[Sample], part: str, but: set[str] | None = None) -> None:
    """The samples fit the catalogue, and all of the part's metrics are among them."""
    for sample in samples:
        metric = BY_NAME[sample.name]
        assert metric.part == part
        assert len(sample.labels) == len(metric.labels), sample
        assert all(isinstance(label, str) and label for label in sample.labels), sample
    expected = {metric.name for metric in METRICS if metric.part == part} - (but or set())
    assert {sample.name for sample in samples} == expected


def test_target_samples() -> None:
    asked = [request(f"r{i}", [5 + i], ignore_eos=True) for i in range(3)]
    _, figures = served(asked)
    figures.rounds.add_suffix("sql", 5, 3)
    figures.rounds.add_suffix("sql", 2, 1)
    samples = list(target_samples(figures))
    assert by_labels(samples, "spec_decode_num_suffix_tokens") == {("sql",): 7}
    assert by_labels(samples, "spec_decode_num_accepted_suffix_tokens") == {("sql",): 4}
    controller_s = {"predicted_goodput", "num_speculative_tokens", "plain_decode_seconds"}
    of_a_pool = {"expert_requests", "expert_connected"}
    check(samples, TARGET, controller_s | of_a_pool)
    drafts = by_labels(samples, "spec_decode_num_drafts")
    assert drafts == {("sql", "a", "stable"): figures.rounds.counts["sql", "a"].drafts}
    positions = by_labels(samples, "spec_decode_num_accepted_tokens_per_pos")
    assert sorted(labels[3] for labels in positions) == ["0", "1", "2", "3"]
    assert sum(positions.values()) == sum(
        by_labels(samples, "spec_decode_num_accepted_tokens").values()
    )
    assert by_labels(samples, "version_num_drafts") == {("a", "0"): sum(drafts.values())}
    assert by_labels(samples, "draft_weight_version") == {("a", "stable"): 0, ("b", "stable"): 0}
    assert by_labels(samples, "kv_blocks")[("used",)] == 0
    assert len([s for s in samples if s.name == "time_to_first_token_seconds"]) == 3
    again = list(target_samples(figures))
    assert not [s for s in again if s.name == "time_to_first_token_seconds"]  # once each


def test_a_promoted_version_keeps_its_number() -> None:
    stats = RoundStats()
    stats.add_row("sql", "sql@candidate", 1, 4, 2)
    stats.add_row("sql", "sql", 0, 4, 1)
    stats.add_row("sql", "sql", 1, 4, 3)  # promoted
    held = list(_versions(stats.versions.items()))
    drafts, accepted = (by_labels(held, f"version_num_{n}") for n in ("drafts", "accepted_tokens"))
    assert drafts == {("sql", "0"): 1, ("sql", "1"): 2}
    assert accepted == {("sql", "0"): 1, ("sql", "1"): 5}


def test_pool_experts_by_outcome_of_requests() -> None:
    samples = list(pool_samples({"sql": ExpertClient("sql").stats()}))
    assert by_labels(samples, "expert_connected") == {("sql",): 0}
    outcomes = by_labels(samples, "expert_requests")
    assert outcomes == {
        ("sql", "answered"): 0,
        ("sql", "silent"): 0,
        ("sql", "late"): 0,
        ("sql", "lost"): 0,
    }
    assert {s.name for s in samples} <= set(BY_NAME)


@pytest.mark.parametrize(
    ("draft", "labels"),
    [
        ("sql", ("sql", "stable")),
        ("sql@candidate", ("sql", "candidate")),
        ("sql@0", ("sql", "initial")),
    ],
)
def test_labels_of_a_draft(draft: str, labels: tuple[str, str]) -> None:
    assert slot_labels(draft) == labels


def test_shard_samples_cover_every_dropped_record() -> None:
    size = len(encode(training_record(0)))
    shard = ReplayShard("sql", ReplaySettings(10 * size, 3600.0), seed=0, clock=lambda: 0.0)
    for number in range(60):
        shard.insert(encode(training_record(number)))
    shard.insert(b"nonsense", 7)
    samples = list(shard_samples(shard.stats()))
    check(samples, SHARD)
    kept = sum(by_labels(samples, "replay_records").values())
    evicted = by_labels(samples, "replay_evicted")["sql",]
    assert by_labels(samples, "replay_inserted")["sql",] == 60 == kept + evicted
    assert by_labels(samples, "replay_invalid")["sql",] == 1
    assert by_labels(samples, "replay_left_out")["sql",] == 7
    used, room = by_labels(samples, "replay_bytes"), by_labels(samples, "replay_capacity_bytes")
    assert all(0 < used[key] <= room[key] for key in used)


@pytest.mark.parametrize("remover", ["fifo", "reservoir", "priority"])
def test_every_record_is_kept_evicted_or_expired(remover: Any) -> None:
    size, now = len(encode(training_record(0))), [0.0]
    settings = ReplaySettings(10 * size, 100.0, remover=remover)
    shard = ReplayShard("sql", settings, seed=0, clock=lambda: now[0])
    for number in range(40):
        shard.insert(encode(training_record(number)))
    now[0] = 200.0
    stats = shard.stats()
    assert stats.records("train") == stats.records("held_out") == 0
    assert stats.evicted_total > 0
    assert stats.expired_total > 0
    assert stats.evicted_total + stats.expired_total == 40


def test_synthetic_records_are_reported_where_any_are_kept() -> None:
    for per_record, splits in (
        (0.0, {"train", "held_out"}),
        (1.0, {"train", "held_out", "synthetic"}),
    ):
        shard = ReplayShard("sql", ReplaySettings(synthetic_per_record=per_record))
        found = by_labels(list(shard_samples(shard.stats())), "replay_capacity_bytes")
        assert set(found) == {("sql", split) for split in splits}
        assert min(found.values()) > 0


def test_registry_samples(tmp_path: Path) -> None:
    def start() -> WeightRegistry:
        topics, canary = ("sql", "general"), CanarySettings()
        return WeightRegistry(str(tmp_path), topics, "m", canary=canary, put=lambda x: x)

    registry = start()
    before = list(registry_samples(registry.metrics()))
    updates = by_labels(before, "weight_updates")
    assert set(updates.values()) == {0}  # exported from the start: the first one is an increase
    assert {labels[0] for labels in updates} == {"sql", "general"}
    registry.publish("sql", weights(1.0), GATE)
    registry.report([DraftOutcome("sql", 1, 0, 0, failed=True)])
    registry.publish("sql", weights(2.0), GATE)
    registry.report([DraftOutcome("sql", 2, 10, 5)])
    registry.reject("general", GATE | {"candidate_expected_acceptance": None})
    samples = list(registry_samples(registry.metrics()))
    check(samples, REGISTRY)
    updates = by_labels(samples, "weight_updates")
    assert {k: v for k, v in updates.items() if v} == {
        ("sql", "canary"): 2,
        ("sql", "rolled_back"): 1,
        ("general", "rejected"): 1,
    }
    versions = {("sql", "stable"): 0, ("sql", "candidate"): 2, ("general", "stable"): 0}
    assert by_labels(samples, "weight_version") == versions
    assert by_labels(samples, "canary_requests") == {("sql",): 1, ("general",): 0}
    acceptance = {("sql", "fast"): 0.5, ("sql", "slow"): 0.5}
    assert by_labels(samples, "live_acceptance") == acceptance
    assert by_labels(samples, "drifting") == {("sql",): 0, ("general",): 0}
    assert by_labels(samples, "expected_acceptance") == {
        ("sql", "candidate"): 0.6,
        ("sql", "served"): 0.4,
        ("general", "served"): 0.4,
    }


def test_the_last_gate_survives_a_restart_and_counts_restart(tmp_path: Path) -> None:
    topics = ("sql",)
    first = WeightRegistry(str(tmp_path / "a"), topics, "m", put=lambda x: x)
    first.publish("sql", weights(1.0), GATE)
    assert by_labels(registry_samples(first.metrics()), "weight_updates")[("sql", "deployed")] == 1
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # the first one holds the lock
    second = WeightRegistry(str(tmp_path / "b"), topics, "m", put=lambda x: x)
    samples = list(registry_samples(second.metrics()))
    assert by_labels(samples, "expected_acceptance")[("sql", "candidate")] == 0.6
    assert by_labels(samples, "weight_version") == {("sql", "stable"): 1}
    assert not any(by_labels(samples, "weight_updates").values())


def test_every_outcome_of_a_decision_is_counted() -> None:
    assert outcome_of({"outcome": "published", "canary": True}) == "canary"
    assert outcome_of({"outcome": "published"}) == "deployed"
    assert outcome_of({}) == "unknown"
    # Drift changes no weights, and has a gauge of its own; nor does a plateau.
    counted = set(get_args(Outcome)) - {"drift", "plateau"}
    assert {outcome_of({"outcome": o}) for o in counted} <= set(UPDATES)


def test_trainer_samples() -> None:
    hedge = Hedge(("sql", "general"))
    for number, gain in enumerate((0.9, 0.8)):
        hedge.add_row("sql", str(number))
        hedge.add_gain("sql", str(number), "sql", gain)
        hedge.add_gain("sql", str(number), "general", 0.1)
    status = TrainerStatus(
        "training",
        micro_steps=7,
        training_s=1.5,
        published=2,
        rejected=1,
        loss=0.25,
        vocabulary_coverage={"sql": 0.96},
    )
    counts = {"offered": 2, "refused": 0, "scores": 4}
    table = ScorerTable(**asdict(hedge.table()), waiting=0, on_trial=(), **counts)
    samples = list(trainer_samples(status, table))
    check(samples, "trainer")
    states = by_labels(samples, "trainer_state")
    assert [state for (state,), value in states.items() if value] == ["training"]
    assert by_labels(samples, "routing_weight") == {
        ("sql", expert): weight for expert, weight in hedge.weights("sql").items()
    }
    assert by_labels(samples, "vocabulary_coverage") == {("sql",): 0.96}


def test_every_trainer_state_has_a_label() -> None:
    rounds = Path(__file__).parents[4] / "actors" / "training" / "training_loop.py"
    named = set(re.findall(r'state="([^"]+)"', rounds.read_text(encoding="utf-8")))
    assert named | {TrainerStatus().state} == set(TRAINER_STATES)


@pytest.mark.parametrize("state", ["no usable records to learn from", "anything else"])
def test_a_trainer_without_a_trainable_topic(state: str) -> None:
    samples = list(trainer_samples(TrainerStatus(state), None))
    states = by_labels(samples, "trainer_state")
    assert [name for (name,), value in states.items() if value] == ["topic_not_trainable"]
    assert by_labels(samples, "trainer_micro_steps") == {(): 0}


def test_scheduler_samples() -> None:
    now = [100.0]
    scheduler = TrainerScheduler(0.1, clock=lambda: now[0])
    scheduler.report_load("r", 2, 0)
    assert not scheduler.may_train()
    now[0] = 120.0
    assert scheduler.may_train()
    scheduler.acquire_topic(TrainerIdentity("t"), "life", {"sql": 1.0})
    assert scheduler.acquire_permit("t", "life") is Permit.GRANTED
    now[0] = 130.0
    scheduler.report_load("r", 1, 0)
    now[0] = 130.5
    assert scheduler.acquire_permit("t", "life") is Permit.DENIED
    samples = list(scheduler_samples(scheduler.status(), scheduler.pop_yield_times()))
    check(samples, SCHEDULER)
    values = {sample.name: sample.value for sample in samples}
    assert values["training_permit_requests"] == 4
    assert values["training_permits_granted"] == 2
    assert values["training_permitted"] == 0
    assert values["training_yield_seconds"] == 0.5
    assert by_labels(samples, "training_leases_ended")[("revoked",)] == 1
    assert by_labels(samples, "training_leases")[("waiting",)] == 1
    assert by_labels(samples, "idle_seconds")[("used",)] == 10.0
    assert not list(scheduler.pop_yield_times())  # each is one observation
