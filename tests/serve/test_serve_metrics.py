"""The real export of a node: metric families, kinds and labels."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest
import ray
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from paceline.deploy.monitoring.catalogue import (
    INGRESS,
    METRICS,
    REGISTRY,
    SCHEDULER,
    SHARD,
    TARGET,
    Kind,
)

pytestmark = pytest.mark.cluster

CHAT = {"model": "paceline", "messages": [{"role": "user", "content": "List all files"}]}
# Learning is off, and drafts are colocated.
LATER = {
    "expected_acceptance",
    "expert_requests",
    "expert_connected",
    "training_yield_seconds",
    "vocabulary_coverage",
}
WAIT_S = 40.0


def scraped() -> Iterator[Family]:
    """Paceline's metric families of every node."""
    for node in ray.nodes():
        address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for family in text_string_to_metric_families(httpx.get(address, timeout=10).text):
            if family.name.startswith("ray_paceline_"):
                yield family


def total(families: dict[str, Family], name: str, **labels: str) -> float:
    found = families.get(f"ray_paceline_{name}")
    samples = found.samples if found is not None else []
    own = (s for s in samples if not s.name.endswith(("_created", "_bucket", "_sum")))
    return sum(s.value for s in own if labels.items() <= s.labels.items())


@pytest.fixture(scope="module")
def families(base_url: str) -> dict[str, Family]:
    """The export after some requests."""
    ask = {"max_tokens": 24, "ignore_eos": True, "speculative": {"draft": "sql"}}
    with httpx.Client(base_url=base_url, timeout=120) as http:
        for stream in (False, True):
            for k in (3, None):
                body = CHAT | ask | {"stream": stream}
                body["speculative"] = {"draft": "sql", "num_speculative_tokens": k}
                assert http.post("/v1/chat/completions", json=body).status_code == 200
        assert http.post("/v1/chat/completions", json=CHAT | ask | {"n": 0}).status_code == 400
        for _ in range(2):
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    wanted = {m.name for m in METRICS if m.part in (TARGET, INGRESS, REGISTRY, SHARD, SCHEDULER)}
    deadline = time.monotonic() + WAIT_S
    while True:
        found = {family.name: family for family in scraped()}
        lacking = {name for name in wanted - LATER if f"ray_paceline_{name}" not in found}
        counts = [
            total(found, "generation_tokens", topic="sql") >= 4 * 24,
            total(found, "time_to_first_token_seconds") >= 6,
            total(found, "requests", outcome="ok") >= 6,
            total(found, "requests", outcome="refused") >= 1,
        ]
        if not lacking and all(counts):
            return found
        assert time.monotonic() < deadline, (lacking, counts)
        time.sleep(0.3)


def test_kinds_and_labels_are_the_catalogue_s(families: dict[str, Family]) -> None:
    for metric in METRICS:
        family = families.get(f"ray_{metric.full_name}")
        if family is None:
            continue
        assert family.type == metric.kind, metric.name
        series = {sample.name for sample in family.samples if not sample.name.endswith("_created")}
        assert series <= set(metric.series), metric.name
        for sample in family.samples:
            assert set(metric.labels) <= set(sample.labels), sample
            if metric.part in (TARGET, INGRESS):
                assert sample.labels["deployment"] == metric.part
        if metric.kind is Kind.HISTOGRAM:
            bounds = {s.labels["le"] for s in family.samples if s.name.endswith("_bucket")}
            assert {float(bound) for bound in bounds} == {*metric.buckets, float("inf")}


def test_counts_are_those_of_the_requests(families: dict[str, Family]) -> None:
    assert total(families, "requests", outcome="ok") >= 6
    assert total(families, "requests", outcome="refused") >= 1
    assert total(families, "requests", outcome="failed") == 0
    sql = {"topic": "sql", "draft": "sql", "slot": "stable"}
    drafts = total(families, "spec_decode_num_drafts", **sql)
    drafted = total(families, "spec_decode_num_draft_tokens", **sql)
    accepted = total(families, "spec_decode_num_accepted_tokens", **sql)
    assert 0 < drafts <= drafted
    assert accepted <= drafted
    per_position = total(families, "spec_decode_num_accepted_tokens_per_pos", **sql)
    assert per_position == accepted
    assert total(families, "version_num_draft_tokens", draft="sql", weight_version="0") >= drafted
    assert total(families, "time_to_first_token_seconds") >= 6
    assert total(families, "plain_decode_seconds") > 0
    assert total(families, "draft_failures") == 0


def test_counters_of_rare_events_are_exported_at_zero(families: dict[str, Family]) -> None:
    updates = families["ray_paceline_weight_updates"].samples
    rolled_back = [s for s in updates if s.labels["outcome"] == "rolled_back"]
    assert {s.labels["draft"] for s in rolled_back} >= {"general", "sql"}
    assert {s.value for s in rolled_back} == {0.0}


def test_no_series_names_a_request(families: dict[str, Family]) -> None:
    values = {v for f in families.values() for s in f.samples for v in s.labels.values()}
    assert not [value for value in values if re.match(r"(chat)?cmpl-", value)]


def own(base_url: str, *names: str) -> list[float]:
    """Values at the API's own /metrics, summed over their series."""
    answer = httpx.get(f"{base_url}/metrics", timeout=60)
    assert answer.headers["content-type"].startswith("text/plain")
    sums = dict.fromkeys(names, 0.0)
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name in sums:
                assert sample.labels["model_name"] == "paceline"
                sums[sample.name] += sample.value
    return list(sums.values())


def test_the_api_s_own_metrics_are_those_of_the_requests_at_once(base_url: str) -> None:
    """As `vllm bench serve` reads them: before and after, without waiting for an export."""
    counters = [
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:request_success_total",
    ]
    before = own(base_url, *counters)
    body = CHAT | {"max_tokens": 24, "ignore_eos": True}
    body["speculative"] = {"draft": "sql", "num_speculative_tokens": 3}
    answer = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).json()
    figures, usage = answer["metrics"]["speculative_decoding"], answer["usage"]
    after = own(base_url, *counters)
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        figures["num_draft_tokens"],
        figures["num_accepted_draft_tokens"],
        usage["prompt_tokens"],
        24,
        1,
        1,
        1,
    ]
    assert httpx.head(f"{base_url}/metrics", timeout=60).status_code == 200


def test_the_prefix_cache_s_hits_are_the_cached_tokens_of_the_answers(base_url: str) -> None:
    counters = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    long = {"role": "user", "content": "Name every tool in this shed, one after the other."}
    body = CHAT | {"messages": [long], "max_tokens": 4}
    httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60)
    before = own(base_url, *counters)
    usage = httpx.post(f"{base_url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
    queries, hits = (b - a for a, b in zip(before, own(base_url, *counters), strict=True))
    assert (queries, hits) == (
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )
    assert hits > 0
