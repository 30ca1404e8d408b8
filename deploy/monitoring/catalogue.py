"""Every metric that Paceline exports: name, kind, help text, labels. Pure data.

Names and meanings are vLLM's if it has the metric. Ray prefixes ``ray_`` and Prometheus' client
appends ``_total`` to counters. Metrics of Serve deployments also carry the labels ``application``,
``deployment`` and ``replica``, and all carry Ray's own (``SessionName``, ``NodeAddress``,
``WorkerId`` ...).

A counter's series lives as long as the node's agent, so a counter's label must have few values.
``weight_version`` has many and labels gauges only: a gauge's series expires seconds after its last
update.

``python -m paceline.deploy.monitoring.catalogue > docs/metrics.md`` writes the reference.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import StrEnum

from paceline.actors.engine.stats import LONG_S, SHORT_S, TOKENS

PREFIX = "paceline_"
RAY_PREFIX = "ray_"
VLLM_PREFIX = "vllm:"


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
        part: that exports it.
        help: one sentence.
        labels: without those that Ray adds.
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
        """Name in Ray."""
        return PREFIX + self.name

    @property
    def series(self) -> tuple[str, ...]:
        """Names in Prometheus."""
        return self._series(RAY_PREFIX + self.full_name)

    @property
    def vllm_series(self) -> tuple[str, ...]:
        """Names at the API's ``/metrics``, see `VLLM_METRICS`."""
        return self._series(VLLM_PREFIX + self.name)

    def _series(self, name: str) -> tuple[str, ...]:
        if self.kind is Kind.COUNTER:
            return (name + "_total",)
        if self.kind is Kind.HISTOGRAM:
            return (name + "_bucket", name + "_sum", name + "_count")
        return (name,)


TARGET, INGRESS, REGISTRY = "target", "ingress", "registry"
SHARD, TRAINER, SCHEDULER = "shard", "trainer", "scheduler"
PARTS = {
    TARGET: "Target replicas",
    INGRESS: "Ingress replicas",
    REGISTRY: "Weight registry",
    SHARD: "Replay shards",
    TRAINER: "Trainer",
    SCHEDULER: "Trainer scheduler",
}

_DRAFT = ("topic", "draft", "slot")
_VERSION = ("draft", "weight_version")


def _counter(part: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, part, text, labels)


def _gauge(part: str, name: str, text: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, part, text, labels)


def _histogram(part: str, name: str, text: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, part, text, buckets=buckets)


