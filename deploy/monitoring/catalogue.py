"""Every metric that Paceline exports: name, kind, help text, labels. Pure data.

Names and meanings of the ``spec_decode_`` metrics, of token counts and latencies are vLLM's. Ray
prefixes ``ray_`` and Prometheus' client appends ``_total`` to counters; what Serve deployments
export also carries ``application``, ``deployment`` and ``replica``, and everything what Ray adds
(``SessionName``, ``NodeAddress``, ``WorkerId`` ...).

A counter's series lives as long as the node's agent, so no label of a counter may take ever new
values. A ``weight_version`` does: it labels gauges alone, whose series go some seconds after nobody
sets them any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "paceline_"
RAY_PREFIX = "ray_"


class Kind(StrEnum):
    """Prometheus' kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric.

    Attributes:
        name: without any prefix.
        kind: see Kind.
        part: who exports it.
        help: one sentence.
        labels: its own ones.
        buckets: upper bounds of a histogram's buckets, increasing.
    """

    name: str
    kind: Kind
    part: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def full_name(self) -> str:
        """As Ray is told."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names as Prometheus has them."""
        name = RAY_PREFIX + self.full_name
        if self.kind is Kind.COUNTER:
            return (name + "_total",)
        if self.kind is Kind.HISTOGRAM:
            return (name + "_bucket", name + "_sum", name + "_count")
        return (name,)


TARGET, INGRESS, REGISTRY = "target", "ingress", "registry"
SHARD, TRAINER, BOARD = "shard", "trainer", "board"
PARTS = (TARGET, INGRESS, REGISTRY, SHARD, TRAINER, BOARD)

_COUNT, _GAUGE, _TIMES = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
_DRAFT = ("topic", "draft", "slot")
_VERSION = ("draft", "weight_version")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

