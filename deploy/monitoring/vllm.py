"""The API's own ``/metrics``: vLLM's names in Prometheus' text format. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from paceline.actors.engine.request import FINISH_ABORT, FINISH_LENGTH, FINISH_STOP
from paceline.actors.engine.stats import EngineStats, Histogram
from paceline.deploy.monitoring.catalogue import BY_NAME, VLLM_METRICS, Kind, Metric
from paceline.deploy.monitoring.exporter import Sample
from paceline.deploy.monitoring.samples import engine_samples

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FINISHED = (FINISH_STOP, FINISH_LENGTH, FINISH_ABORT, "error")
_BY_NAME = {metric.name: metric for metric in VLLM_METRICS}


class Buckets(NamedTuple):
    """A histogram since the start.

    Attributes:
        name: of one of `VLLM_METRICS`.
        counts: values per bucket, one more than the metric has.
        sum: of all values.
    """

    name: str
    counts: tuple[int, ...]
    sum: float


class ReplicaMetrics(NamedTuple):
    """What one target replica has counted."""

    replica_id: str
    samples: tuple[Sample, ...]
    histograms: tuple[Buckets, ...]


def replica_metrics(replica_id: str, stats: EngineStats) -> ReplicaMetrics:
    """Sum an engine's statistics over topics and drafts; counters start at 0."""
    totals: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for metric in VLLM_METRICS:
        if metric.kind is not Kind.HISTOGRAM and not metric.labels:
            totals[metric.name, ()] = 0.0
    for name, value, labels in engine_samples(stats):
        if name in _BY_NAME:
            pairs = zip(BY_NAME[name].labels, labels, strict=True)
            kept = tuple(value for label, value in pairs if label in _BY_NAME[name].labels)
            totals[name, kept] += value
    totals["kv_cache_usage_perc", ()] = 1.0 - stats.kv_blocks_available / stats.kv_blocks
    for reason in _FINISHED:
        totals["request_success", (reason,)] = 0.0
    for reason, count in list(stats.requests.finished.items()):
        totals["request_success", (reason if reason in _FINISHED else "error",)] += count
    samples = (Sample(name, value, labels) for (name, labels), value in totals.items())
    return ReplicaMetrics(replica_id, tuple(samples), tuple(_histograms(stats)))


def _histograms(stats: EngineStats) -> Iterator[Buckets]:
    requests = stats.requests
    histograms: dict[str, Histogram] = {
        "request_queue_time_seconds": requests.queue_s,
        "time_to_first_token_seconds": requests.first_token_s,
        "inter_token_latency_seconds": requests.inter_token_s,
        "request_time_per_output_token_seconds": requests.per_token_s,
        "e2e_request_latency_seconds": requests.e2e_s,
        "request_prompt_tokens": requests.prompt_lengths,
        "request_generation_tokens": requests.output_lengths,
    }
    for name, histogram in histograms.items():
        yield Buckets(name, tuple(histogram.counts), histogram.sum)


def exposition(model_name: str, replicas: Iterable[ReplicaMetrics]) -> str:
    """The text of all replicas' metrics, a series each."""
    every = sorted(replicas)
    lines: list[str] = []
    for metric in VLLM_METRICS:
        family = metric.vllm_series[0].removesuffix("_bucket")
        lines += [f"# HELP {family} {metric.help}.", f"# TYPE {family} {metric.kind}"]
        for replica in every:
            own = {"model_name": model_name, "engine": replica.replica_id}
            lines += _series(metric, replica, own)
    return "\n".join([*lines, ""])


def _series(metric: Metric, replica: ReplicaMetrics, own: dict[str, str]) -> Iterator[str]:
    for name, value, labels in replica.samples:
        if name == metric.name:
            further = dict(zip(metric.labels, labels, strict=True))
            yield _line(metric.vllm_series[0], own | further, value)
    for name, counts, total in replica.histograms:
        if name == metric.name:
            bucket, of_sum, of_count = metric.vllm_series
            bounds = (*map(str, metric.buckets), "+Inf")
            for bound, count in zip(bounds, accumulate(counts), strict=True):
                yield _line(bucket, own | {"le": bound}, count)
            yield _line(of_sum, own, total)
            yield _line(of_count, own, sum(counts))


def _line(series: str, labels: dict[str, str], value: float) -> str:
    pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
    return f"{series}{{{pairs}}} {float(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
