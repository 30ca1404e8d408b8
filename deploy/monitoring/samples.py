"""Samples of metrics from the counts of each part. Pure.

Counters of rare events are exported from the start, at 0, so that the first event is an increase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.actors.engine.request import FINISH_NOT_FINITE
from paceline.actors.engine.stats import DraftStats, EngineStats, drain
from paceline.actors.replay.buffer import ShardStats
from paceline.actors.training.progress import TrainerStatus
from paceline.actors.training.scorer import ScorerTable
from paceline.actors.weights.slots import expert_of, is_candidate
from paceline.actors.weights.versions import RegistryMetrics
from paceline.cluster.scheduler.leases import SchedulerStatus
from paceline.deploy.monitoring.exporter import Sample
from paceline.deploy.monitoring.outcomes import OUTCOMES

if TYPE_CHECKING:  # imports torch
    from paceline.actors.speculation.pool.client import ExpertStats

UPDATES = (
    "deployed",
    "canary",
    "promoted",
    "rolled_back",
    "kept",
    "rejected",
    "refused",
    "restored",
    "added",
)
ROUTER_OUTCOMES = ("answered", "late", "failed", "skipped", "limited")
FAILOVERS = ("gone", "broken", "faults", "resumed", "given_up")
TRAINER_STATES = {
    "starting": "starting",
    "training": "training",
    "evaluating": "evaluating",
    "no new records": "no_new_records",
    "waiting for the registry": "waiting_for_registry",
    "waiting for the canary": "waiting_for_canary",
    "rolled back": "rolled_back",
    "not publishing": "not_publishing",
    "waiting for a topic": "waiting_for_topic",
    "waiting for a permit": "waiting_for_permit",
    "waiting for its shard": "waiting_for_shard",
}
LEASE_STATES = {
    "working": "working",
    "revoked": "revoked",
    "waiting": "waiting",
    "no topic": "no_topic",
}
_NOT_TRAINABLE = "topic_not_trainable"  # any other state: the reason


def slot_labels(draft: str) -> tuple[str, str]:
    """Labels ``draft`` and ``slot`` of a draft: ``sql@candidate`` is ("sql", "candidate")."""
    expert = expert_of(draft)
    if is_candidate(draft):
        return expert, "candidate"
    return expert, "stable" if draft == expert else "initial"


def target_samples(stats: EngineStats) -> Iterator[Sample]:
    """Samples of an engine; removes the latencies it returns."""
    yield from engine_samples(stats)
    requests = stats.requests
    for name, histogram in (
        ("request_queue_time_seconds", requests.queue_s),
        ("time_to_first_token_seconds", requests.first_token_s),
        ("inter_token_latency_seconds", requests.inter_token_s),
        ("request_time_per_output_token_seconds", requests.per_token_s),
    ):
        yield from (Sample(name, value) for value in drain(histogram.recent))


def engine_samples(stats: EngineStats) -> Iterator[Sample]:
    """Samples of an engine's counters and gauges."""
    yield from _speculation(stats)
    yield from _engine(stats)
    for name, totals in (
        ("prompt_tokens", stats.requests.prompt_tokens),
        ("generation_tokens", stats.requests.generation_tokens),
    ):
        for topic, total in list(totals.items()):
            yield Sample(name, total, (topic,))


def pool_samples(experts: Mapping[str, ExpertStats]) -> Iterator[Sample]:
    """Samples of ``TargetReplica.experts``."""
    for draft, stats in experts.items():
        yield Sample("expert_connected", float(stats["connected"]), (draft,))
        yield Sample("expert_requests", stats["answered"], (draft, "answered"))
        yield Sample("expert_requests", stats["silent"], (draft, "silent"))
        yield Sample("expert_requests", stats["late"], (draft, "late"))
        yield Sample("expert_requests", stats["lost"], (draft, "lost"))