METRICS: tuple[Metric, ...] = (
    Metric(
        "spec_decode_num_rounds",
        _COUNT,
        TARGET,
        "Verification rounds of requests that may speculate, with drafts or without",
        _DRAFT,
    ),
    Metric("spec_decode_num_drafts", _COUNT, TARGET, "Of these rounds, those with drafts", _DRAFT),
    Metric("spec_decode_num_draft_tokens", _COUNT, TARGET, "Drafted tokens", _DRAFT),
    Metric(
        "spec_decode_num_accepted_tokens",
        _COUNT,
        TARGET,
        "Drafted tokens that were accepted; bonus and recovered tokens are not among them",
        _DRAFT,
    ),
    Metric(
        "spec_decode_num_accepted_tokens_per_pos",
        _COUNT,
        TARGET,
        "Accepted tokens by their position in the draft, from 0",
        (*_DRAFT, "position"),
    ),
    Metric("prompt_tokens", _COUNT, TARGET, "Tokens of the prompts that came", ("topic",)),
    Metric("generation_tokens", _COUNT, TARGET, "Tokens of the answers", ("topic",)),
    Metric("decode_tokens", _COUNT, TARGET, "Tokens that rounds emitted"),
    Metric("decode_seconds", _COUNT, TARGET, "Seconds of rounds, without the reading of prompts"),
    Metric("draft_seconds", _COUNT, TARGET, "Of these, seconds of drafting"),
    Metric(
        "plain_decode_seconds",
        _COUNT,
        TARGET,
        "Seconds that plain decoding would take for the same tokens, by the engine's step costs",
    ),
    Metric(
        "predicted_goodput",
        _GAUGE,
        TARGET,
        "Tokens per second that the controller expects of its present choice",
    ),
    Metric(
        "num_speculative_tokens",
        _GAUGE,
        TARGET,
        "The controller's present choice of k, 0 where drafting does not pay",
        ("draft", "slot"),
    ),
    Metric(
        "draft_failures", _COUNT, TARGET, "Rounds that went on without drafts since a draft failed"
    ),
    Metric(
        "not_finite_requests",
        _COUNT,
        TARGET,
        "Requests that failed because their logits were NaN or infinite",
    ),
    Metric("preemptions", _COUNT, TARGET, "Requests that gave up their memory and began anew"),
    Metric("num_requests_running", _GAUGE, TARGET, "Requests that are decoded"),
    Metric("num_requests_waiting", _GAUGE, TARGET, "Requests that wait for a row or for memory"),
    Metric("kv_blocks", _GAUGE, TARGET, "Blocks of the target's keys and values", ("state",)),
    Metric(
        "draft_weight_version",
        _GAUGE,
        TARGET,
        "The weight_version that a replica's draft has",
        ("draft", "slot"),
    ),
    Metric("version_num_drafts", _GAUGE, TARGET, "Rounds that a weight_version drafted", _VERSION),
    Metric(
        "version_num_draft_tokens", _GAUGE, TARGET, "Tokens that a weight_version drafted", _VERSION
    ),
    Metric(
        "version_num_accepted_tokens",
        _GAUGE,
        TARGET,
        "Of these, those that were accepted",
        _VERSION,
    ),
    Metric(
        "expert_answers",
        _COUNT,
        TARGET,
        "Questions to an expert of the pool by what came of them; none where drafts are colocated",
        ("draft", "outcome"),
    ),
    Metric(
        "expert_connected",
        _GAUGE,
        TARGET,
        "1 where an expert of the pool is connected, else 0; none where drafts are colocated",
        ("draft",),
    ),
    Metric(
        "request_queue_time_seconds",
        _TIMES,
        TARGET,
        "From a request's arrival at the engine to its beginning",
        buckets=_LONG,
    ),
    Metric(
        "time_to_first_token_seconds",
        _TIMES,
        TARGET,
        "From a request's arrival at the engine to its first token",
        buckets=_LONG,
    ),
    Metric(
        "time_per_output_token_seconds",
        _TIMES,
        TARGET,
        "Time between a request's tokens after the first, its mean; of the engine: where many "
        "stream, a token may wait up to 50 ms to be sent",
        buckets=_SHORT,
    ),
    Metric(
        "requests", _COUNT, INGRESS, "Requests for answers by what became of them", ("outcome",)
    ),
    Metric(
        "e2e_request_latency_seconds",
        _TIMES,
        INGRESS,
        "From a request's arrival to the end of its answer, where that is whole",
        buckets=_LONG,
    ),
    Metric("requests_in_flight", _GAUGE, INGRESS, "Sequences that were let in and are under way"),
    Metric(
        "router_requests",
        _COUNT,
        INGRESS,
        "Questions to the router by what came of them",
        ("outcome",),
    ),
    Metric(
        "router_latency_seconds", _TIMES, INGRESS, "Time of the router's answers", buckets=_SHORT
    ),
    Metric(
        "routed_requests",
        _COUNT,
        INGRESS,
        "Routed requests by topic and by the expert that drafts",
        ("topic", "draft"),
    ),
    Metric(
        "failovers",
        _COUNT,
        INGRESS,
        "Attempts that failed by why, requests resumed after one, and requests given up",
        ("kind",),
    ),
    Metric(
        "weight_version",
        _GAUGE,
        REGISTRY,
        "The weight_version that is announced for a slot",
        ("draft", "slot"),
    ),
    Metric("weight_updates", _COUNT, REGISTRY, "Decisions on draft weights", ("draft", "outcome")),
    Metric(
        "expected_acceptance",
        _GAUGE,
        REGISTRY,
        "Expected acceptance on held-out records at the last gate",
        ("draft", "of"),
    ),
    Metric(
        "canary_requests", _GAUGE, REGISTRY, "Requests that a candidate is judged by", ("draft",)
    ),
    Metric("replay_records", _GAUGE, SHARD, "Records that are kept", ("topic", "split")),
    Metric("replay_bytes", _GAUGE, SHARD, "Bytes of these records", ("topic", "split")),
    Metric(
        "replay_capacity_bytes", _GAUGE, SHARD, "Bytes that there is room for", ("topic", "split")
    ),
    Metric("replay_inserted", _COUNT, SHARD, "Records that came", ("topic",)),
    Metric("replay_evicted", _COUNT, SHARD, "Records that had no room or made way", ("topic",)),
    Metric("replay_expired", _COUNT, SHARD, "Records dropped past their retention", ("topic",)),
    Metric("replay_refused", _COUNT, SHARD, "What came and is no record", ("topic",)),
    Metric("replay_left_out", _COUNT, SHARD, "Requests of a flood that left no record", ("topic",)),
    Metric("trainer_state", _GAUGE, TRAINER, "1 for what the trainer is at, else 0", ("state",)),
    Metric("trainer_micro_steps", _COUNT, TRAINER, "Micro-steps of training"),
    Metric("trainer_seconds", _COUNT, TRAINER, "Seconds of these"),
    Metric("trainer_rounds", _COUNT, TRAINER, "Rounds that came to a decision", ("outcome",)),
    Metric("trainer_failures", _COUNT, TRAINER, "Rounds that raised"),
    Metric("trainer_loss", _GAUGE, TRAINER, "Loss of the last micro-step, nats"),
    Metric(
        "live_acceptance",
        _GAUGE,
        TRAINER,
        "Mean first-position acceptance of served requests: a fast mean and a slow one",
        ("draft", "mean"),
    ),
    Metric(
        "drifting", _GAUGE, TRAINER, "1 where the fast mean has fallen below the slow", ("draft",)
    ),
    Metric(
        "routing_weight",
        _GAUGE,
        TRAINER,
        "Measured weight of an expert for a topic",
        ("topic", "draft"),
    ),
    Metric("training_leave", _GAUGE, BOARD, "1 where a trainer may run now, else 0"),
    Metric("training_paused", _GAUGE, BOARD, "1 where an operator has paused training, else 0"),
    Metric("draining", _GAUGE, BOARD, "1 where the server takes nothing new, else 0"),
    Metric("training_leave_asked", _COUNT, BOARD, "Times that a trainer asked for leave"),
    Metric("training_leave_granted", _COUNT, BOARD, "Of these, times that it got it"),
    Metric("serving_replicas", _GAUGE, BOARD, "Target replicas that have reported lately"),
    Metric(
        "serving_replicas_pending",
        _GAUGE,
        BOARD,
        "Replicas of Serve that wait for room, where trainers could make some",
    ),
    Metric("trainers_freed", _GAUGE, BOARD, "Trainers that were ended to make room"),
    Metric(
        "training_leases",
        _GAUGE,
        BOARD,
        "Trainers that compute, are to yield, have a topic and wait, or have none",
        ("state",),
    ),
    Metric(
        "training_leases_ended", _COUNT, BOARD, "Leases of trainers by how they ended", ("how",)
    ),
    Metric(
        "idle_seconds",
        _COUNT,
        BOARD,
        "Seconds in which serving was idle: used, with a trainer that waits, and with none",
        ("use",),
    ),
    Metric(
        "training_yield_seconds",
        _TIMES,
        BOARD,
        "From a request that ends idleness, or a pause, to the trainer's stop",
        buckets=_SHORT,
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