METRICS: tuple[Metric, ...] = (
    _counter(
        TARGET,
        "spec_decode_num_rounds",
        "Verification rounds of requests that may speculate, with or without drafts",
        *_DRAFT,
    ),
    _counter(TARGET, "spec_decode_num_drafts", "Rounds with drafts", *_DRAFT),
    _counter(TARGET, "spec_decode_num_draft_tokens", "Draft tokens", *_DRAFT),
    _counter(
        TARGET,
        "spec_decode_num_accepted_tokens",
        "Accepted draft tokens; bonus and recovered tokens do not count",
        *_DRAFT,
    ),
    _counter(
        TARGET,
        "spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens by position in the draft, from 0",
        *_DRAFT,
        "position",
    ),
    _counter(
        TARGET,
        "spec_decode_num_suffix_tokens",
        "Tokens drafted by suffixes, without a model; in no other metric",
        "topic",
    ),
    _counter(TARGET, "spec_decode_num_accepted_suffix_tokens", "Of these, accepted", "topic"),
    _counter(TARGET, "prompt_tokens", "Prompt tokens of the requests that arrived", "topic"),
    _counter(TARGET, "generation_tokens", "Generated tokens that were sent", "topic"),
    _counter(TARGET, "decode_tokens", "Tokens emitted by rounds that computed no prompt"),
    _counter(TARGET, "decode_seconds", "Seconds of these rounds"),
    _counter(TARGET, "draft_seconds", "Seconds of drafting, part of decode_seconds"),
    _counter(
        TARGET,
        "plain_decode_seconds",
        "Seconds that plain decoding would take for the same tokens, by the engine's cost table",
    ),
    _gauge(
        TARGET,
        "predicted_goodput",
        "Tokens per second that the controller predicts for its current choice",
    ),
    _gauge(
        TARGET,
        "num_speculative_tokens",
        "k, the controller's current choice; 0 if drafting does not pay",
        "draft",
        "slot",
    ),
    _counter(TARGET, "draft_failures", "Rounds decoded without drafts because a draft failed"),
    _counter(
        TARGET, "corrupted_requests", "Requests that failed because of NaN or infinite logits"
    ),
    _counter(TARGET, "num_preemptions", "Requests whose memory was freed and that were recomputed"),
    _counter(TARGET, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"),
    _counter(TARGET, "prefix_cache_hits", "Prompt tokens found in the prefix cache"),
    _gauge(TARGET, "num_requests_running", "Requests in the running batch"),
    _gauge(TARGET, "num_requests_waiting", "Requests that wait for a row or for KV blocks"),
    _gauge(TARGET, "kv_blocks", "Blocks of the target's KV cache", "state"),
    _gauge(
        TARGET, "draft_weight_version", "weight_version that a replica drafts with", "draft", "slot"
    ),
    _gauge(TARGET, "version_num_drafts", "Rounds drafted by a weight_version", *_VERSION),
    _gauge(TARGET, "version_num_draft_tokens", "Draft tokens of a weight_version", *_VERSION),
    _gauge(
        TARGET,
        "version_num_accepted_tokens",
        "Accepted draft tokens of a weight_version",
        *_VERSION,
    ),
    _counter(
        TARGET,
        "expert_requests",
        "Requests to an expert of the pool by outcome; none if drafts are colocated",
        "draft",
        "outcome",
    ),
    _gauge(
        TARGET,
        "expert_connected",
        "1 if an expert of the pool is connected, else 0; none if drafts are colocated",
        "draft",
    ),
    _histogram(
        TARGET,
        "request_queue_time_seconds",
        "From a request's arrival at the engine to its start",
        LONG_S,
    ),
    _histogram(
        TARGET,
        "time_to_first_token_seconds",
        "From a request's arrival at the engine to its first token",
        LONG_S,
    ),
    _histogram(
        TARGET,
        "inter_token_latency_seconds",
        "Between two rounds that gave tokens to a request, in the engine",
        SHORT_S,
    ),
    _histogram(
        TARGET,
        "request_time_per_output_token_seconds",
        "Mean time per token of a request after its first token, in the engine: coalescing of "
        "stream chunks delays a token by up to 1 / target.stream_chunks_per_s more",
        SHORT_S,
    ),
    _counter(INGRESS, "requests", "Generation requests by outcome", "outcome"),
    _histogram(
        INGRESS,
        "e2e_request_latency_seconds",
        "From a request's arrival to the end of its answer, of complete answers",
        LONG_S,
    ),
    _gauge(INGRESS, "requests_in_flight", "Admitted sequences that are not finished"),
    _counter(INGRESS, "router_requests", "Requests to the router by outcome", "outcome"),
    _histogram(INGRESS, "router_latency_seconds", "Latency of the router's answers", SHORT_S),
    _counter(
        INGRESS, "routed_requests", "Routed requests by topic and drafting expert", "topic", "draft"
    ),
    _counter(
        INGRESS,
        "failovers",
        "Failed attempts by reason, requests resumed after one, and requests given up",
        "kind",
    ),
    _gauge(
        REGISTRY,
        "weight_version",
        "weight_version that the registry announces for a slot",
        "draft",
        "slot",
    ),
    _counter(REGISTRY, "weight_updates", "Decisions on draft weights", "draft", "outcome"),
    _gauge(
        REGISTRY,
        "expected_acceptance",
        "Expected acceptance on held-out records at the last gate",
        "draft",
        "weights",
    ),
    _gauge(REGISTRY, "canary_requests", "Drafted requests of the candidate on trial", "draft"),
    _gauge(
        REGISTRY,
        "live_acceptance",
        "Fast and slow moving average of served requests' first-position acceptance",
        "draft",
        "mean",
    ),
    _gauge(
        REGISTRY,
        "drifting",
        "1 if the fast average has fallen below the slow one, else 0",
        "draft",
    ),
    _gauge(SHARD, "replay_records", "Records in the table", "topic", "split"),
    _gauge(SHARD, "replay_bytes", "Bytes of the records in the table", "topic", "split"),
    _gauge(SHARD, "replay_capacity_bytes", "Capacity of the table", "topic", "split"),
    _counter(SHARD, "replay_inserted", "Records that arrived", "topic"),
    _counter(SHARD, "replay_evicted", "Records dropped for lack of capacity", "topic"),
    _counter(SHARD, "replay_expired", "Records dropped after their retention time", "topic"),
    _counter(SHARD, "replay_invalid", "Messages that are not valid records", "topic"),
    _counter(
        SHARD, "replay_left_out", "Requests not recorded: no room, or a hanging shard", "topic"
    ),
    _gauge(TRAINER, "trainer_state", "1 for the trainer's current state, else 0", "state"),
    _counter(TRAINER, "trainer_micro_steps", "Micro-steps of training"),
    _counter(TRAINER, "trainer_seconds", "Seconds of micro-steps"),
    _counter(TRAINER, "trainer_rounds", "Training rounds that reached a decision", "outcome"),
    _counter(TRAINER, "trainer_failures", "Training rounds that raised an exception"),
    _gauge(TRAINER, "trainer_loss", "Loss of the last micro-step, nats"),
    _gauge(
        TRAINER,
        "vocabulary_coverage",
        "Share of the target's probability on the tokens that the served draft proposes from, on "
        "held-out records at its last training round; none if it proposes from all",
        "draft",
    ),
    _gauge(TRAINER, "routing_weight", "Measured weight of an expert for a topic", "topic", "draft"),
    _gauge(SCHEDULER, "training_permitted", "1 if a trainer may run now, else 0"),
    _gauge(SCHEDULER, "training_paused", "1 while the demo pauses training, else 0"),
    _gauge(SCHEDULER, "draining", "1 if the server admits no new requests, else 0"),
    _counter(
        SCHEDULER,
        "training_permit_requests",
        "Permits requested by trainers, scorer and for synthetic records",
    ),
    _counter(SCHEDULER, "training_permits_granted", "Permits of these that were granted"),
    _gauge(SCHEDULER, "serving_replicas", "Target replicas with a recent load report"),
    _gauge(
        SCHEDULER,
        "serving_replicas_pending",
        "Replicas of Serve that wait for resources; 0 if trainers book none",
    ),
    _gauge(SCHEDULER, "trainers_preempted", "Trainers that were stopped for a replica"),
    _gauge(SCHEDULER, "trainers_wanted", "Trainers that are to run, stopped ones too"),
    _gauge(
        SCHEDULER,
        "training_leases",
        "Trainers by state: working, revoked, waiting, without a topic",
        "state",
    ),
    _counter(SCHEDULER, "training_leases_ended", "Ended leases of trainers by reason", "reason"),
    _counter(
        SCHEDULER,
        "idle_seconds",
        "Idle seconds of serving: used for training, with a waiting trainer, with none",
        "use",
    ),
    _histogram(
        SCHEDULER,
        "training_yield_seconds",
        "From the request that ends an idle period, or a pause, to the trainer's stop",
        SHORT_S,
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}

# Of the target, at the API's own /metrics: without topic and draft, which vLLM does not have.
VLLM_METRICS: tuple[Metric, ...] = (
    *(
        replace(BY_NAME[name], labels=tuple({"position"} & set(BY_NAME[name].labels)))
        for name in (
            "spec_decode_num_drafts",
            "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens",
            "spec_decode_num_accepted_tokens_per_pos",
            "prompt_tokens",
            "generation_tokens",
            "prefix_cache_queries",
            "prefix_cache_hits",
            "num_preemptions",
            "corrupted_requests",
            "num_requests_running",
            "num_requests_waiting",
            "request_queue_time_seconds",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
        )
    ),
    _gauge(TARGET, "kv_cache_usage_perc", "Share of the KV cache's blocks in use, 1 is all"),
    _counter(TARGET, "request_success", "Finished requests by reason", "finished_reason"),
    _histogram(
        TARGET,
        "e2e_request_latency_seconds",
        "From a request's arrival at the engine to its end",
        LONG_S,
    ),
    _histogram(TARGET, "request_prompt_tokens", "Prompt tokens of a request", TOKENS),
    _histogram(TARGET, "request_generation_tokens", "Generated tokens of a request", TOKENS),
)

_HEAD = """# Metrics

What Paceline exports through Ray, by exporting part. Written by
`python -m paceline.deploy.monitoring.catalogue > docs/metrics.md`.
[operations.md](operations.md#monitoring) says how to see them.

Names are Prometheus' names. A histogram has `_bucket`, `_sum` and `_count`. Ray exports the
buckets, not the values: quantiles are as fine as the buckets, and `_sum` is an estimate from the
buckets' middles. Ray adds labels of its own (`SessionName`, `NodeAddress`, `WorkerId` ...), and
metrics of the target and the ingress also have `application`, `deployment` and `replica`.
"""


_VLLM_HEAD = """## The API's own /metrics

`GET /metrics` on the API's port has vLLM's names, over all target replicas, as of the request.
Every series also has the labels `model_name` and `engine`, the replica: sum over `engine`.
`ingress.metrics` guards it or turns it off.
"""


def markdown() -> str:
    """The text of docs/metrics.md."""
    sections = [_HEAD]
    for part, title in PARTS.items():
        of_part = [(m.series[0], m) for m in METRICS if m.part == part]
        sections += [f"## {title}\n", _table(of_part)]
    return "\n".join([*sections, _VLLM_HEAD, _table([(m.vllm_series[0], m) for m in VLLM_METRICS])])


def _table(metrics: list[tuple[str, Metric]]) -> str:
    rows = ["| name | kind | labels | help |", "|---|---|---|---|"]
    for series, metric in metrics:
        name, labels = series.removesuffix("_bucket"), ", ".join(metric.labels) or "-"
        rows.append(f"| `{name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown())