def _engine(stats: EngineStats) -> Iterator[Sample]:
    rounds = stats.rounds
    yield Sample("decode_tokens", rounds.tokens)
    yield Sample("decode_seconds", rounds.seconds)
    yield Sample("draft_seconds", rounds.drafting_s)
    if stats.predicted_goodput is not None:
        yield Sample("predicted_goodput", stats.predicted_goodput)
    if rounds.plain_s > 0.0:
        yield Sample("plain_decode_seconds", rounds.plain_s)
    yield Sample("draft_failures", stats.draft_failures)
    yield Sample("num_preemptions", stats.preemptions)
    for name, count in zip(("queries", "hits"), stats.prefix_cache, strict=True):
        yield Sample(f"prefix_cache_{name}", count)
    yield Sample("corrupted_requests", stats.requests.finished[FINISH_NOT_FINITE])
    yield Sample("num_requests_running", stats.running)
    yield Sample("num_requests_waiting", stats.waiting)
    free = stats.kv_blocks_available
    yield Sample("kv_blocks", free, ("free",))
    yield Sample("kv_blocks", stats.kv_blocks - free, ("used",))


def _speculation(stats: EngineStats) -> Iterator[Sample]:
    for (topic, draft), counts in list(stats.rounds.counts.items()):
        labels = topic, *slot_labels(draft)
        yield Sample("spec_decode_num_rounds", counts.rounds, labels)
        yield Sample("spec_decode_num_drafts", counts.drafts, labels)
        yield Sample("spec_decode_num_draft_tokens", counts.draft_tokens, labels)
        yield Sample("spec_decode_num_accepted_tokens", counts.accepted_tokens, labels)
        for position, accepted in enumerate(counts.accepted_per_position()):
            name = "spec_decode_num_accepted_tokens_per_pos"
            yield Sample(name, accepted, (*labels, str(position)))
    for topic, (drafted, taken) in list(stats.rounds.suffixes.items()):
        yield Sample("spec_decode_num_suffix_tokens", drafted, (topic,))
        yield Sample("spec_decode_num_accepted_suffix_tokens", taken, (topic,))
    for draft, k in stats.chosen.items():
        yield Sample("num_speculative_tokens", k, slot_labels(draft))
    for draft, version in stats.drafts.items():
        if slot_labels(draft)[1] != "initial":
            yield Sample("draft_weight_version", version, slot_labels(draft))
    yield from _versions(list(stats.rounds.versions.items()))


def _versions(held: Iterable[tuple[tuple[str, int], DraftStats]]) -> Iterator[Sample]:
    """Sum an expert's version over its slots: after a promotion it has drafted in both."""
    totals: dict[tuple[str, str], tuple[int, int, int]] = {}
    for (draft, version), counts in held:
        key = expert_of(draft), str(version)
        drafts, drafted, accepted = totals.get(key, (0, 0, 0))
        totals[key] = (
            drafts + counts.drafts,
            drafted + counts.draft_tokens,
            accepted + counts.accepted_tokens,
        )
    for labels, (drafts, drafted, accepted) in totals.items():
        yield Sample("version_num_drafts", drafts, labels)
        yield Sample("version_num_draft_tokens", drafted, labels)
        yield Sample("version_num_accepted_tokens", accepted, labels)


@dataclass(frozen=True, slots=True)
class IngressStats:
    """Counts of an ingress replica since its start.

    Attributes:
        outcomes: generation requests by outcome.
        latencies: seconds, of complete answers since the last export.
        in_flight: admitted sequences that are not finished.
        router: requests to the router by outcome.
        router_latencies: seconds, since the last export.
        routed: requests by topic and drafting expert.
        failovers: by kind.
    """

    outcomes: Mapping[str, int]
    latencies: Iterable[float]
    in_flight: int
    router: Mapping[str, int]
    router_latencies: Iterable[float]
    routed: Mapping[str, Mapping[str, int]]
    failovers: Mapping[str, int]


def ingress_samples(stats: IngressStats) -> Iterator[Sample]:
    """Samples of an ingress replica."""
    yield from (Sample("requests", stats.outcomes.get(o, 0), (o,)) for o in OUTCOMES)
    yield from (Sample("e2e_request_latency_seconds", value) for value in stats.latencies)
    yield Sample("requests_in_flight", stats.in_flight)
    yield from (Sample("router_requests", stats.router.get(o, 0), (o,)) for o in ROUTER_OUTCOMES)
    yield from (Sample("router_latency_seconds", value) for value in stats.router_latencies)
    for topic, experts in stats.routed.items():
        for expert, count in experts.items():
            yield Sample("routed_requests", count, (topic, expert))
    yield from (Sample("failovers", stats.failovers.get(k, 0), (k,)) for k in FAILOVERS)


def registry_samples(metrics: RegistryMetrics) -> Iterator[Sample]:
    """Samples of ``WeightRegistry.metrics``."""
    for draft, status in metrics.topics.items():
        yield Sample("weight_version", status.stable, (draft, "stable"))
        if status.candidate is not None:
            yield Sample("weight_version", status.candidate, (draft, "candidate"))
        yield Sample("canary_requests", status.canary_requests, (draft,))
        yield Sample("drifting", float(status.drift.drifting), (draft,))
        for name, mean in (("fast", status.drift.fast), ("slow", status.drift.slow)):
            if mean is not None:
                yield Sample("live_acceptance", mean, (draft, name))
        for outcome in UPDATES:
            count = metrics.decisions.get((draft, outcome), 0)
            yield Sample("weight_updates", count, (draft, outcome))
    for draft, gate in metrics.gates.items():
        for weights, acceptance in zip(("candidate", "served"), gate, strict=True):
            if acceptance is not None:
                yield Sample("expected_acceptance", acceptance, (draft, weights))


def shard_samples(stats: ShardStats) -> Iterator[Sample]:
    """Samples of ``ReplayShard.stats``; a split without capacity has none."""
    for split, own in stats.splits.items():
        if own.capacity_bytes > 0:
            labels = stats.topic, split
            yield Sample("replay_records", own.records, labels)
            yield Sample("replay_bytes", own.bytes, labels)
            yield Sample("replay_capacity_bytes", own.capacity_bytes, labels)
    for metric, total in (
        ("replay_inserted", stats.inserted_total),
        ("replay_evicted", stats.evicted_total),
        ("replay_expired", stats.expired_total),
        ("replay_invalid", stats.refused_total),
        ("replay_left_out", stats.left_out_total),
    ):
        yield Sample(metric, total, (stats.topic,))


def trainer_samples(status: TrainerStatus, table: ScorerTable | None) -> Iterator[Sample]:
    """Samples of ``Trainer.status`` and ``Scorer.table``."""
    present = TRAINER_STATES.get(status.state, _NOT_TRAINABLE)
    for state in (*TRAINER_STATES.values(), _NOT_TRAINABLE):
        yield Sample("trainer_state", float(state == present), (state,))
    yield Sample("trainer_micro_steps", status.micro_steps)
    yield Sample("trainer_seconds", status.training_s)
    yield Sample("trainer_rounds", status.published, ("published",))
    yield Sample("trainer_rounds", status.rejected, ("rejected",))
    yield Sample("trainer_failures", status.failures)
    if status.loss is not None:
        yield Sample("trainer_loss", status.loss)
    for draft, coverage in status.vocabulary_coverage.items():
        yield Sample("vocabulary_coverage", coverage, (draft,))
    for topic, weights in ({} if table is None else table.weights).items():
        for expert, weight in weights.items():
            yield Sample("routing_weight", weight, (topic, expert))


def scheduler_samples(status: SchedulerStatus, yields: Iterable[float]) -> Iterator[Sample]:
    """Samples of ``TrainerScheduler.status`` and ``TrainerScheduler.pop_yield_times``."""
    yield Sample("training_permitted", float(status.may_train))
    yield Sample("training_paused", float(status.paused))
    yield Sample("draining", float(status.draining))
    yield Sample("training_permit_requests", status.permits_requested)
    yield Sample("training_permits_granted", status.permits_granted)
    yield Sample("serving_replicas", status.replicas)
    yield Sample("serving_replicas_pending", status.replicas_pending)
    yield Sample("trainers_preempted", len(status.trainers_preempted))
    yield Sample("trainers_wanted", status.trainers_wanted)
    states = [lease.state for lease in status.leases]
    for state, label in LEASE_STATES.items():
        yield Sample("training_leases", states.count(state), (label,))
    for reason, total in status.leases_ended.items():
        yield Sample("training_leases_ended", total, (reason,))
    for use, seconds in status.idle_s.items():
        yield Sample("idle_seconds", seconds, (use,))
    yield from (Sample("training_yield_seconds", seconds) for seconds in yields)
